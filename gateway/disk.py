"""Free space of the file systems that the gateway writes to, and the reserve on each.

The ledger must be able to commit after uploads have filled the disk, so clients' files are only
stored above the reserve, which is left to SQL and the logs. A network file system can hang, so call
these functions from a thread if one can be in use.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from sqlalchemy.engine import make_url

from gateway.settings import Settings

RESERVE_BYTES: Final = 512 * 1024 * 1024
RESERVE_SHARE: Final = 20
"""The default reserve is at most one twentieth (5 %) of the disk."""


def free_bytes(path: Path) -> int:
    """Return the bytes that this process can still write on the file system of a path.

    The path need not exist yet: its nearest existing parent decides.
    """
    return shutil.disk_usage(_existing(path)).free


def reserve_bytes(path: Path, wanted: int | None) -> int:
    """Return the reserve of a path's file system: the setting or, without it, the default."""
    if wanted is not None:
        return wanted
    return min(RESERVE_BYTES, shutil.disk_usage(_existing(path)).total // RESERVE_SHARE)


def has_room(path: Path, reserve: int | None, *, size_bytes: int = 0) -> bool:
    """Whether ``size_bytes`` more fit on the file system of a path without using its reserve.

    ``reserve`` is ``TOLLGATE_DISK_RESERVE_BYTES``; None is the default for this disk.
    """
    return free_bytes(path) - size_bytes >= reserve_bytes(path, reserve)


def written_paths(settings: Settings) -> tuple[Path, ...]:
    """List the local paths that the gateway writes to: the home, SQLite's file and the blobs.

    Remote servers and stores manage their own disks.
    """
    paths = [settings.home]
    database = make_url(settings.sql_url)
    if database.get_backend_name() == "sqlite" and database.database:
        paths.append(Path(database.database).parent)
    blobs = urlsplit(settings.blobs)
    if blobs.scheme == "file":
        paths.append(Path(unquote(blobs.path)))
    return tuple(dict.fromkeys(path.resolve() for path in paths))


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path

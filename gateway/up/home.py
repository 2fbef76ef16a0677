"""The state directory of an installation: accessible only to its owner.

``tollgate up`` restricts its permissions before anything else runs. The umask does the same for all
files that the children create afterwards, including blobs, logs and the database.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path
from typing import Final

UMASK: Final = 0o077
DIRECTORY_MODE: Final = 0o700
KEYS_FILE: Final = "first-keys.env"
"""File of the keys of the first account, which the first start creates."""
FILE_MODE: Final = 0o600

_QUEUE_FILES: Final = ("appendonlydir", "appendonly.aof", "dump.rdb")
"""Files of embedded queue servers of earlier versions. They contain prompts and are not needed,
because the ledger refills an empty queue."""


def secure(home: Path) -> None:
    """Create the home directory, or restrict the permissions of an existing one and its content."""
    os.umask(UMASK)
    home.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    (home / "logs").mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    # Traversing a large home is slow, and not needed if the directory itself is already restricted.
    if stat.S_IMODE(home.stat().st_mode) & UMASK:
        home.chmod(DIRECTORY_MODE)
        for directory, _, names in os.walk(home):
            _close(Path(directory), DIRECTORY_MODE)
            for name in names:
                _close(Path(directory, name), FILE_MODE)
    for path in (home, home / "logs"):
        for file in path.iterdir():
            _close(file, DIRECTORY_MODE if file.is_dir() else FILE_MODE)


def remove_queue_files(home: Path) -> None:
    """Delete the files of an earlier version's queue server."""
    for name in _QUEUE_FILES:
        path = home / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _close(path: Path, mode: int) -> None:
    """Remove the permissions of group and others, without following symbolic links."""
    if path.is_symlink():
        return
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)) and (
            stat.S_IMODE(found.st_mode) & UMASK
        ):
            path.chmod(mode)

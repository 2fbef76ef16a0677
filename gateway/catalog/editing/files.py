"""The catalog file on disk: reading it, replacing it atomically, and the texts that it had before.

A save names the digest of the text that it replaces, so that nobody's change is lost. The file is
locked meanwhile, against another gateway of the same machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gateway.catalog.reloads import digest_of

KEPT: Final = "catalog"
"""Directory of earlier texts, in the home."""
KEPT_MAX: Final = 10
"""Earlier texts of the file that are kept."""
_KEPT: Final = re.compile(r"(\d{8}T\d{6}\.\d{6}Z)-[0-9a-f]{8}\.yaml")
_MOMENT: Final = "%Y%m%dT%H%M%S.%fZ"


class FileChanged(Exception):
    """The file was changed by somebody else; ``content`` is what it has now."""

    def __init__(self, content: bytes) -> None:
        super().__init__("the catalog file was changed meanwhile")
        self.content = content


class NotWritable(Exception):
    """The file cannot be replaced; the text says why."""


@dataclass(frozen=True, slots=True)
class KeptText:
    """A text that the file had, until the moment when it was replaced."""

    name: str
    replaced_at: datetime
    size: int


def why_not_writable(path: Path) -> str | None:
    """Return why a file cannot be replaced; None if it can be."""
    path = path.resolve()
    if not path.is_file():
        return f"{path} does not exist"
    for each, what in ((path, "the file"), (path.parent, "its directory")):
        if not os.access(each, os.W_OK):
            return f"{what} is not writable for the gateway: {each}"
    if os.path.ismount(path):
        return f"{path} is mounted by itself, so that it cannot be replaced; mount its directory"
    return None


def save_file(path: Path, content: bytes, expected_sha256: str, *, kept: Path) -> bytes:
    """Replace a file, and return what it was; ``kept`` is the directory of earlier texts.

    Raise ``FileChanged`` unless the file has the expected digest, ``NotWritable``.
    """
    path = path.resolve()
    if (why := why_not_writable(path)) is not None:
        raise NotWritable(why)
    try:
        with _locked(path):
            before = path.read_bytes()
            if digest_of(before) != expected_sha256:
                raise FileChanged(before)
            _keep(before, kept)
            write_file(path, content)
    except OSError as error:
        raise NotWritable(f"{path}: {error.strerror}") from error
    return before


def write_file(path: Path, content: bytes, check: Callable[[Path], object] | None = None) -> None:
    """Replace a file atomically and durably, with the same permissions.

    ``check`` may refuse the new file by an exception: it is called with its path beforehand.
    """
    path = path.resolve()
    # In the same directory, since the paths in a catalog are relative to it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check(Path(name))
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def kept_texts(kept: Path) -> list[KeptText]:
    """Return the earlier texts of the file, newest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for each in kept.iterdir():
            if (name := _KEPT.fullmatch(each.name)) is not None:
                at = datetime.strptime(name[1], _MOMENT).replace(tzinfo=UTC)
                found.append(KeptText(each.name, at, each.stat().st_size))
    return sorted(found, key=lambda one: one.name, reverse=True)


def read_kept(kept: Path, name: str) -> bytes:
    """Return an earlier text. Raise ``LookupError`` if there is none of this name."""
    if name not in {one.name for one in kept_texts(kept)}:
        raise LookupError(f"no earlier catalog is called {name!r}")
    return (kept / name).read_bytes()


def _keep(content: bytes, kept: Path) -> None:
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{datetime.now(UTC).strftime(_MOMENT)}-{digest_of(content)[:8]}.yaml"
    (kept / name).write_bytes(content)
    for old in kept_texts(kept)[KEPT_MAX:]:
        (kept / old.name).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file. Whoever waited for it finds that the file was replaced."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

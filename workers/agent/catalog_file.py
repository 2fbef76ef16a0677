"""Follows the worker's catalog file: reads it again when its content has changed.

Knows neither queue nor engines. A file that is wrong or cannot be read changes nothing: the reason
is logged and announced, and the models of the last good content stay. An editor may write a file in
parts, and the first part of a catalog may be a valid catalog. So a change counts once the file has
not changed for ``LOOK_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from workers.contract.models import ModelSpec

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker does with its catalog: models to serve, and why it does not serve others."""

    specs: Sequence[ModelSpec]
    unavailable: Mapping[str, str]


_Stamp: TypeAlias = tuple[int, int, int] | None


class CatalogFile:
    """``interpret`` reads the file; it raises ``OSError`` or ``ValueError``."""

    def __init__(self, path: Path, interpret: Callable[[Path], Assignment]) -> None:
        self.problem = ""
        """Why the file could not be followed; empty if it could."""
        self._path = path
        self._interpret = interpret
        self._stamp: _Stamp = None
        self._digest = b""
        self._hurry = asyncio.Event()

    def read(self) -> Assignment:
        """Read the file. Raise ``OSError`` or ``ValueError``."""
        self._stamp = self._look()
        self._digest = hashlib.sha256(self._path.read_bytes()).digest()
        return self._interpret(self._path)

    def hurry(self) -> None:
        """Read the file now, whether or not it has changed."""
        self._hurry.set()

    async def follow(self, changed: Callable[[Assignment | None], None]) -> None:
        """Call ``changed`` after each change, with None if the file cannot be used now."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._hurry.wait()
            hurried = self._hurry.is_set()
            self._hurry.clear()
            stamp = self._look()
            if not hurried and stamp == self._stamp:
                continue
            if not hurried:
                await asyncio.sleep(LOOK_S)
                if self._look() != stamp:
                    continue
            await self._read_again(changed, always=hurried)

    async def _read_again(
        self, changed: Callable[[Assignment | None], None], *, always: bool
    ) -> None:
        before, problem = self._digest, self.problem
        try:
            found = await asyncio.to_thread(self.read)
        except (OSError, ValueError) as error:
            self.problem = " ".join(str(error).split())
            if self.problem != problem:
                log.error("catalog not followed", extra={"problem": self.problem})
                changed(None)
            return
        self.problem = ""
        if always or problem or self._digest != before:
            log.info("catalog read again", extra={"models": len(found.specs)})
            changed(found)

    def _look(self) -> _Stamp:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

"""Extracts files from a JSON body while it is received.

A data URI of more than ``INLINE_MAX`` characters is decoded into a temporary file as it arrives and
replaced by a short placeholder with its SHA-256. So a body of any size needs little memory and is
parsed quickly, and equal bodies stay equal. Placeholders are valid only within their request.
Strings that are text (``TEXTS``) are not changed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextvars
import hashlib
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

INLINE_MAX: Final = 64 * 1024
"""Maximum length of data URIs that stay in the body, in characters."""
HEAD_MAX: Final = 200
"""Maximum length of a data URI before its comma, in characters."""
PIECE: Final = 256 * 1024
"""Characters decoded at a time, which hold the interpreter's lock for half a millisecond."""
CHUNK_BYTES: Final = 1024 * 1024
TEXTS: Final = (b"content", b"text", b"prompt", b"input", b"instructions")
"""Names of members whose value is text even if it starts like a data URI."""

_BEGIN: Final = b'"data:'
_HEAD: Final = re.compile(rb"data:([A-Za-z0-9.+-]{0,50}(?:\\?/[A-Za-z0-9.+-]{0,100})?);base64,")
_TEXT: Final = re.compile(rb'"(?:' + b"|".join(TEXTS) + rb')"\s*:\s*$')
_ESCAPE: Final = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_PLACEHOLDER: Final = re.compile(r"data:[A-Za-z0-9.+/-]{0,160};spooled=([0-9]{1,4}),([0-9a-f]{64})")


@dataclass(slots=True)
class SpooledFile:
    """One extracted file, in an unnamed temporary file."""

    file: IO[bytes]
    bytes: int = 0
    sha256: str = ""
    valid: bool = True
    """Whether it was valid base64."""


class Spool:
    """The files of one body. Must be closed once they are stored or the request has ended."""

    def __init__(
        self, directory: Path, threads: ThreadPoolExecutor, *, closed: Callable[[], None]
    ) -> None:
        """``closed`` is called once, after the files are deleted."""
        self.parts: list[SpooledFile] = []
        self._closed: Callable[[], None] | None = closed
        self._directory = directory
        self._threads = threads

    def begin(self) -> SpooledFile:
        # Unlinked from the start, so nothing is left however the process ends.
        part = SpooledFile(tempfile.TemporaryFile(dir=self._directory))  # noqa: SIM115 -- see close
        self.parts.append(part)
        return part

    async def run(self, function: Callable[[], None]) -> None:
        """Run a function in the threads that are reserved for spooling."""
        await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def find(self, uri: str) -> SpooledFile | None:
        """Return the file of a placeholder, or None."""
        found = _PLACEHOLDER.fullmatch(uri) if len(uri) < 2 * HEAD_MAX else None
        if found is None or int(found[1]) >= len(self.parts):
            return None
        part = self.parts[int(found[1])]
        return part if part.sha256 == found[2] else None

    async def read(self, part: SpooledFile) -> AsyncIterator[bytes]:
        """Read a file in chunks of about a megabyte."""
        place = 0
        while place < part.bytes:
            pieces: list[bytes] = []

            def read(place: int = place, pieces: list[bytes] = pieces) -> None:
                part.file.seek(place)
                pieces.append(part.file.read(CHUNK_BYTES))

            await self.run(read)
            place += len(pieces[0])
            yield pieces[0]

    def close(self) -> None:
        for part in self.parts:
            part.file.close()
        self.parts.clear()
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()


SPOOL: Final[contextvars.ContextVar[Spool | None]] = contextvars.ContextVar("spool", default=None)
"""The spool of the request that runs in this context."""


class Extractor:
    """Extracts long data URIs from JSON text that arrives in pieces. ``kept`` is the rest."""

    def __init__(self, spool: Spool) -> None:
        self.kept = bytearray()
        self._spool = spool
        self._part: SpooledFile | None = None
        self._kind = b""
        self._text = bytearray()
        """Text not processed yet: characters of the current data URI, or JSON."""
        self._digest = hashlib.sha256()

    async def feed(self, data: bytes) -> None:
        """Process the next piece of the body."""
        self._text += data
        while True:
            if self._part is None:
                if not self._look():
                    return
            elif not await self._spool_on():
                return

    def end(self) -> bytes:
        """Return the body without its files."""
        if self._part is not None:
            # The body ends inside a string, so it is not valid JSON; the parser reports that.
            self._part = None
            self.kept += b'"'
        self.kept += self._text
        self._text.clear()
        return bytes(self.kept)

    def _look(self) -> bool:
        """Move text to ``kept`` up to the next long data URI; False if more text is needed."""
        place = 0
        while True:
            begin = self._text.find(_BEGIN, place)
            if begin < 0:
                self._keep(max(place, len(self._text) - len(_BEGIN) + 1))
                return False
            head = _HEAD.match(self._text, begin + 1)
            if self._is_quoted(begin) or self._is_text(begin):
                place = begin + 1
                continue
            end = self._text.find(b'"', begin + 1)
            if end < 0 and len(self._text) - begin <= INLINE_MAX:
                self._keep(begin)
                return False
            if head is None or 0 <= end - begin <= INLINE_MAX:
                place = begin + 1
                continue
            self._kind, self._part = head[1].replace(b"\\", b""), self._spool.begin()
            self._keep(begin)
            del self._text[: head.end() - begin]
            self._digest = hashlib.sha256()
            return True

    def _keep(self, count: int) -> None:
        self.kept += self._text[:count]
        del self._text[:count]

    def _is_quoted(self, place: int) -> bool:
        """Whether the quotation mark at ``place`` is escaped, and so inside a string."""
        before = bytes(self.kept[-HEAD_MAX:]) + bytes(self._text[max(0, place - HEAD_MAX) : place])
        return bool((len(before) - len(before.rstrip(b"\\"))) % 2)

    def _is_text(self, place: int) -> bool:
        before = bytes(self.kept[-HEAD_MAX:]) + bytes(self._text[max(0, place - HEAD_MAX) : place])
        return _TEXT.search(before[-HEAD_MAX:]) is not None

    async def _spool_on(self) -> bool:
        """Decode the text of the current file that has arrived; False if more text is needed."""
        part = self._part
        assert part is not None
        end = self._text.find(b'"')
        if end < 0 and len(self._text) < PIECE:
            return False
        take = min(PIECE, len(self._text) if end < 0 else end)
        last = take == end
        raw = bytes(self._text[:take])
        if b"\\" in raw:
            if not last and (cut := raw.rfind(b"\\", -6)) >= 0:
                raw = raw[:cut] or raw  # the escape can be incomplete
            take = len(raw)
            plain = _ESCAPE.sub(_unescaped, raw)
        else:
            plain = raw
        if not last and len(plain) % 4:
            # base64 is decoded in groups of four; the rest stays, unescaped.
            rest = plain[len(plain) // 4 * 4 :]
            plain = plain[: len(plain) // 4 * 4]
            del self._text[:take]
            self._text[:0] = rest
        else:
            del self._text[:take]
        await self._spool.run(lambda: self._write(part, plain))
        if last:
            del self._text[:1]
            part.sha256 = self._digest.hexdigest()
            index = len(self._spool.parts) - 1
            kind = self._kind.decode()
            self.kept += f'"data:{kind};spooled={index},{part.sha256}"'.encode()
            self._part = None
        return True

    def _write(self, part: SpooledFile, text: bytes) -> None:
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            part.valid = False
            self._digest.update(text)
            return
        self._digest.update(data)
        part.file.write(data)
        part.bytes += len(data)


def _unescaped(found: re.Match[bytes]) -> bytes:
    if found[1] is not None:
        code = int(found[1], 16)
        return bytes([code]) if code < 128 else b"?"
    return bytes(found[2]) if found[2] in (b"/", b'"', b"\\") else b"?"

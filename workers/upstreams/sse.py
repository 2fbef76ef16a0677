"""Server-sent events, as far as model services use them: the data of each event, bounded.

Not ``httpx-sse``: it buffers a line without end, and drops an event that no blank line follows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator


class TooLong(Exception):
    """The body exceeds the limit."""


async def read_events(chunks: AsyncIterator[bytes], bytes_max: int) -> AsyncIterator[bytes]:
    """Yield the data of every event; other fields are skipped. Lines end in LF or CRLF.

    The last event counts even without a blank line after it. Raise ``TooLong`` beyond ``bytes_max``
    in total.
    """
    received = 0
    rest = b""
    data: list[bytes] = []
    async for chunk in chunks:
        received += len(chunk)
        if received > bytes_max:
            raise TooLong
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data.clear()
    if rest.startswith(b"data:"):
        data.append(rest.rstrip(b"\r")[5:].removeprefix(b" "))
    if data:
        yield b"\n".join(data)


async def read_whole(chunks: AsyncIterator[bytes], bytes_max: int) -> bytes:
    """Read a whole body. Raise ``TooLong`` beyond ``bytes_max``."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > bytes_max:
            raise TooLong
    return bytes(body)

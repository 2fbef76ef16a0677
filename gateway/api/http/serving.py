"""Serves blobs, whole or in part."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from litestar import Response
from litestar.response import Stream

from gateway.api.http.answers import json_response
from gateway.api.http.media_views import unreadable
from gateway.api.http.request import ApiRequest
from gateway.errors import InvalidRequest, render_openai
from workers.contract.blobs import BlobError

_RANGE: Final = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")


_POLICY: Final = "default-src 'none'; img-src 'self'; media-src 'self'; sandbox"


@dataclass(frozen=True, slots=True)
class BlobResponse:
    """A blob to be served, with its content type and file name."""

    key: str
    content_type: str
    filename: str

    @property
    def etag(self) -> str:
        """Entity tag from the key: blobs are immutable, so the key identifies the content."""
        return '"' + "-".join(self.key.split("/")[-2:]) + '"'

    def headers(self, start: int, end: int, size: int) -> dict[str, str]:
        found = {
            "Content-Length": str(end - start),
            "Content-Disposition": f'inline; filename="{self.filename}"',
            "Accept-Ranges": "bytes",
            "ETag": self.etag,
            "Cache-Control": "private, max-age=3600, immutable",
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": _POLICY,
            "Cross-Origin-Resource-Policy": "cross-origin",
        }
        if (start, end) != (0, size):
            found["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return found


async def serve(request: ApiRequest, found: BlobResponse) -> Response[Any] | Stream:
    """Respond with a blob, or with the requested range of it."""
    try:
        size = await request.services.blobs.size(found.key)
        start, end = _requested_range(request, size, found.etag)
        chunks = request.services.blobs.stream_part(found.key, start=start, end=end)
        # Read before the response begins, so that a failure of the store gets its own status.
        first = await anext(chunks, b"")
    except BlobError as error:
        raise unreadable(error) from None
    except _Unsatisfiable as error:
        wrong = InvalidRequest(
            "range_not_satisfiable", f"The output has {error.size} bytes.", param="Range"
        )
        return json_response(
            render_openai(wrong), status=416, headers={"Content-Range": f"bytes */{error.size}"}
        )
    return Stream(
        prepend(first, chunks),
        status_code=200 if (start, end) == (0, size) else 206,
        media_type=found.content_type,
        headers=found.headers(start, end, size),
    )


class _Unsatisfiable(Exception):
    def __init__(self, size: int) -> None:
        self.size = size


def _requested_range(request: ApiRequest, size: int, etag: str) -> tuple[int, int]:
    """Return start and end (exclusive) of the requested range.

    A request for several ranges gets the whole blob. Raise ``_Unsatisfiable``.
    """
    found = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if found is None or request.headers.get("if-range", etag) != etag:
        return 0, size
    first, last = found.groups()
    if not first and not last:
        return 0, size
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= size or end <= start:
        raise _Unsatisfiable(size)
    return start, end


async def prepend(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk

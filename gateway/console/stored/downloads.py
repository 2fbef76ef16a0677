"""All files of a request as one archive: what was made, and what was sent.

The archive is streamed, so that neither it nor a file is ever in memory as a whole. Media are
compressed already, and are stored as they are. No name comes from a client.
"""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from litestar import Controller, get
from litestar.params import FromPath
from litestar.response import Stream

from gateway.api.http.media_views import EXPIRED, blob_of, media_of, unreadable
from gateway.api.http.request import ApiRequest
from gateway.console.guards import needs
from gateway.console.pages.requests import find_seen
from gateway.console.views.files import attachment
from gateway.console.views.outputs import output_file
from gateway.console.visitors import CurrentVisitor
from gateway.errors import Gone, NotFound, TooLarge
from gateway.files.kept_inputs import kept_input
from gateway.ledger.closed import ClosedRequest
from workers.contract.blobs import BlobError, Blobs
from workers.contract.jobs import BlobRef
from workers.contract.kinds import EXTENSIONS

ARCHIVE_BYTES_MAX: Final = 2 * 1024**3
"""Maximum size of the files of an archive together."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of an archive: a blob, or content that is in memory already."""

    name: str
    content: BlobRef | bytes

    @property
    def bytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.bytes


class Downloads(Controller):
    path = "/requests/{request_id:str}/files"

    @get("/", guards=[needs("requests.read")])
    async def archive(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Stream:
        owner, _ = await find_seen(request, visitor, request_id)
        if not visitor.may("contents.read", owner.id):
            raise NotFound("not_found", "There is no such output.")
        services = request.services
        found = await services.requests.lookup.find(owner.id, request_id)
        if not isinstance(found, ClosedRequest):
            raise NotFound("not_found", "The request has not ended yet.")
        entries = _made(found)
        if (kept := await kept_input(services.media, owner.id, request_id)) is not None:
            entries += [
                Entry(f"sent-{position}.{_extension(blob)}", blob)
                for position, blob in enumerate(kept.attachments)
            ]
        if found.output is not None:
            entries.append(Entry("output.json", await asyncio.to_thread(output_file, found)))
        await check(services.blobs, entries)
        headers = {
            **attachment(f"{request_id}.zip"),
            "Cache-Control": "private, no-store",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        chunks = zipped(services.blobs, entries, found.settled_at)
        return Stream(chunks, media_type="application/zip", headers=headers)


def _made(found: ClosedRequest) -> list[Entry]:
    blobs = [blob_of(found, one) for one in media_of(found)]
    return [
        Entry(f"{position}.{_extension(blob)}", blob)
        for position, blob in enumerate(blobs)
        if blob is not None
    ]


def _extension(blob: BlobRef) -> str:
    return EXTENSIONS.get(blob.content_type, "bin")


async def check(blobs: Blobs, entries: Sequence[Entry]) -> None:
    """Refuse, before the answer begins, what could not be sent whole. Raise ``TollgateError``."""
    if not entries:
        raise Gone("blob_expired", EXPIRED)
    if (size := sum(each.bytes for each in entries)) > ARCHIVE_BYTES_MAX:
        raise TooLarge(
            "output_too_large",
            f"The files have {size} bytes together; one archive has at most {ARCHIVE_BYTES_MAX}. "
            "Download them one by one.",
        )
    try:
        for each in entries:
            if isinstance(each.content, BlobRef):
                await blobs.size(each.content.key)
    except BlobError as error:
        raise unreadable(error) from None


async def zipped(
    blobs: Blobs, entries: Sequence[Entry], changed_at: datetime
) -> AsyncIterator[bytes]:
    """Yield an archive as it is written; each chunk holds one of a file."""
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for each in entries:
            info = zipfile.ZipInfo(each.name, changed_at.timetuple()[:6])
            with archive.open(info, "w") as file:
                async for chunk in _chunks(blobs, each.content):
                    # The checksum of a chunk takes about a millisecond.
                    await asyncio.to_thread(file.write, chunk)
                    yield sink.take()
    yield sink.take()


async def _chunks(blobs: Blobs, content: BlobRef | bytes) -> AsyncIterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    async for chunk in blobs.stream_part(content.key, start=0, end=content.bytes):
        yield chunk


class _Sink(io.RawIOBase):
    """Collects what is written until it is taken; it cannot be sought."""

    def __init__(self) -> None:
        super().__init__()
        self._written = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        written = bytes(data)
        self._written += written
        return len(written)

    def take(self) -> bytes:
        taken = bytes(self._written)
        self._written.clear()
        return taken


HANDLERS: Final[list[Any]] = [Downloads]

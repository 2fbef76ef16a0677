"""What every surface of speech and music does with an order: send its sound on while it is made.

Nothing is sent twice and nothing is left out. Each piece says where in its file it belongs, and a
second attempt says the same again, so after a crash a stream goes on where it broke off; pieces
that were missed are read from the job's log. A request that said nothing on the way, an
upstream's or one that is repeated after its end, is sent from the store. Knows no dialect.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from litestar.response import Stream

from gateway.api.http.answers import KEEP_ALIVE_S, request_headers
from gateway.api.http.media_views import blob_of, media_of, unreadable
from gateway.api.http.request import ApiRequest
from gateway.errors import RequestFailed
from gateway.ledger.closed import ClosedRequest
from gateway.pricing import format_usd
from gateway.requests.ticket import Ticket, raise_unless_succeeded
from workers.contract.blobs import BlobError, Blobs
from workers.contract.jobs import AudioChunk, BlobRef, SentEvent
from workers.contract.kinds import HEAD_BYTES, sniff, type_of_extension
from workers.contract.media import AudioFormat


def audio_type(format: AudioFormat) -> str:
    return type_of_extension("ogg" if format == "opus" else format)


class AudioResponse:
    """The first output of one request, for one reader."""

    def __init__(self, ticket: Ticket, blobs: Blobs) -> None:
        self.ticket = ticket
        self.content_type = ""
        """Of what lies in the store, where it is sent from there."""
        self._blobs = blobs
        self._sent = 0
        self._length = 0
        """How long it is known to be."""
        self._cursor: tuple[int, int] | None = None

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Give the sound as it comes, and nothing at all as a sign of life.

        Raise ``RequestFailed`` if the request ends without it.
        """
        async for sent in self.ticket.events(KEEP_ALIVE_S):
            if sent is None:
                yield b""
            elif isinstance(sent.event, AudioChunk):
                async for data in self._receive(sent, sent.event):
                    yield data
        closed = self.ticket.result
        if self._sent:
            # The end may be known before its last pieces are heard.
            async for data in self._replay_log():
                yield data
        raise_unless_succeeded(closed)
        if self._sent < self._length:
            raise RequestFailed(
                "stream_broken",
                "A part of the sound was lost on its way; fetch the whole by the request's id.",
                request_id=closed.request_id,
            )
        if not self._sent:
            async for data in self._read_blob(closed):
                yield data

    async def _receive(self, sent: SentEvent, audio: AudioChunk) -> AsyncIterator[bytes]:
        if audio.start > self._sent:
            async for data in self._replay_log():
                yield data
        if data := self._unsent(sent, audio):
            yield data

    async def _replay_log(self) -> AsyncIterator[bytes]:
        for sent in await self.ticket.logged(self._cursor):
            if isinstance(sent.event, AudioChunk) and (data := self._unsent(sent, sent.event)):
                yield data

    def _unsent(self, sent: SentEvent, audio: AudioChunk) -> bytes:
        """What of a piece was not sent yet; nothing where something before it is still missing,
        which the log may have a little later."""
        if audio.index:
            return b""
        self._length = max(self._length, audio.start + len(audio.data))
        if audio.start > self._sent:
            return b""
        self._cursor = sent.attempt, sent.seq
        data = audio.data[self._sent - audio.start :]
        self._sent += len(data)
        return data

    async def _read_blob(self, closed: ClosedRequest) -> AsyncIterator[bytes]:
        blob = audio_blob(closed)
        self.content_type = blob.content_type
        try:
            async for data in self._blobs.stream(blob):
                self._sent += len(data)
                yield data
        except BlobError as error:
            raise _unreadable(error, closed) from None


def audio_blob(closed: ClosedRequest) -> BlobRef:
    """The first output of a request that succeeded. Raise ``RequestFailed`` if it is gone."""
    for medium in media_of(closed):
        blob = blob_of(closed, medium)
        if blob is not None and medium.kind == "audio":
            return blob
    raise RequestFailed(
        "blob_expired",
        "This output was kept for its time and is deleted.",
        request_id=closed.request_id,
    )


def _unreadable(error: BlobError, closed: ClosedRequest) -> RequestFailed:
    found = unreadable(error)
    return RequestFailed(found.code, found.message, request_id=closed.request_id)


@dataclass(frozen=True, slots=True)
class StartedAudio:
    """A sound of which the first piece is there."""

    audio: AudioResponse
    first: bytes
    rest: AsyncGenerator[bytes]

    async def chunks(self) -> AsyncIterator[bytes]:
        """All of it; whatever ends this early cancels the request."""
        with self.audio.ticket:
            async with contextlib.aclosing(self.rest):
                yield self.first
                async for data in self.rest:
                    yield data

    def headers(self) -> dict[str, str]:
        """What is known before the first byte: of the cost, whatever does not depend on how long
        the sound will be, or all if it is there already."""
        ticket = self.audio.ticket
        known = ticket.cost_nanos
        cost = {} if known is None else {"X-Request-Cost": format_usd(known)}
        return {**request_headers(ticket.request_id), **cost}


async def start_audio(request: ApiRequest, ticket: Ticket) -> StartedAudio:
    """Wait for the first piece, so that what fails before it is answered with its status.

    Raise ``RequestFailed``, also if the client goes away meanwhile; the request is then cancelled.
    """
    audio = AudioResponse(ticket, request.services.blobs)
    rest = audio.chunks()
    try:
        with ticket.attended(request):
            async for data in rest:
                if data:
                    return StartedAudio(audio, data, rest)
        raise RequestFailed("engine_error", "The sound is empty.", request_id=ticket.request_id)
    except BaseException:
        with ticket:
            await rest.aclose()
        raise


def stream_audio(started: StartedAudio, format: AudioFormat | None = None) -> Stream:
    """The bytes themselves, as they come; a format that is not known is told by its first ones."""
    content_type = audio_type(format) if format else sniff(started.first[:HEAD_BYTES])
    return Stream(
        _bytes(started),
        status_code=200,
        media_type=started.audio.content_type or content_type or "application/octet-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **started.headers()},
    )


async def _bytes(started: StartedAudio) -> AsyncIterator[bytes]:
    async for data in started.chunks():
        if data:
            yield data

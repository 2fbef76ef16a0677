"""Shared by the audio dialects: stream the audio of a request while it is generated.

No byte is sent twice or skipped. Each chunk carries its offset in the file, and a second attempt
reproduces the first, so after a crash the stream resumes at the byte where it stopped; missed
chunks are read from the event log. A request without audio events (an upstream's, or one replayed
after its end) is sent from the blob store. Knows no dialect.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from litestar.response import Stream

from gateway.api.http.answers import KEEP_ALIVE_S, request_headers
from gateway.api.http.media_views import EXPIRED, blob_of, media_of, unreadable
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
    """The first output of one request, streamed to one client."""

    def __init__(self, ticket: Ticket, blobs: Blobs) -> None:
        self.ticket = ticket
        self.content_type = ""
        """Content type of the blob, if the audio is sent from the blob store."""
        self._blobs = blobs
        self._sent = 0
        self._length = 0
        """Length of the file in bytes, as far as it is known."""
        self._cursor: tuple[int, int] | None = None

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the audio as it arrives, and ``b""`` as a keep-alive.

        Raise ``RequestFailed`` if the request ends without audio.
        """
        while (events := await self.ticket.next_events(KEEP_ALIVE_S)) is not None:
            if not events:
                yield b""
            for sent in events:
                if isinstance(sent.event, AudioChunk):
                    async for data in self._receive(sent, sent.event):
                        yield data
        closed = self.ticket.result
        if self._sent:
            # The end can be reported before the last chunks are received.
            async for data in self._replay_log():
                yield data
        raise_unless_succeeded(closed)
        if self._sent < self._length:
            raise RequestFailed(
                "stream_broken",
                "Part of the audio was lost in transit; fetch all of it by the request's id.",
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
        """Return the unsent bytes of a chunk, or ``b""`` if an earlier chunk is missing: the event
        log may supply it shortly."""
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
    """Return the first output of a successful request. Raise ``RequestFailed`` if it expired."""
    for medium in media_of(closed):
        blob = blob_of(closed, medium)
        if blob is not None and medium.kind == "audio":
            return blob
    raise RequestFailed(
        "blob_expired",
        EXPIRED,
        request_id=closed.request_id,
    )


def _unreadable(error: BlobError, closed: ClosedRequest) -> RequestFailed:
    found = unreadable(error)
    return RequestFailed(found.code, found.message, request_id=closed.request_id)


@dataclass(frozen=True, slots=True)
class StartedAudio:
    """Audio of which the first chunk has arrived."""

    audio: AudioResponse
    first: bytes
    rest: AsyncGenerator[bytes]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield all of the audio. Ending this early cancels the request."""
        with self.audio.ticket:
            async with contextlib.aclosing(self.rest):
                yield self.first
                async for data in self.rest:
                    yield data

    def headers(self) -> dict[str, str]:
        """Return the headers known before the first byte. The cost is among them if it does not
        depend on the length of the audio, or if the request has ended."""
        ticket = self.audio.ticket
        known = ticket.cost_nanos
        cost = {} if known is None else {"X-Request-Cost": format_usd(known)}
        return {**request_headers(ticket.request_id), **cost}


async def start_audio(request: ApiRequest, ticket: Ticket) -> StartedAudio:
    """Wait for the first chunk, so that an earlier failure is answered with its HTTP status.

    Raise ``RequestFailed``, also if the client disconnects; the request is then cancelled.
    """
    audio = AudioResponse(ticket, request.services.blobs)
    rest = audio.chunks()
    try:
        with ticket.attended(request):
            async for data in rest:
                if data:
                    return StartedAudio(audio, data, rest)
        raise RequestFailed(
            "engine_error", "The model produced no audio.", request_id=ticket.request_id
        )
    except BaseException:
        with ticket:
            await rest.aclose()
        raise


def stream_audio(started: StartedAudio, format: AudioFormat | None = None) -> Stream:
    """Respond with the bytes as they arrive. If ``format`` is None, it is detected from them."""
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

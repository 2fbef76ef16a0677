"""Shared by the text dialects: submit a request, wait for it or stream it, and respond."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol, TypeVar

from litestar import Response
from litestar.response import Stream

from gateway.api.http.answers import (
    KEEP_ALIVE,
    KEEP_ALIVE_S,
    event_stream,
    json_response,
    request_headers,
)
from gateway.api.http.bodies import body_fingerprint, idempotency, is_retry
from gateway.api.http.request import ApiRequest
from gateway.catalog.tasks import Task
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest, RequestFailed
from gateway.ledger.closed import ClosedRequest
from gateway.requests.ticket import (
    ClientConnection,
    Ticket,
    connection_of,
    raise_unless_succeeded,
)
from gateway.tasks.registry import Input
from gateway.tasks.submission import Submission
from workers.contract.jobs import SentEvent

View = TypeVar("View")


class StreamWriter(Protocol):
    """Writes the server-sent events of one answer in one dialect."""

    def write(self, sent: SentEvent) -> bytes:
        """Return what one event of the job adds to the stream, or ``b""``."""

    def finish(self, closed: ClosedRequest) -> bytes:
        """Return the end of the stream. Raise ``RequestFailed`` if the request did not succeed."""

    def fail(self, error: RequestFailed) -> bytes:
        """Return the end of a stream that failed."""


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool = False


def wants_usage(options: StreamOptions | None, *, stream: bool | None) -> bool:
    """Whether a stream ends with its usage. Raise ``InvalidRequest`` if nothing is streamed."""
    if options is not None and not stream:
        raise InvalidRequest(
            "invalid_value", "stream_options needs stream: true.", param="stream_options"
        )
    return options is not None and options.include_usage


async def to_submission(
    request: ApiRequest,
    *,
    model: str,
    task: Task,
    input: Input,
    stream: bool = False,
    metadata: Mapping[str, str] | None = None,
    canonical: bytes | None = None,
) -> Submission:
    """Build the submission of a client that waits for its answer.

    ``canonical`` replaces a body whose bytes differ between two attempts, such as a form's.
    """
    return Submission(
        model=model,
        task=task,
        input=input,
        stream=stream,
        metadata=metadata,
        idempotency=await idempotency(request, canonical),
        # No fingerprint for streams: a client that disconnects has received part of the
        # answer, so a new request is not a retry.
        fingerprint=None if stream else await body_fingerprint(request, canonical),
        retried=is_retry(request),
    )


async def answer(
    request: ApiRequest,
    submission: Submission,
    view: Callable[[ClosedRequest], View],
    writer: Callable[[Ticket], StreamWriter] | None = None,
) -> Response[View] | Stream:
    """Submit a request and respond to it, as a stream if it is one and has a ``writer``."""
    ticket = await request.services.requests.submit(request.caller, submission)
    if submission.stream and writer is not None:
        return stream_answer(request, ticket, writer(ticket))
    with ticket:
        closed = await ticket.closed(request)
    raise_unless_succeeded(closed)
    return json_response(view(closed), headers=request_headers(closed.request_id, closed))


def stream_answer(request: ApiRequest, ticket: Ticket, writer: StreamWriter) -> Stream:
    """Respond to a submitted request as a stream."""
    events = _stream(ticket, writer, connection_of(request))
    return event_stream(events, headers=request_headers(ticket.request_id))


async def _stream(
    ticket: Ticket, writer: StreamWriter, connection: ClientConnection
) -> AsyncIterator[bytes]:
    with ticket:
        async for data in stream_events(ticket, writer, connection):
            yield data


async def stream_events(
    ticket: Ticket, writer: StreamWriter, connection: ClientConnection
) -> AsyncIterator[bytes]:
    """Write the events of an answer to the connection as they arrive. Yield what has to wait for
    the client, and the end. Within ``ticket``, ending this early cancels the request."""

    def write(sent: SentEvent) -> bool:
        if not connection.takes_chunks:
            return False
        try:
            data = writer.write(sent)
        except Exception:  # a boundary: raised again below
            return False
        if data:
            connection.write_chunk(data)
        return True

    data = b""
    try:
        ticket.forward(write)
        while (events := await ticket.next_events(KEEP_ALIVE_S)) is not None:
            data = b"" if events else KEEP_ALIVE
            for sent in events:
                data += writer.write(sent)
            if data:
                yield data
                data = b""
        yield writer.finish(ticket.result)
    except RequestFailed as error:
        ticket.forward(lambda _: True)
        yield data + writer.fail(error)

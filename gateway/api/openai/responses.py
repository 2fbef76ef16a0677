"""OpenAI's responses: created, streamed, run in the background, fetched, cancelled, deleted.

A response is a request under another id. Inputs are not stored, so clients send the complete
conversation each time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec
from litestar import Controller, Response, delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import Stream

from gateway.api.http.answering import stream_events
from gateway.api.http.answers import (
    KEEP_ALIVE,
    KEEP_ALIVE_S,
    DeletedView,
    encode_json,
    event_stream,
    json_response,
    request_headers,
)
from gateway.api.http.bodies import (
    body_fingerprint,
    idempotency,
    is_retry,
    read_body,
    refuse_in_batch,
)
from gateway.api.http.content_types import EVENTS
from gateway.api.http.request import ApiRequest
from gateway.api.openai.chat import TASK
from gateway.api.openai.responses_bodies import ResponseBody
from gateway.api.openai.responses_views import (
    EventWriter,
    ResponseView,
    request_id_of,
    response_id,
    response_view,
    status_of,
)
from gateway.batches.endpoint import BatchEndpoint, Entries
from gateway.errors import InvalidRequest, NotFound, RequestFailed
from gateway.ledger.closed import ClosedRequest
from gateway.requests.service import Requests
from gateway.requests.ticket import Ticket, connection_of, raise_unless_succeeded
from gateway.tasks.submission import OpenRequest, Submission
from workers.contract.jobs import RequestId, SentEvent, Tokens


class ResponsesController(Controller):
    path = "/v1/responses"
    tags = ["OpenAI"]

    @post(
        status_code=200,
        opt={"scope": "inference", "holds": True, "direct": True, "media": [EVENTS]},
        operation_id="CreateResponse",
        summary="Answer in one response, as a stream, or in the background",
    )
    async def create(
        self, request: ApiRequest, data: JSONBody[ResponseBody]
    ) -> Response[ResponseView] | Stream:
        requests = request.services.requests
        background = bool(data.background)
        submission = Submission(
            model=data.model,
            task=TASK,
            input=data.generation(),
            stream=bool(data.stream) or background,
            waits=not background,
            metadata=data.metadata,
            idempotency=await idempotency(request),
            fingerprint=None if data.stream or background else await body_fingerprint(request),
            retried=is_retry(request),
        )
        ticket = await requests.submit(request.caller, submission)
        headers = request_headers(ticket.request_id)
        account_id = request.key.account_id
        if background:
            with ticket:
                found = await ticket.placed()
            if data.stream:
                return event_stream(_followed(requests, found, data, -1), headers=headers)
            return json_response(response_view(found, data), headers=headers)
        if data.stream:
            return event_stream(_stream(request, ticket, data), headers=headers)
        with ticket:
            closed = await ticket.closed(request)
        if closed.status == "succeeded" and closed.output is None:
            raise _unknown(response_id(closed.request_id))
        view = response_view(closed, data)
        if data.store is False:
            await requests.forget(account_id, closed.request_id)
        if status_of(closed)[0] not in ("completed", "incomplete"):
            raise_unless_succeeded(closed)
        return json_response(view, headers=request_headers(closed.request_id, closed))

    @get(
        "/{id:str}",
        opt={"scope": "read", "media": [EVENTS]},
        operation_id="GetResponse",
        summary="Get a response, or stream its events",
    )
    async def show(
        self,
        request: ApiRequest,
        id: FromPath[str],
        stream: FromQuery[bool] = False,
        starting_after: FromQuery[int] = -1,
    ) -> Response[ResponseView] | Stream:
        found = await _find(request, id)
        if stream:
            events = _followed(request.services.requests, found, None, starting_after)
            return event_stream(events, headers=request_headers(found.request_id))
        return json_response(response_view(found), headers=request_headers(found.request_id))

    @post(
        "/{id:str}/cancel",
        status_code=200,
        opt={"scope": "inference"},
        operation_id="CancelResponse",
        summary="Cancel a response in the background",
    )
    async def cancel(self, request: ApiRequest, id: FromPath[str]) -> Response[ResponseView]:
        found = await _find(request, id)
        await request.services.requests.cancel(found.account_id, found.request_id)
        return json_response(response_view(await _find(request, id)))

    @delete(
        "/{id:str}",
        status_code=200,
        opt={"scope": "inference"},
        operation_id="DeleteResponse",
        summary="Delete the output of a response; its receipt stays",
    )
    async def forget(self, request: ApiRequest, id: FromPath[str]) -> Response[DeletedView]:
        found = await _find(request, id)
        if isinstance(found, OpenRequest):
            raise InvalidRequest(
                "response_in_progress", f"{id} is still {found.status}; cancel it first."
            )
        await request.services.requests.forget(found.account_id, found.request_id)
        return json_response(
            {"id": response_id(found.request_id), "object": "response", "deleted": True}
        )


def batch_submission(body: Mapping[str, Any], _: Entries) -> Submission:
    """Check one body of a batch, which cannot be streamed."""
    data = read_body(ResponseBody, body)
    refuse_in_batch(data, "stream", "stream_options", "background")
    return Submission(model=data.model, task=TASK, input=data.generation(), metadata=data.metadata)


BATCHES: Final = BatchEndpoint(
    "/v1/responses",
    read=batch_submission,
    answer=lambda closed, body: encode_json(response_view(closed, read_body(ResponseBody, body))),
    forgets=lambda body: body.get("store") is False,
)


async def _find(request: ApiRequest, id: str) -> OpenRequest | ClosedRequest:
    """Find a response of the account. Raise ``NotFound`` if it is not text, or deleted."""
    unknown = _unknown(id)
    try:
        found = await request.services.requests.lookup.find(
            request.key.account_id, request_id_of(id)
        )
    except NotFound:
        raise unknown from None
    gone = isinstance(found, ClosedRequest) and found.status == "succeeded" and found.output is None
    if found.task != TASK or gone:
        raise unknown
    return found


def _unknown(id: str) -> NotFound:
    message = f"No such response: {id!r}; it does not exist, or its output was deleted."
    return NotFound("response_not_found", message, param="response_id")


async def _stream(request: ApiRequest, ticket: Ticket, body: ResponseBody) -> AsyncIterator[bytes]:
    """Yield the events of an answer. Ending this early cancels the request."""
    requests, account_id = request.services.requests, request.key.account_id
    try:
        with ticket:
            found = await requests.lookup.find(account_id, ticket.request_id)
            writer = EventWriter(_as_accepted(found), body)
            yield writer.begin()
            async for data in stream_events(ticket, writer, connection_of(request)):
                yield data
    finally:
        # Also if the client disconnects at the last event, as OpenAI's clients do.
        if body.store is False:
            await requests.forget(account_id, ticket.request_id)


async def _followed(
    requests: Requests, found: OpenRequest | ClosedRequest, body: ResponseBody | None, after: int
) -> AsyncIterator[bytes]:
    """Yield the events of a response in any state. Disconnecting does not cancel it."""
    writer = EventWriter(_as_accepted(found), body, after)
    if opening := writer.begin():
        yield opening
    try:
        async for cursor, name, content in requests.follow(
            found, after=None, keep_alive_s=KEEP_ALIVE_S
        ):
            if isinstance(content, ClosedRequest):
                yield writer.finish(content)
            elif not name:
                yield KEEP_ALIVE
            elif name == "tokens" and cursor and (data := writer.write(_sent(cursor, content))):
                yield data
            elif name == "started" and cursor:
                writer.write(_sent(cursor, None))
    except RequestFailed as error:
        yield writer.fail(error)


def _sent(cursor: str, content: Any) -> SentEvent:
    attempt, _, seq = cursor.partition("-")
    event = Tokens(0, "", 0)
    if content is not None:
        event = msgspec.convert(
            {name: value for name, value in content.items() if name != "attempt"}, Tokens
        )
    return SentEvent(RequestId(""), int(attempt), int(seq), event)


def _as_accepted(found: OpenRequest | ClosedRequest) -> OpenRequest:
    """Return a request as it was when it was accepted."""
    return OpenRequest(
        request_id=found.request_id,
        account_id=found.account_id,
        model=found.model,
        task=found.task,
        status="queued",
        hold_nanos=found.hold_nanos,
        accepted_at=found.accepted_at,
        deadline_at=found.accepted_at,
        metadata=found.metadata,
    )

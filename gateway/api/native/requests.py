"""Requests of the native API: any task of any model, asynchronous, resumable, itemised."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import Stream
from pydantic import ConfigDict, Field

from gateway.accounts.roles import may
from gateway.api.http.access import requested_account
from gateway.api.http.answers import (
    KEEP_ALIVE,
    KEEP_ALIVE_S,
    encode_json,
    event_stream,
    json_response,
    request_headers,
)
from gateway.api.http.audio_response import start_audio, stream_audio
from gateway.api.http.bodies import check_limit, idempotency, read_body
from gateway.api.http.content_types import AUDIO, EVENTS
from gateway.api.http.fields import Metadata, ModelName
from gateway.api.http.media_views import (
    blob_of,
    link_view,
    links_of,
    media_of,
    media_views,
    read_base64,
)
from gateway.api.http.request import ApiRequest
from gateway.api.native.lists import FILTERED, Direction, RequestPageView, request_page_view
from gateway.api.native.views import (
    QuoteView,
    ReceiptView,
    RequestInputView,
    RequestView,
    margin_view,
    quote_view,
    receipt_view,
    request_input_view,
    request_view,
)
from gateway.api.openai.chat import TASK, ChatCompletion
from gateway.catalog.tasks import Task, makes
from gateway.checks.strict import StrictModel
from gateway.dispatch.follow import FollowedEvent
from gateway.errors import InvalidRequest, NotFound
from gateway.feedback.store import find
from gateway.feedback.views import feedback_view
from gateway.files.download_urls import UrlSigner
from gateway.files.kept_inputs import kept_input
from gateway.ledger.closed import ClosedRequest
from gateway.pricing import SERVICE_CLASSES
from gateway.requests.lookup import RequestFilter
from gateway.requests.service import Requests
from gateway.tasks.submission import Submission
from workers.contract.jobs import BlobRef

MediaForm = Literal["url", "base64"]


class RequestBody(StrictModel):
    """Body of ``POST /v1/requests``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "pocket-chat",
                    "input": {"messages": [{"role": "user", "content": "What is a queue?"}]},
                    "metadata": {"project": "demo"},
                }
            ]
        },
    )

    model: ModelName
    input: dict[str, Any]
    task: Task | None = None
    """Task of the model. Default: the first that fits the attachments."""
    webhook: Annotated[str, Field(max_length=2000)] | None = None
    metadata: Metadata | None = None


class RequestsController(Controller):
    path = "/v1"
    tags = ["Requests"]

    @post(
        "/requests",
        status_code=202,
        opt={"scope": "inference", "holds": True},
        operation_id="CreateRequest",
        summary="Submit a request for any task; fetch its output later",
    )
    async def create(
        self, request: ApiRequest, data: JSONBody[RequestBody]
    ) -> Response[RequestView]:
        submission = request.services.requests.quotes.submission(
            data.model,
            data.input,
            task=data.task,
            webhook=data.webhook,
            metadata=data.metadata,
            idempotency=await idempotency(request),
        )
        with await request.services.requests.submit(request.caller, submission) as ticket:
            found = await ticket.placed()
            return json_response(
                request_view(found, links_of(request)),
                status=202,
                headers=request_headers(ticket.request_id),
            )

    @get(
        "/requests",
        opt={"scope": "read"},
        dependencies=FILTERED,
        operation_id="ListRequests",
        summary="List requests by time of acceptance, in pages",
        description="Filter by tag with tag:<name>=<value>.",
    )
    async def index(
        self,
        request: ApiRequest,
        filter: NamedDependency[RequestFilter],
        limit: FromQuery[int] = 20,
        cursor: FromQuery[str | None] = None,
        order: FromQuery[Direction] = "desc",
    ) -> Response[RequestPageView[RequestView]]:
        check_limit(limit)
        page = await request.services.requests.lookup.list(
            filter, limit=limit, cursor=cursor, oldest_first=order == "asc"
        )
        links = links_of(request)
        return json_response(
            request_page_view([request_view(found, links) for found in page.items], page)
        )

    @get(
        "/requests/{request_id:str}",
        opt={"scope": "read", "errors": [410, 413]},
        operation_id="GetRequest",
        summary="Get a request and its output",
        description="`media=base64` includes images, videos and audio in the response.",
    )
    async def show(
        self,
        request: ApiRequest,
        request_id: FromPath[str],
        media: FromQuery[MediaForm] = "url",
    ) -> Response[RequestView]:
        found = await request.services.requests.lookup.find(request.key.account_id, request_id)
        view = request_view(found, links_of(request))
        if isinstance(found, ClosedRequest):
            if media == "base64":
                await _with_bytes(request, found, view)
            await _with_feedback(request, view)
        return json_response(view, headers=request_headers(found.request_id))

    @get(
        "/requests/{request_id:str}/input",
        opt={"scope": "read"},
        operation_id="GetRequestInput",
        summary="Get what was sent with a request, as long as it is kept",
        description="Of tasks that make images, video or audio; of others if the account keeps "
        "inputs.",
    )
    async def sent(
        self, request: ApiRequest, request_id: FromPath[str]
    ) -> Response[RequestInputView]:
        account_id, media = request.key.account_id, request.services.media
        kept = await kept_input(media, account_id, request_id)
        if kept is None:
            await request.services.requests.lookup.find(account_id, request_id, whole=False)
            raise NotFound("input_not_kept", f"What was sent with {request_id} is not kept.")
        return json_response(request_input_view(kept, links_of(request)))

    @get(
        "/requests/{request_id:str}/receipt",
        opt={"scope": "read"},
        operation_id="GetReceipt",
        summary="Get a request's itemised cost and timings",
        description="With the scope admin: of any account, with the operator's cost and margin.",
    )
    async def receipt(
        self,
        request: ApiRequest,
        request_id: FromPath[str],
        account: FromQuery[str | None] = None,
    ) -> Response[ReceiptView]:
        key = request.key
        owner_id: int | None = key.account_id
        if account is not None:
            owner = await request.services.database.read(
                lambda connection: requested_account(request, connection, account, "requests")
            )
            owner_id = owner.id
        elif "admin" in key.scopes and may(key.role or "operator", "requests", write=False):
            owner_id = None
        found = await request.services.requests.lookup.receipt(owner_id, request_id)
        closed = found.closed
        entry = request.services.live.entry(closed.model)
        view = receipt_view(found, entry.slo if entry else None)
        # Outputs are shown to their own account only, not to administrators.
        if closed.account_id == request.key.account_id and closed.output is not None:
            view["media"] = media_views(closed, links_of(request))
        if "admin" in request.key.scopes:
            returned = sum(refund.amount_nanos for refund in found.refunds)
            view["operator"] = margin_view(closed, returned, request.services.live.expense_rates)
        return json_response(view, headers=request_headers(closed.request_id))

    @get(
        "/requests/{request_id:str}/events",
        opt={"scope": "read", "media": [EVENTS]},
        operation_id="FollowRequest",
        summary="Stream a request's events (SSE); resumable with Last-Event-ID",
    )
    async def events(self, request: ApiRequest, request_id: FromPath[str]) -> Stream:
        found = await request.services.requests.lookup.find(request.key.account_id, request_id)
        after = request.headers.get("last-event-id")
        follower = request.services.requests.follow(found, after=after, keep_alive_s=KEEP_ALIVE_S)
        return event_stream(
            _server_sent(follower, links_of(request)), headers=request_headers(found.request_id)
        )

    @get(
        "/requests/{request_id:str}/sound",
        opt={"scope": "read", "media": AUDIO, "errors": [402, 410, 424]},
        operation_id="HearRequest",
        summary="Stream a request's audio as bytes from its start, also while it runs",
    )
    async def sound(self, request: ApiRequest, request_id: FromPath[str]) -> Stream:
        found = await request.services.requests.lookup.find(request.key.account_id, request_id)
        if makes(found.task) != "audio":
            raise InvalidRequest(
                "no_sound", f"{request_id} has the task {found.task}, which produces no audio."
            )
        ticket = request.services.requests.resume(
            found.account_id, found.request_id, found.accepted_at
        )
        return stream_audio(await start_audio(request, ticket))

    @post(
        "/requests/{request_id:str}/cancel",
        status_code=200,
        opt={"scope": "inference"},
        operation_id="CancelRequest",
        summary="Cancel a request; only what was delivered is charged",
    )
    async def cancel(self, request: ApiRequest, request_id: FromPath[str]) -> Response[RequestView]:
        account_id = request.key.account_id
        await request.services.requests.cancel(account_id, request_id)
        found = await request.services.requests.lookup.find(account_id, request_id)
        return json_response(request_view(found, links_of(request)))

    @post(
        "/quote",
        status_code=200,
        opt={"scope": "read"},
        operation_id="CreateQuote",
        summary="Quote the maximum cost of a request, itemised, without running it",
    )
    async def quote(
        self, request: ApiRequest, data: JSONBody[dict[str, Any]]
    ) -> Response[QuoteView]:
        requests = request.services.requests
        quoted = requests.quotes.quote(_to_quote(requests, data), request.key.account_id)
        request.key.check_model(quoted.entry.name)
        return json_response(quote_view(quoted))


async def _server_sent(
    follower: AsyncIterator[FollowedEvent], links: UrlSigner
) -> AsyncIterator[bytes]:
    """Encode (cursor, event name, data) as server-sent events; without a name, a keep-alive."""
    async for cursor, name, data in follower:
        if not name:
            yield KEEP_ALIVE
            continue
        head = f"id: {cursor}\n" if cursor else ""
        body = (
            request_view(data, links)
            if isinstance(data, ClosedRequest)
            else _event_view(data, links)
        )
        yield f"{head}event: {name}\ndata: ".encode() + encode_json(body) + b"\n\n"


def _event_view(event: Mapping[str, Any], links: UrlSigner) -> Mapping[str, Any]:
    """Return an event as sent to clients, with a presigned URL in place of a blob."""
    if "blob" not in event:
        return event
    blob = msgspec.convert(event["blob"], BlobRef)
    return {
        **{name: value for name, value in event.items() if name != "blob"},
        "content_type": blob.content_type,
        **link_view(blob, links),
    }


async def _with_bytes(request: ApiRequest, closed: ClosedRequest, view: RequestView) -> None:
    """Add the bytes of outputs to a request's view."""
    positions = [(position, blob_of(closed, one)) for position, one in enumerate(media_of(closed))]
    found = [(position, blob) for position, blob in positions if blob is not None]
    texts = await read_base64(request.services.blobs, [blob for _, blob in found])
    for (position, _), text in zip(found, texts, strict=True):
        assert view["output"] is not None
        view["output"]["media"][position]["b64_json"] = text


async def _with_feedback(request: ApiRequest, view: RequestView) -> None:
    """Add the feedback on a request to its view, if there is any."""
    account_id = request.key.account_id
    found = await request.services.database.read(
        lambda connection: find(connection, account_id, view["id"])
    )
    if found is not None:
        view["feedback"] = feedback_view(found)


def _to_quote(requests: Requests, body: dict[str, Any]) -> Submission:
    """Build a submission from a quote's body: a native request or a chat completion, with an
    optional ``service_class``."""
    body = dict(body)
    service_class = body.pop("service_class", "standard")
    if service_class not in SERVICE_CLASSES:
        raise InvalidRequest(
            "invalid_value",
            f"service_class is {service_class!r}; accepted: {', '.join(SERVICE_CLASSES)}.",
            param="service_class",
        )
    return replace(_parse_body(requests, body), service_class=service_class)


def _parse_body(requests: Requests, body: dict[str, Any]) -> Submission:
    if "messages" in body and "input" not in body:
        completion = read_body(ChatCompletion, body)
        return Submission(model=completion.names[0], task=TASK, input=completion.generation())
    native = read_body(RequestBody, body)
    return requests.quotes.submission(native.model, native.input, task=native.task)

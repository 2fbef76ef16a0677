"""GMI Cloud's request queue: code written for it works here with another base URL.

Requests are the same as in every dialect: they can be found, followed and charged in all of them.
Features that GMI's queue lacks have the names of the native API: cancelling, ``Idempotency-Key``,
``webhook``, the cost in the answer.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, Final, TypedDict

from litestar import Controller, Response, delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.gmi.models import TASKS_OF_QUEUE, QueueModelView, check_in_queue, model_view
from gateway.api.gmi.payloads import read_payload
from gateway.api.gmi.views import AcceptedView, QueuedRequestView, accepted_view, request_view
from gateway.api.http.answers import json_response, request_headers
from gateway.api.http.bodies import check_limit, idempotency
from gateway.api.http.dialects import GMI
from gateway.api.http.fields import Metadata, ModelName
from gateway.api.http.guards import may_store
from gateway.api.http.media_views import links_of
from gateway.api.http.request import ApiRequest
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.checks.public_urls import check_public_url
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest, NotFound, TollgateError, unknown_model
from gateway.files.upload_urls import CONTENT_TYPES
from gateway.ids import new_id
from gateway.ledger.closed import ClosedRequest
from gateway.requests.lookup import RequestFilter
from gateway.requests.ticket import Ticket
from gateway.tasks.submission import OpenRequest, Submission
from workers.contract.jobs import Progress

PAGE_MAX: Final = 100
OFFSET_MAX: Final = 50_000
WAIT_MAX_S: Final = 60
_WAIT: Final = re.compile(r"\s*wait\s*(?:=\s*\"?([0-9]{1,4})\"?)?\s*", re.IGNORECASE)


class QueuedBody(StrictModel):
    """Body of ``POST …/requests``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "pocket-image", "payload": {"prompt": "a red circle"}}]
        },
    )

    model: ModelName
    payload: dict[str, Any]
    task: Task | None = None
    webhook: Annotated[str, Field(max_length=2000)] | None = None
    metadata: Metadata | None = None


class UploadUrlBody(BaseModel):
    """Body of ``POST …/upload-url``."""

    model_config = ConfigDict(
        extra="ignore", json_schema_extra={"examples": [{"file_type": "png"}]}
    )

    file_type: Annotated[str, Field(min_length=1, max_length=10)]


class ModelIdsView(TypedDict):
    model_ids: list[str]


class QueuedRequestsView(TypedDict):
    requests: list[QueuedRequestView]
    total: int


class UploadUrlView(TypedDict):
    upload_url: str
    public_url: str


class GmiController(Controller):
    path = GMI
    tags = ["GMI Cloud"]

    @get(
        "/models",
        opt={"scope": "read"},
        operation_id="ListQueueModels",
        summary="List the names of all image, video and audio models",
    )
    async def models(self, request: ApiRequest) -> Response[ModelIdsView]:
        entries = request.entries()
        names = [entry.name for entry in entries if entry.task in TASKS_OF_QUEUE]
        return json_response({"model_ids": names})

    @get(
        "/models/{name:path}",
        opt={"scope": "read"},
        operation_id="GetQueueModel",
        summary="Parameters and exact price of a model",
    )
    async def model(self, request: ApiRequest, name: FromPath[str]) -> Response[QueueModelView]:
        entry = _entry(request, name.lstrip("/"))
        return json_response(
            model_view(
                entry,
                request.services.requests.health.announcements,
                created_at=request.services.live.on_sale_since(entry.name),
                updated_at=request.services.live.priced_since(entry.name),
            )
        )

    @post(
        "/requests",
        status_code=200,
        opt={"scope": "inference", "holds": True},
        operation_id="CreateQueuedRequest",
        summary="Generate an image, a video or audio; poll until it has ended",
        description="With `Prefer: wait` (or `wait=30`, at most 60 seconds) the response is sent "
        "when the request has ended, or after that time, while the request continues.",
    )
    async def create(
        self, request: ApiRequest, data: JSONBody[QueuedBody]
    ) -> Response[QueuedRequestView] | Response[AcceptedView]:
        waits_s = _waits_s(request)
        entry = _entry(request, data.model)
        meant = read_payload(entry, data.payload)
        if data.webhook is not None:
            private = request.services.settings.webhook_private_addresses
            check_public_url(data.webhook, param="webhook", private_allowed=private)
        submission = Submission(
            model=data.model,
            task=data.task or meant.task,
            input=meant.input,
            stream=True,
            waits=False,
            webhook=data.webhook,
            metadata=data.metadata,
            idempotency=await idempotency(request),
        )
        try:
            ticket = await request.services.requests.submit(request.caller, submission)
        except TollgateError as error:
            meant.rename(error)
            if error.code == "file_not_found":
                # A 404 for a submission would mean that the model does not exist.
                raise InvalidRequest(error.code, error.message, param=error.param) from None
            raise
        request.caller.rename_warnings(meant.names)
        with ticket:
            if waits_s is not None:
                await _wait(request, ticket, waits_s)
            found = await ticket.placed()
            if isinstance(found, ClosedRequest):
                answer: Response[QueuedRequestView] | Response[AcceptedView] = await _answer(
                    request, found
                )
            else:
                answer = json_response(
                    accepted_view(found), headers=request_headers(found.request_id)
                )
        if waits_s is not None:
            answer.headers["Preference-Applied"] = "wait"
        return answer

    @get(
        "/requests",
        opt={"scope": "read"},
        operation_id="ListQueuedRequests",
        summary="List requests, newest first",
    )
    async def index(
        self,
        request: ApiRequest,
        model_id: FromQuery[str | None] = None,
        limit: FromQuery[int] = 20,
        offset: FromQuery[int] = 0,
    ) -> Response[QueuedRequestsView]:
        check_limit(limit, PAGE_MAX)
        check_limit(offset, OFFSET_MAX, param="offset", least=0)
        requests = request.services.requests
        account_id = request.key.account_id
        model = None if model_id is None else request.services.live.resolve(model_id)
        filter = RequestFilter(account_id, model, tasks=TASKS_OF_QUEUE)
        counted = await requests.lookup.summarize(filter)
        cursor = await requests.lookup.cursor_at(filter, offset) if offset else None
        items: list[QueuedRequestView] = []
        if offset == 0 or cursor is not None:
            page = await requests.lookup.list(filter, limit=limit, cursor=cursor)
            items = [await _view(request, found) for found in page.items]
        total = counted.requests
        if counted.next_cursor is not None or counted.more_running:
            # Not all were counted; a client that pages by the total must continue.
            total = max(total, offset + len(items) + 1)
        return json_response({"requests": items, "total": total})

    @get(
        "/requests/{request_id:str}",
        opt={"scope": "read"},
        operation_id="GetQueuedRequest",
        summary="Status, outcome and cost of a request",
    )
    async def show(
        self, request: ApiRequest, request_id: FromPath[str]
    ) -> Response[QueuedRequestView]:
        return await _answer(request, await _find(request, request_id))

    @delete(
        "/requests/{request_id:str}",
        status_code=200,
        opt={"scope": "inference"},
        operation_id="DeleteQueuedRequest",
        summary="Cancel a request; one that has ended is not changed",
    )
    async def remove(
        self, request: ApiRequest, request_id: FromPath[str]
    ) -> Response[QueuedRequestView]:
        return await _cancel(request, request_id)

    @post(
        "/requests/{request_id:str}/cancel",
        status_code=200,
        opt={"scope": "inference"},
        operation_id="CancelQueuedRequest",
        summary="Cancel a request; one that has ended is not changed",
    )
    async def cancel(
        self, request: ApiRequest, request_id: FromPath[str]
    ) -> Response[QueuedRequestView]:
        return await _cancel(request, request_id)

    @post(
        "/upload-url",
        status_code=200,
        opt={"scope": "inference"},
        guards=[may_store],
        operation_id="CreateUploadUrl",
        summary="Create a presigned URL, valid for 15 minutes, to upload a file without a key",
        description="`PUT` the file to `upload_url` with exactly the content type of its "
        "`file_type` (`jpg` is `image/jpg`, `mp3` is `audio/mp3`); payloads of the same account "
        "then refer to it by `public_url`, which cannot be downloaded.",
    )
    async def upload_url(
        self, request: ApiRequest, data: JSONBody[UploadUrlBody]
    ) -> Response[UploadUrlView]:
        if data.file_type not in CONTENT_TYPES:
            raise InvalidRequest(
                "invalid_value",
                f"file_type is {data.file_type!r}; accepted: {', '.join(CONTENT_TYPES)}.",
                param="file_type",
            )
        base = request.services.settings.public_url or str(request.base_url)
        account_id, file_id = request.key.account_id, new_id("file-")
        # Reserved now: the key is required for this call only, not for the upload.
        await request.services.room.reserve(
            account_id, file_id, size=request.services.settings.media_bytes_max
        )
        upload_url, public_url = request.services.upload_urls.open(
            account_id, data.file_type, base=base, file_id=file_id
        )
        return json_response({"upload_url": upload_url, "public_url": public_url})


def _entry(request: ApiRequest, name: str) -> CatalogEntry:
    entry = request.services.live.entry(request.services.live.resolve(name), request.key.account_id)
    if entry is None:
        raise unknown_model(name, listed="GET models")
    request.key.check_model(entry.name)
    return check_in_queue(entry)


async def _find(request: ApiRequest, request_id: str) -> OpenRequest | ClosedRequest:
    found = await request.services.requests.lookup.find(request.key.account_id, request_id)
    if found.task not in TASKS_OF_QUEUE:
        raise NotFound("request_not_found", f"No such request in this queue: {request_id!r}.")
    return found


async def _view(request: ApiRequest, found: OpenRequest | ClosedRequest) -> QueuedRequestView:
    record = await request.services.media.find(found.account_id, found.request_id)
    progress: Progress | None = None
    if isinstance(found, OpenRequest) and found.status == "running":
        progress = await request.services.requests.lookup.progress(found.request_id)
    return request_view(found, record, progress, links_of(request))


async def _answer(
    request: ApiRequest, found: OpenRequest | ClosedRequest
) -> Response[QueuedRequestView]:
    closed = found if isinstance(found, ClosedRequest) else None
    headers = request_headers(found.request_id, closed)
    return json_response(await _view(request, found), headers=headers)


async def _cancel(request: ApiRequest, request_id: str) -> Response[QueuedRequestView]:
    found = await _find(request, request_id)
    await request.services.requests.cancel(found.account_id, found.request_id)
    return await _answer(request, await _find(request, request_id))


async def _wait(request: ApiRequest, ticket: Ticket, seconds: int) -> None:
    try:
        async with asyncio.timeout(seconds):
            await ticket.closed(request)
    except TimeoutError:
        return


def _waits_s(request: ApiRequest) -> int | None:
    """Return the client's preferred wait (RFC 7240) in seconds, or None."""
    for preference in request.headers.get("prefer", "").split(","):
        found = _WAIT.fullmatch(preference.partition(";")[0])
        if found is not None:
            return min(int(found[1]), WAIT_MAX_S) if found[1] else WAIT_MAX_S
    return None

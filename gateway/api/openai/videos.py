"""OpenAI's videos: created, polled, downloaded, remixed, deleted. Each video is one request.

A video can be found as long as any of its blobs is stored. OpenAI has no status for cancelled
videos, so they are reported as failed, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from litestar import Controller, Response, delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import Stream

from gateway.api.http.answers import DeletedView, encode_json, json_response, request_headers
from gateway.api.http.bodies import check_limit, idempotency, read_body, refuse_in_batch
from gateway.api.http.content_types import MEDIA
from gateway.api.http.forms import documented_body, receive
from gateway.api.http.media_views import blob_of, media_of
from gateway.api.http.request import ApiRequest
from gateway.api.http.serving import BlobResponse, serve
from gateway.api.openai.files import OpenAIListView, list_view
from gateway.api.openai.videos_bodies import EditBody, RemixBody, VideoBody, remix_task
from gateway.api.openai.videos_views import VideoView, video_status, video_view
from gateway.batches.endpoint import BatchEndpoint, Entries
from gateway.catalog.tasks import TASKS
from gateway.errors import Gone, InvalidRequest, NotFound
from gateway.files.retention import Record
from gateway.ledger.closed import ClosedRequest
from gateway.sql.outages import SQL_OUTAGE
from gateway.tasks.submission import OpenRequest, Submission
from gateway.tasks.visual import choose_dialect_task
from workers.contract.jobs import Progress
from workers.contract.kinds import EXTENSIONS

PAGE_MAX: Final = 100
POLL_MS: Final = (500, 5_000)
"""Minimum and maximum polling interval suggested to clients, in milliseconds."""
TASKS_OF_VIDEO: Final = tuple(task for task, kind in TASKS.items() if kind.makes == "video")

Variant = Literal["video", "thumbnail", "spritesheet"]
Direction = Literal["asc", "desc"]


class VideosController(Controller):
    path = "/v1/videos"
    tags = ["OpenAI"]

    @post(
        status_code=200,
        opt={"scope": "inference", "holds": True},
        operation_id="CreateVideo",
        operation_class=documented_body(VideoBody),
        summary="Generate a video; poll until it is completed",
        description="A form or JSON with `model`, `prompt` and OpenAI's fields, or those of a "
        "native request; `input_reference` is the first frame.",
    )
    async def create(self, request: ApiRequest) -> Response[VideoView]:
        received = await receive(request, repeated={})
        try:
            data = received.read(VideoBody)
            value = data.video_task()
            submission = Submission(
                model=data.model,
                task=choose_dialect_task(
                    request.services.requests.quotes.find(data.model), value, makes="video"
                ),
                input=value,
                stream=True,
                waits=False,
                idempotency=await idempotency(request, received.canonical),
            )
            return await _submit(request, submission)
        finally:
            await received.close()

    @get(opt={"scope": "read"}, operation_id="ListVideos", summary="List videos, in pages")
    async def index(
        self,
        request: ApiRequest,
        after: FromQuery[str | None] = None,
        limit: FromQuery[int] = 20,
        order: FromQuery[Direction] = "desc",
    ) -> Response[OpenAIListView[VideoView]]:
        check_limit(limit, PAGE_MAX)
        account_id = request.key.account_id
        if after is not None:
            await _find(request, after, param="after")
        records = await request.services.media.list(
            account_id,
            TASKS_OF_VIDEO,
            limit=limit + 1,
            after=_request_id(after) if after is not None else None,
            oldest_first=order == "asc",
        )
        views = [await _listed_view(request, record) for record in records[:limit]]
        # A request that is still being accepted has no view yet.
        shown = [view for view in views if view is not None]
        return json_response(list_view(shown, more=len(records) > limit))

    @get(
        "/{video_id:str}",
        opt={"scope": "read"},
        operation_id="GetVideo",
        summary="Status, progress and cost of a video",
    )
    async def show(self, request: ApiRequest, video_id: FromPath[str]) -> Response[VideoView]:
        record, found = await _find(request, video_id)
        return await _answer(request, record, found)

    @delete(
        "/{video_id:str}",
        status_code=200,
        opt={"scope": "inference"},
        operation_id="DeleteVideo",
        summary="Delete a video; an unfinished one is cancelled and not charged",
    )
    async def remove(self, request: ApiRequest, video_id: FromPath[str]) -> Response[DeletedView]:
        record, found = await _find(request, video_id)
        if isinstance(found, OpenRequest):
            await request.services.requests.cancel(record.account_id, record.request_id)
        await request.services.requests.forget(record.account_id, record.request_id)
        return json_response({"id": video_id, "object": "video.deleted", "deleted": True})

    @get(
        "/{video_id:str}/content",
        opt={"scope": "read", "media": MEDIA, "answers": [206], "errors": [410, 416]},
        operation_id="GetVideoContent",
        summary="Download a finished video, or its thumbnail or sprite sheet",
    )
    async def content(
        self,
        request: ApiRequest,
        video_id: FromPath[str],
        variant: FromQuery[Variant] = "video",
    ) -> Response[bytes] | Stream:
        _, found = await _find(request, video_id)
        if not isinstance(found, ClosedRequest) or found.status != "succeeded":
            raise NotFound(
                "video_not_ready",
                f"{video_id} is {video_status(found)}; only a completed video can be downloaded.",
            )
        if found.output is None:
            raise Gone("blob_expired", "This video has expired and was deleted.")
        role = "output" if variant == "video" else variant
        for medium in media_of(found):
            blob = blob_of(found, medium)
            if medium.role == role and blob is not None:
                extension = EXTENSIONS.get(blob.content_type, "bin")
                filename = f"{video_id}-{variant}.{extension}"
                return await serve(request, BlobResponse(blob.key, blob.content_type, filename))
        raise NotFound("variant_not_found", f"{video_id} has no {variant}.", param="variant")

    @post(
        "/{video_id:str}/remix",
        status_code=200,
        opt={"scope": "inference", "holds": True},
        operation_id="RemixVideo",
        summary="Generate a video again with another prompt: same seed, size and sources",
    )
    async def remix(
        self, request: ApiRequest, video_id: FromPath[str], data: JSONBody[RemixBody]
    ) -> Response[VideoView]:
        return await _remix(request, video_id, data.prompt)

    @post(
        "/edits",
        status_code=200,
        opt={"scope": "inference", "holds": True},
        operation_id="EditVideo",
        operation_class=documented_body(EditBody),
        summary="Remix the video with the given id",
    )
    async def edit(self, request: ApiRequest) -> Response[VideoView]:
        received = await receive(request, repeated={})
        try:
            if not isinstance(received.fields.get("video", {}), dict):
                raise _cannot("edit an uploaded video; send the id of one that was generated here")
            data = received.read(EditBody)
            return await _remix(request, data.video.id, data.prompt, received.canonical)
        finally:
            await received.close()

    @post(
        "/extensions",
        opt={"scope": "inference"},
        operation_id="ExtendVideo",
        summary="Refused: no model here extends a video",
    )
    async def extend(self) -> Response[None]:
        raise _cannot("extend a video; generate one that starts from an image")

    @post(
        "/characters",
        opt={"scope": "inference"},
        operation_id="CreateCharacter",
        summary="Refused: no model here learns a character",
    )
    async def create_character(self) -> Response[None]:
        raise _cannot("learn a character; generate a video that starts from an image of it")

    @get(
        "/characters/{character_id:str}",
        opt={"scope": "read"},
        operation_id="GetCharacter",
        summary="Never found: no model here learns a character",
    )
    async def character(self, character_id: FromPath[str]) -> Response[None]:
        raise NotFound(
            "character_not_found", f"No such character: {character_id!r}.", param="character_id"
        )


async def _remix(
    request: ApiRequest, video_id: str, prompt: str, canonical: bytes | None = None
) -> Response[VideoView]:
    record, found = await _find(request, video_id)
    if video_status(found) != "completed" or record.asked is None:
        raise InvalidRequest(
            "video_not_ready",
            f"{video_id} is {video_status(found)}; only a completed video can be remixed.",
        )
    value = remix_task(record.asked, prompt)
    submission = Submission(
        model=found.model,
        task=choose_dialect_task(
            request.services.requests.quotes.find(found.model), value, makes="video"
        ),
        input=value,
        stream=True,
        waits=False,
        idempotency=await idempotency(request, canonical),
        origin=record.request_id,
    )
    return await _submit(request, submission)


def _cannot(what: str) -> InvalidRequest:
    return InvalidRequest("task_not_supported", f"No model here can {what}.", param="video")


async def _submit(request: ApiRequest, submission: Submission) -> Response[VideoView]:
    services = request.services
    with await services.requests.submit(request.caller, submission) as ticket:
        found = await ticket.placed()
        try:
            record = await services.media.find(ticket.account_id, ticket.request_id)
        except SQL_OUTAGE:
            record = None
        # The video is accepted, so its client must learn its id even if its record is unreadable.
        record = record or Record(ticket.request_id, ticket.account_id, found.task, None)
        return await _answer(request, record, found)


async def _answer(
    request: ApiRequest, record: Record, found: OpenRequest | ClosedRequest
) -> Response[VideoView]:
    progress = await _progress(request, found)
    closed = found if isinstance(found, ClosedRequest) else None
    headers = request_headers(found.request_id, closed)
    if closed is None:
        soonest, latest = POLL_MS
        eta_ms = progress.eta_ms if progress is not None and progress.eta_ms else 2 * soonest
        headers["openai-poll-after-ms"] = str(min(max(eta_ms, soonest), latest))
    return json_response(_view(record, found, progress), headers=headers)


async def _listed_view(request: ApiRequest, record: Record) -> VideoView | None:
    try:
        found = await request.services.requests.lookup.find(record.account_id, record.request_id)
    except NotFound:
        return None
    return _view(record, found, await _progress(request, found))


async def _find(
    request: ApiRequest, video_id: str, *, param: str = "video_id"
) -> tuple[Record, OpenRequest | ClosedRequest]:
    """Find a video. Raise ``NotFound`` if the account does not have it, or no longer."""
    account_id = request.key.account_id
    record = await request.services.media.find(account_id, _request_id(video_id))
    if record is None or record.task not in TASKS_OF_VIDEO:
        raise NotFound("video_not_found", f"No such video: {video_id!r}.", param=param)
    return record, await request.services.requests.lookup.find(account_id, record.request_id)


async def _progress(request: ApiRequest, found: OpenRequest | ClosedRequest) -> Progress | None:
    if not isinstance(found, OpenRequest) or found.status != "running":
        return None
    return await request.services.requests.lookup.progress(found.request_id)


def _view(
    record: Record, found: OpenRequest | ClosedRequest, progress: Progress | None
) -> VideoView:
    asked = record.asked
    return video_view(
        found,
        asked.input if asked else {},
        origin=asked.origin if asked else None,
        progress=progress,
    )


def _request_id(video_id: str) -> str:
    return f"req_{video_id.removeprefix('video_')}" if video_id.startswith("video_") else ""


def batch_submission(body: Mapping[str, Any], entries: Entries) -> Submission:
    """Check one body of a batch."""
    data = read_body(VideoBody, body)
    refuse_in_batch(data, "previews")
    value = data.video_task()
    task = choose_dialect_task(entries(data.model), value, makes="video")
    return Submission(model=data.model, task=task, input=value)


BATCHES: Final = BatchEndpoint(
    VideosController.path,
    read=batch_submission,
    answer=lambda closed, body: encode_json(video_view(closed, body)),
    brings_files=True,
)

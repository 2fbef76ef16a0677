"""OpenAI's images: generated, edited or varied; in one response or as a stream with previews.

Besides OpenAI's fields, bodies accept those of ``POST /v1/requests`` (``seed``, ``steps``,
``guidance``, …), for which OpenAI has no names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, cast

from litestar import Controller, Response, post
from litestar.response import Stream

from gateway.api.http.answering import to_submission
from gateway.api.http.answers import (
    KEEP_ALIVE,
    KEEP_ALIVE_S,
    encode_json,
    event_data,
    event_stream,
    json_response,
    request_headers,
)
from gateway.api.http.bodies import read_body, refuse_in_batch
from gateway.api.http.content_types import EVENTS
from gateway.api.http.forms import ReceivedForm, documented_body, receive
from gateway.api.http.media_views import links_of
from gateway.api.http.request import ApiRequest
from gateway.api.openai.images_bodies import ImageBody
from gateway.api.openai.images_views import (
    ImageAnswer,
    ImagesView,
    PictureView,
    generated_images,
    image_view,
)
from gateway.batches.endpoint import BatchEndpoint, Entries
from gateway.batches.stored import place
from gateway.catalog.tasks import Task
from gateway.errors import InvalidRequest, TollgateError, render_openai
from gateway.ledger.closed import ClosedRequest
from gateway.requests.ticket import Ticket, raise_unless_succeeded
from gateway.tasks.submission import Submission
from gateway.tasks.visual import choose_dialect_task

SOURCES: Final = {"image": "images"}
BODY: Final = documented_body(ImageBody)


class ImagesController(Controller):
    path = "/v1/images"
    tags = ["OpenAI"]
    opt = {"scope": "inference", "holds": True}

    @post(
        "/generations",
        status_code=200,
        opt={"media": [EVENTS]},
        operation_id="CreateImage",
        operation_class=BODY,
        summary="Generate images, in one response or as a stream with previews",
        description="JSON with `model`, `prompt` and OpenAI's fields, or those of a native "
        "request.",
    )
    async def generate(self, request: ApiRequest) -> Response[ImagesView] | Stream:
        received = await receive(request, repeated=SOURCES)
        return await _generate(request, received, "image_generation", prefer=())

    @post(
        "/edits",
        status_code=200,
        opt={"media": [EVENTS]},
        operation_id="CreateImageEdit",
        operation_class=BODY,
        summary="Edit images by instruction",
        description="A form with `image` or several `image[]`, and optionally `mask`; or JSON with "
        '`images: [{"image_url"}]`.',
    )
    async def edit(self, request: ApiRequest) -> Response[ImagesView] | Stream:
        received = await receive(request, repeated=SOURCES)
        _require_image(received)
        return await _generate(request, received, "image_edit", prefer=("image-edit",))

    @post(
        "/variations",
        status_code=200,
        opt={"media": [EVENTS]},
        operation_id="CreateImageVariation",
        operation_class=BODY,
        summary="Generate variations of an image",
    )
    async def vary(self, request: ApiRequest) -> Response[ImagesView] | Stream:
        received = await receive(request, repeated=SOURCES)
        _require_image(received)
        return await _generate(request, received, "image_edit", prefer=("image-to-image",))


async def _generate(
    request: ApiRequest, received: ReceivedForm, event: str, *, prefer: Sequence[Task]
) -> Response[ImagesView] | Stream:
    """Submit a request for images and respond to it."""
    try:
        data = received.read(ImageBody)
        entry = request.services.requests.quotes.find(data.model)
        value = data.image_task(entry)
        submission = await to_submission(
            request,
            model=data.model,
            task=choose_dialect_task(entry, value, makes="image", prefer=prefer),
            input=value,
            stream=bool(data.stream),
            canonical=received.canonical,
        )
        ticket = await request.services.requests.submit(request.caller, submission)
    finally:
        await received.close()
    answer = ImageAnswer(data, links_of(request), request.services.blobs, event)
    if data.stream:
        headers = request_headers(ticket.request_id)
        return event_stream(_stream(ticket, answer), headers=headers)
    with ticket:
        closed = await ticket.closed(request)
    raise_unless_succeeded(closed)
    return json_response(
        await answer.view(closed), headers=request_headers(closed.request_id, closed)
    )


def _in_batches(path: str, *, prefer: Sequence[Task], edits: bool = False) -> BatchEndpoint:
    def read(body: Mapping[str, Any], entries: Entries) -> Submission:
        data = read_body(ImageBody, body)
        refuse_in_batch(data, "stream", "partial_images", "previews")
        if edits and not (data.image or data.images):
            raise _missing_image()
        entry = entries(data.model)
        value = data.image_task(entry)
        task = choose_dialect_task(entry, value, makes="image", prefer=prefer)
        return Submission(model=data.model, task=task, input=value)

    return BatchEndpoint(
        f"{ImagesController.path}{path}",
        read=read,
        answer=_batch_answer,
        brings_files=True,
    )


def _batch_answer(closed: ClosedRequest, body: Mapping[str, Any]) -> bytes:
    """Return an answer with placeholders; the images are filled in when the file is written."""
    data = read_body(ImageBody, body)
    images = [
        {**place(blob, data.response_format), "seed": medium.seed}
        for medium, blob in generated_images(closed)
    ]
    return encode_json(image_view(data, closed, cast("list[PictureView]", images)))


BATCHES: Final = (
    _in_batches("/generations", prefer=()),
    _in_batches("/edits", prefer=("image-edit",), edits=True),
)


async def _stream(ticket: Ticket, answer: ImageAnswer) -> AsyncIterator[bytes]:
    """Yield the events of an answer. Ending this early cancels the request."""
    with ticket:
        try:
            while (events := await ticket.next_events(KEEP_ALIVE_S)) is not None:
                if not events:
                    yield KEEP_ALIVE
                for sent in events:
                    if event := await answer.preview(sent):
                        yield _written(event)
            raise_unless_succeeded(ticket.result)
            async for event in answer.completed(ticket.result):
                yield _written(event)
        except TollgateError as error:
            yield event_data(render_openai(error), name="error")


def _written(event: Mapping[str, Any]) -> bytes:
    return event_data(event, name=event["type"])


def _require_image(received: ReceivedForm) -> None:
    if not (received.fields.get("image") or received.fields.get("images")):
        raise _missing_image()


def _missing_image() -> InvalidRequest:
    return InvalidRequest(
        "missing_required_parameter", "Missing required parameter: image.", param="image"
    )

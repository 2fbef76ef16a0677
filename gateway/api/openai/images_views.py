"""Answers in the shape of OpenAI's images: URLs, bytes and events.

Without a ``response_format``, an answer has both, because older clients read ``url`` and newer ones
``b64_json``. If the bytes cannot be read, the URLs remain: the images are charged, and an error
would make clients request them again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

from gateway.api.http.answers import ExactUsd, exact_number
from gateway.api.http.media_views import blob_of, media_of, read_base64
from gateway.api.openai.images_bodies import ImageBody
from gateway.catalog.vocabulary.words import without_words
from gateway.errors import RequestFailed, TollgateError
from gateway.files.download_urls import UrlSigner
from gateway.ledger.closed import ClosedRequest
from workers.contract.blobs import Blobs
from workers.contract.jobs import BlobRef, Preview, PromptWarning, SentEvent
from workers.contract.media import Medium

log = logging.getLogger(__name__)


class ImageTokensView(TypedDict):
    text_tokens: int
    image_tokens: int


class ImageUsageView(TypedDict):
    """OpenAI's token counts, and the counts of images and steps."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: ImageTokensView
    output_tokens_details: ImageTokensView
    images: int
    steps: int
    cost: ExactUsd


class PictureView(TypedDict):
    """An image as a URL, as bytes, or as both."""

    url: NotRequired[str]
    b64_json: NotRequired[str]
    revised_prompt: NotRequired[str]
    """The prompt without the words that the model does not know, if there are any."""
    seed: int


class FailedPictureView(TypedDict):
    index: int
    message: str


class DescribedView(TypedDict):
    background: str
    output_format: str
    quality: str
    size: str


class ImagesView(DescribedView):
    """The images of a request."""

    id: str
    created: int
    model: str
    data: list[PictureView]
    failed: NotRequired[list[FailedPictureView]]
    warnings: NotRequired[list[PromptWarning]]
    usage: ImageUsageView


@dataclass(slots=True)
class ImageAnswer:
    """Writes the answer to one request."""

    body: ImageBody
    links: UrlSigner
    blobs: Blobs
    event: str
    """Prefix of the names of its events."""
    last_preview: tuple[int, int, int] = (0, 0, -1)
    """Attempt, image and index of the last preview that was sent."""

    async def view(self, closed: ClosedRequest) -> ImagesView:
        """Return the answer. Raise ``RequestFailed`` if it needs bytes that cannot be read."""
        generated = generated_images(closed)
        texts = await self._texts(closed, [blob for _, blob in generated])
        data: list[PictureView] = []
        for (medium, blob), text in zip(generated, texts, strict=True):
            view: dict[str, Any] = {}
            if self.body.response_format != "b64_json":
                view["url"] = self.links.link(blob).url
            if text is not None:
                view["b64_json"] = text
            data.append(cast("PictureView", {**view, "seed": medium.seed}))
        return image_view(self.body, closed, data)

    async def preview(self, sent: SentEvent) -> dict[str, Any] | None:
        """Return an event with an unfinished image, or None if it was sent before."""
        event = sent.event
        if not isinstance(event, Preview) or self.body.response_format == "url":
            return None
        place = (sent.attempt, event.output, event.index)
        if place <= self.last_preview:
            return None
        self.last_preview = place
        try:
            (text,) = await read_base64(self.blobs, [event.blob])
        except TollgateError as error:
            log.info("skipped a preview of %s: %s", sent.request_id, error.code)
            return None
        return {
            "type": f"{self.event}.partial_image",
            "b64_json": text,
            "partial_image_index": event.index,
            "image_index": event.output,
            "created_at": int(time.time()),
            **_described_view(self.body, []),
        }

    async def completed(self, closed: ClosedRequest) -> AsyncIterator[dict[str, Any]]:
        """Yield an event for each finished image. The last one has the usage of all."""
        generated = generated_images(closed)
        for number, (medium, blob) in enumerate(generated, start=1):
            (text,) = await self._texts(closed, [blob])
            event: dict[str, Any] = {
                "type": f"{self.event}.completed",
                "image_index": medium.index,
                "created_at": int(closed.accepted_at.timestamp()),
                "seed": medium.seed,
                **_described_view(self.body, [medium], closed),
            }
            if self.body.response_format != "b64_json":
                event["url"] = self.links.link(blob).url
            if text is not None:
                event["b64_json"] = text
            if number == len(generated):
                event |= {"warnings": closed.warnings} if closed.warnings else {}
                event["usage"] = image_usage(closed)
            yield event

    async def _texts(self, closed: ClosedRequest, blobs: Sequence[BlobRef]) -> Sequence[str | None]:
        if self.body.response_format == "url":
            return [None] * len(blobs)
        try:
            return await read_base64(self.blobs, blobs)
        except TollgateError as error:
            if self.body.response_format is None:
                log.warning("%s is answered with URLs only: %s", closed.request_id, error.code)
                return [None] * len(blobs)
            raise RequestFailed(error.code, error.message, request_id=closed.request_id) from None


def image_view(body: ImageBody, closed: ClosedRequest, images: list[PictureView]) -> ImagesView:
    """Return the answer with these views of its images."""
    failed: list[FailedPictureView] = [
        {"index": medium.index, "message": medium.error}
        for medium in media_of(closed)
        if medium.error is not None
    ]
    understood = _understood(body, closed)
    if understood is not None:
        for image in images:
            image["revised_prompt"] = understood
    view = {
        "id": closed.request_id,
        "created": int(closed.accepted_at.timestamp()),
        "model": closed.model,
        "data": images,
        **({"failed": failed} if failed else {}),
        **({"warnings": closed.warnings} if closed.warnings else {}),
        **_described_view(body, [medium for medium, _ in generated_images(closed)], closed),
        "usage": image_usage(closed),
    }
    return cast("ImagesView", view)


def _understood(body: ImageBody, closed: ClosedRequest) -> str | None:
    """Return the prompt without words that the model does not know, or None if it knows all."""
    for warning in closed.warnings:
        if warning.field == "prompt":
            return without_words(body.prompt or "", warning.unknown)
    return None


def image_usage(closed: ClosedRequest) -> ImageUsageView:
    """Return OpenAI's token counts, which are 0 here, next to the actual counts."""
    none: ImageTokensView = {"text_tokens": 0, "image_tokens": 0}
    return {
        "input_tokens": closed.usage.input_tokens,
        "output_tokens": closed.usage.output_tokens,
        "total_tokens": closed.usage.tokens,
        "input_tokens_details": none,
        "output_tokens_details": none,
        "images": closed.usage.images,
        "steps": closed.usage.steps,
        "cost": exact_number(closed.cost_nanos),
    }


def generated_images(closed: ClosedRequest) -> list[tuple[Medium, BlobRef]]:
    """Return the images that were generated, with their blobs."""
    found = [(medium, blob_of(closed, medium)) for medium in media_of(closed)]
    return [
        (medium, blob) for medium, blob in found if blob is not None and medium.role == "output"
    ]


def _described_view(
    body: ImageBody, generated: Sequence[Medium], closed: ClosedRequest | None = None
) -> DescribedView:
    quality = closed.usage.attributes.get("quality") if closed is not None else None
    size = f"{generated[0].width}x{generated[0].height}" if generated else body.size or "auto"
    return {
        "background": "opaque",
        "output_format": body.output_format or body.format or "png",
        "quality": quality or body.quality or "auto",
        "size": size,
    }

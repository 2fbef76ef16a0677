"""Bodies of OpenAI's images, and their translation to a task's input. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from gateway.api.http.fields import ModelName, Refused
from gateway.catalog.schema import CatalogEntry
from gateway.errors import InvalidRequest
from gateway.tasks.visual import PREVIEWS_MAX, ImageTask
from workers.contract.media import ImageFormat

ResponseFormat = Literal["url", "b64_json"]


class ImageBody(ImageTask):
    """Body of ``POST /v1/images/generations``, ``/edits`` and ``/variations``."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "pocket-image", "prompt": "a red circle"}]},
    )

    model: ModelName
    output_format: ImageFormat | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    response_format: ResponseFormat | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=PREVIEWS_MAX)] | None = None

    # Accepted without effect: labels for the client's own use, and moderation, which is not done.
    user: str | None = None
    safety_identifier: str | None = None
    moderation: Literal["auto", "low"] | None = None

    # Known but refused: ignoring them would change the answer without notice.
    style: Refused[Any] = None
    input_fidelity: Refused[Any] = None
    markup: Refused[Any] = None
    complexity: Refused[Any] = None
    frame_count: Refused[Any] = None
    frame_duration_ms: Refused[Any] = None
    svg: Refused[Any] = None

    def image_task(self, entry: CatalogEntry) -> ImageTask:
        """Return the task's input. Raise ``InvalidRequest`` for options that are not supported."""
        if self.background == "transparent":
            raise InvalidRequest(
                "unsupported_parameter",
                "background is 'transparent'; the images generated here are opaque.",
                param="background",
            )
        if self.partial_images and not self.stream:
            raise InvalidRequest(
                "invalid_value", "partial_images needs stream: true.", param="partial_images"
            )
        given = {name: getattr(self, name) for name in ImageTask.model_fields}
        given |= {
            "quality": _quality(self.quality, entry),
            "format": self.output_format or self.format,
            "previews": self.partial_images or self.previews,
        }
        if self.output_compression is not None:
            given["compression"] = max(1, self.output_compression)
        return ImageTask.model_construct(**given)


def _quality(name: str | None, entry: CatalogEntry) -> str | None:
    """Map OpenAI's older names of qualities to those of the catalog entry."""
    if name is None or name in entry.qualities:
        return name
    return {"standard": "auto", "hd": "high"}.get(name, name)

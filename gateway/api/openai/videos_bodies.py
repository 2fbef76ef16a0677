"""Bodies of OpenAI's videos, and their translation to a task's input. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from gateway.api.http.fields import ModelName
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.files.retention import StoredInput
from gateway.files.sources import SourceField, StoredSource
from gateway.tasks.visual import VideoTask


class VideoBody(VideoTask):
    """Body of ``POST /v1/videos``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "pocket-video", "prompt": "a ball that falls", "seconds": "2"}]
        },
    )

    model: ModelName
    input_reference: SourceField | None = None

    # Accepted without effect: labels for the client's own use.
    user: str | None = None
    safety_identifier: str | None = None

    def video_task(self) -> VideoTask:
        """Return the task's input. Raise ``InvalidRequest`` if it names two first frames."""
        given = {name: getattr(self, name) for name in VideoTask.model_fields}
        if self.input_reference is not None:
            if self.image is not None or self.images:
                raise InvalidRequest(
                    "invalid_value",
                    "Send either input_reference or image.",
                    param="input_reference",
                )
            given["image"] = self.input_reference
        return VideoTask.model_construct(**given)


class RemixBody(StrictModel):
    """Body of ``POST /v1/videos/{id}/remix``."""

    prompt: Annotated[str, Field(min_length=1, max_length=32_000)]


class VideoReference(StrictModel):
    id: str


class EditBody(RemixBody):
    """Body of ``POST /v1/videos/edits``."""

    video: VideoReference


def remix_task(asked: StoredInput, prompt: str) -> VideoTask:
    """Build the input of an earlier request with another prompt: same seed, size and sources."""
    given = dict(asked.input)
    image_count, parameters = given.get("images", 0), dict(given.get("parameters", {}))
    sources = [StoredSource(blob) for blob in asked.attachments]
    duration_ms = given.get("duration_ms")
    kept = {
        name: value
        for name, value in given.items()
        if name in VideoTask.model_fields and name not in ("images", "video", "parameters")
    }
    nothing = dict.fromkeys(VideoTask.model_fields)
    return VideoTask.model_construct(
        **{
            **nothing,
            **kept,
            "prompt": prompt,
            "images": sources[:image_count] or None,
            "video": sources[image_count] if given.get("video") else None,
            "seconds": duration_ms / 1000 if duration_ms else None,
            "resolution": parameters.pop("resolution", None),
            "parameters": parameters or None,
        }
    )

"""Inputs of the task ``talking-head``: their schema, checks and maximum usage. Pure.

A model that runs here takes recorded speech and cannot synthesise it: a text must be turned into a
recording by an earlier step of a workflow. A model of an upstream may accept either.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from pydantic import Field, StringConstraints

from gateway.catalog.market.contract import longest_seconds
from gateway.catalog.schema import FPS_MAX, SECONDS_MAX, CatalogEntry
from gateway.catalog.tasks import Task
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.files.sources import Source, SourceField
from gateway.tasks.audio import TEXT_MAX
from gateway.tasks.prepared import Prepared, gpu_us_max, over
from workers.contract.jobs import Usage
from workers.contract.media import TalkingInput, characters

TASK: Final[Task] = "talking-head"


class TalkingTask(StrictModel):
    """A portrait, and its speech: a recording or, for some models, a text."""

    image: SourceField | None = None
    audio: SourceField | None = None
    text: Annotated[str, StringConstraints(max_length=TEXT_MAX)] | None = None
    seconds: Annotated[float, Field(gt=0, le=SECONDS_MAX)] | None = None
    """Maximum duration of the recording, if less than the entry's limit."""
    fps: Annotated[int, Field(ge=1, le=FPS_MAX)] | None = None
    parameters: dict[str, Any] | None = None


def prepare_talking(
    entry: CatalogEntry, task: Task, value: TalkingTask, *, prefix: str
) -> Prepared:
    """Check an input against a catalog entry and bound its usage."""
    limits, local = entry.limits, entry.upstream is None
    if task != TASK:
        raise InvalidRequest(
            "task_not_supported", f"{entry.name} does {task}, not {TASK}.", param="model"
        )
    for field in ("fps", "seconds"):
        given, most = getattr(value, field), getattr(limits, field)
        if given is not None and most is not None and given > most:
            raise over(f"{prefix}{field}", given, f"{entry.name} takes at most {most:g}")
    if value.text and limits.characters and characters(value.text) > limits.characters:
        most = f"{entry.name} reads {limits.characters} characters"
        raise over(f"{prefix}text", characters(value.text), most)
    if local:
        _check_local(entry, value, prefix)
        talking = TalkingInput(fps=value.fps or entry.default_parameters.fps)
        given = msgspec.to_builtins(talking)
    else:
        said = {"text": value.text, "fps": value.fps, "parameters": value.parameters}
        given = {name: one for name, one in said.items() if one}
    return Prepared(
        input=given,
        limits=Usage(
            requests=1,
            video_ms=round((value.seconds or longest_seconds(entry)) * 1000),
            steps=limits.steps or 0,
            gpu_us=gpu_us_max(limits),
        ),
        sources=_sources(value, prefix),
    )


def _sources(value: TalkingTask, prefix: str) -> tuple[Source, ...]:
    """Return the attachments in the order of the worker contract."""
    found = []
    if value.image is not None:
        found.append(Source("image", value.image, f"{prefix}image"))
    if value.audio is not None:
        found.append(Source("audio", value.audio, f"{prefix}audio"))
    return tuple(found)


def _check_local(entry: CatalogEntry, value: TalkingTask, prefix: str) -> None:
    for field in ("text", "parameters"):
        if getattr(value, field):
            raise InvalidRequest(
                "unsupported_parameter",
                f"{entry.name} takes no {field}; it animates a portrait by recorded speech. A "
                "workflow can synthesise a text first.",
                param=f"{prefix}{field}",
            )
    for needed, name in (("image", "a portrait"), ("audio", "a recording of the speech")):
        if getattr(value, needed) is None:
            raise InvalidRequest(
                "missing_required_parameter",
                f"{TASK} needs {name}; send {prefix}{needed}.",
                param=f"{prefix}{needed}",
            )

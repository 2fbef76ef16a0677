"""Inputs of the task ``speech-to-text``: their schema, checks and maximum usage. Pure.

A recording is bounded by what its file says of its duration, once that is stored; until then, and
for files that do not say it, by the entry's limit.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from pydantic import BeforeValidator, Field, StringConstraints

from gateway.catalog.schema import SECONDS_MAX, CatalogEntry
from gateway.catalog.tasks import Task
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.files.sources import Source, SourceField
from gateway.tasks.prepared import Prepared, gpu_us_max, over
from gateway.tasks.visual import PROMPT_MAX, SEED_MAX
from workers.contract.jobs import Usage
from workers.contract.media import TranscriptionInput

TASK: Final[Task] = "speech-to-text"
SECONDS_DEFAULT: Final = 3600.0
"""Maximum duration for entries without a limit."""
Granularity: TypeAlias = Literal["segment", "word"]


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class TranscriptionTask(StrictModel):
    """A recording, and how its text is written."""

    audio: SourceField | None = None
    language: Annotated[str, StringConstraints(max_length=100)] | None = None
    """Tag such as ``en``, or an English name. Default: detected, if the model can."""
    prompt: Annotated[str, StringConstraints(max_length=PROMPT_MAX)] | None = None
    translate: bool | None = None
    """Whether the text is English, whatever is spoken."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    timestamps: (
        Annotated[list[Granularity], Field(max_length=2), BeforeValidator(_several)] | None
    ) = None
    seconds: Annotated[float, Field(gt=0, le=SECONDS_MAX)] | None = None
    """Maximum duration of the recording, if less than the entry's limit."""
    seed: Annotated[int, Field(ge=0, lt=SEED_MAX)] | None = None


def prepare_transcription(
    entry: CatalogEntry, task: Task, value: TranscriptionTask, *, prefix: str
) -> Prepared:
    """Check an input against a catalog entry and bound its usage."""
    if task != TASK:
        raise InvalidRequest(
            "task_not_supported", f"{entry.name} does {task}, not {TASK}.", param="model"
        )
    if value.audio is None:
        raise InvalidRequest(
            "missing_required_parameter",
            f"{TASK} needs a recording; send {prefix}audio.",
            param=f"{prefix}audio",
        )
    most = entry.limits.seconds or SECONDS_DEFAULT
    if value.seconds is not None and value.seconds > most:
        raise over(f"{prefix}seconds", value.seconds, f"{entry.name} reads at most {most:g} s")
    _check_language(entry, value.language, prefix)
    seed = value.seed
    if seed is None:
        # A second attempt after a crash repeats the first, so that streams resume.
        seed = secrets.randbits(32) if value.temperature else 0
    given = TranscriptionInput(
        language=value.language or "",
        prompt=value.prompt or "",
        translate=bool(value.translate),
        temperature=value.temperature or 0.0,
        timestamps=tuple(dict.fromkeys(value.timestamps or ())),
        seed=seed,
    )
    milliseconds = round((value.seconds or most) * 1000)
    return Prepared(
        input=msgspec.to_builtins(given),
        limits=_limits(entry, milliseconds),
        sources=(Source("audio", value.audio, f"{prefix}audio"),),
        measured_by=measured_by,
    )


def measured_by(entry: CatalogEntry, prepared: Prepared, duration_ms: int | None) -> Prepared:
    """Bound a prepared transcription by the duration that its file states. Raise
    ``InvalidRequest`` if that is too long."""
    if duration_ms is None:
        return prepared
    most = prepared.limits.audio_ms
    if duration_ms > most:
        param = prepared.sources[0].param
        seconds = duration_ms / 1000
        raise over(param, seconds, f"this request is limited to recordings of {most / 1000:g} s")
    limits = _limits(entry, max(1, duration_ms))
    attributes = prepared.limits.attributes
    return replace(prepared, limits=msgspec.structs.replace(limits, attributes=attributes))


TOKENS_PER_SECOND: Final = 15
"""Bound on the tokens of a transcript. They have no price, and are counted by rate limits."""


def _limits(entry: CatalogEntry, milliseconds: int) -> Usage:
    return Usage(
        requests=1,
        audio_ms=milliseconds,
        output_tokens=TOKENS_PER_SECOND * (milliseconds // 1000 + 1),
        gpu_us=gpu_us_max(entry.limits),
    )


def _check_language(entry: CatalogEntry, language: str | None, prefix: str) -> None:
    known = entry.known_languages
    if not language or not known:
        return
    tags = {language.lower(), language.lower().replace("_", "-").partition("-")[0]}
    if tags.isdisjoint(one.lower() for one in known):
        raise InvalidRequest(
            "invalid_value",
            f"{prefix}language is {language!r}, but {entry.name} knows {', '.join(known)}.",
            param=f"{prefix}language",
        )

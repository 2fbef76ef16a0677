"""The inputs of every task, and their maximum usage. Pure: no I/O, no clock.

``prepare`` checks an input against the catalog entry and bounds every quantity of it. The hold
covers these bounds, so they must never be too low; bounds that are too high only reserve more
credit for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.catalog.schema import SECONDS_MAX, CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.files.sources import RemoteSource, Source, read_given
from gateway.tasks.audio import (
    MusicTask,
    SpeechTask,
    choose_audio_task,
    prepare_music,
    prepare_speech,
)
from gateway.tasks.contracts import check_contract
from gateway.tasks.embedding import TextEmbedding, prepare_embedding
from gateway.tasks.mistakes import invalid_field
from gateway.tasks.prepared import Prepared, gpu_us_max, over
from gateway.tasks.rerank import RerankTask, prepare_rerank
from gateway.tasks.talking_head import TalkingTask, prepare_talking
from gateway.tasks.text import TextCompletion, TextGeneration, prepare_text
from gateway.tasks.transcription import TranscriptionTask, prepare_transcription
from gateway.tasks.visual import (
    ImageTask,
    VideoTask,
    choose_visual_task,
    prepare_image,
    prepare_video,
)
from workers.contract import media
from workers.contract.jobs import Usage

SECONDS_PER_TOKEN: Final = 0.005
SECONDS_PER_IMAGE: Final = 1.0
RECORDING: Final = "source_audio"
"""Field of an upstream's input that holds the recording of the voice to clone."""
PREFILL_SPEEDUP: Final = 16
"""Prefill tokens that cost as much as one decoded token: prefill runs in parallel."""


class OtherTask(BaseModel):
    """An input in an upstream's own fields, passed on unchanged. The declared fields are those that
    prices count."""

    model_config = ConfigDict(extra="allow")

    prompt: str | None = None
    text: str | None = None
    seconds: Annotated[float, Field(gt=0, le=SECONDS_MAX)] | None = None


Input: TypeAlias = (
    TextGeneration
    | TextCompletion
    | TextEmbedding
    | RerankTask
    | ImageTask
    | VideoTask
    | SpeechTask
    | MusicTask
    | TalkingTask
    | TranscriptionTask
    | OtherTask
)


def parse(task: Task, value: Mapping[str, Any], *, prefix: str = "input") -> Input:
    """Check an input's shape. Raise ``InvalidRequest`` that names the invalid field."""
    return _read(schema_of(task, value), value, prefix)


def parse_unknown(value: Mapping[str, Any], *, prefix: str = "input") -> Input:
    """Read an input in an upstream's own fields. Raise ``InvalidRequest``."""
    return _read(OtherTask, value, prefix)


def _read(schema: type[Input], value: Mapping[str, Any], prefix: str) -> Input:
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise invalid_field(error.errors(include_url=False), prefix=prefix) from None


def schema_of(task: Task, value: Mapping[str, Any]) -> type[Input]:
    """Return the schema that reads an input of a task."""
    match task, TASKS[task].makes:
        case "text-generation", _:
            return TextCompletion if "prompt" in value else TextGeneration
        case "text-embedding", _:
            return TextEmbedding
        case "rerank", _:
            return RerankTask
        case "speech-to-text", _:
            return TranscriptionTask
        case _, "image":
            return ImageTask
        case "talking-head", _:
            return TalkingTask
        case _, "video":
            return VideoTask
        case "text-to-music", _:
            return MusicTask
    return SpeechTask


def choose_task(entry: CatalogEntry, value: Input) -> Task:
    """Choose the task of an input that names none."""
    if isinstance(value, ImageTask | VideoTask):
        return choose_visual_task(entry, value)
    if isinstance(value, SpeechTask | MusicTask):
        return choose_audio_task(entry, value)
    return entry.task


def prepare(
    entry: CatalogEntry, value: Input, *, task: Task | None = None, prefix: str = ""
) -> Prepared:
    """Check an input against a catalog entry's limits and bound its usage."""
    task = task or choose_task(entry, value)
    prefix = f"{prefix}." if prefix else ""
    prepared = _prepare(entry, task, value, prefix=prefix)
    are_theirs = isinstance(value, OtherTask)
    check_contract(entry, task, value, prefix=prefix, are_theirs=are_theirs)
    return prepared


def _prepare(entry: CatalogEntry, task: Task, value: Input, *, prefix: str) -> Prepared:
    if isinstance(value, TextGeneration | TextCompletion):
        return prepare_text(entry, value, prefix=prefix)
    if isinstance(value, TextEmbedding):
        return prepare_embedding(entry, value, prefix=prefix)
    if isinstance(value, ImageTask):
        return prepare_image(entry, task, value, prefix=prefix)
    if isinstance(value, VideoTask):
        return prepare_video(entry, task, value, prefix=prefix)
    if isinstance(value, SpeechTask):
        return prepare_speech(entry, task, value, prefix=prefix)
    if isinstance(value, MusicTask):
        return prepare_music(entry, task, value, prefix=prefix)
    if isinstance(value, TalkingTask):
        return prepare_talking(entry, task, value, prefix=prefix)
    if isinstance(value, RerankTask):
        return prepare_rerank(entry, value, prefix=prefix)
    if isinstance(value, TranscriptionTask):
        return prepare_transcription(entry, task, value, prefix=prefix)
    return _prepare_other(entry, task, value, prefix=prefix)


def estimate_cost_s(limits: Usage) -> float:
    """Estimate a request's device seconds, the cost by which the queue is fair between accounts.
    Only ratios between requests of one model matter."""
    tokens = limits.input_tokens / PREFILL_SPEEDUP + limits.output_tokens
    seconds = (limits.video_ms + limits.audio_ms) / 1000
    return tokens * SECONDS_PER_TOKEN + limits.images * SECONDS_PER_IMAGE + seconds


def _prepare_other(entry: CatalogEntry, task: Task, value: OtherTask, *, prefix: str) -> Prepared:
    limits = entry.limits
    if value.seconds is not None and limits.seconds and value.seconds > limits.seconds:
        raise over(
            f"{prefix}seconds", value.seconds, f"{entry.name} makes at most {limits.seconds} s"
        )
    characters = media.characters(value.prompt or "") + media.characters(value.text or "")
    if limits.characters and characters > limits.characters:
        field = "text" if value.text else "prompt"
        raise over(
            f"{prefix}{field}", characters, f"{entry.name} reads {limits.characters} characters"
        )
    duration_ms = round((value.seconds or limits.seconds or 0) * 1000)
    makes = TASKS[task].makes
    given = value.model_dump(exclude_unset=True)
    return Prepared(
        sources=_recordings(task, given, prefix),
        input=given,
        limits=Usage(
            requests=1,
            video_ms=duration_ms if makes == "video" else 0,
            audio_ms=duration_ms if makes == "audio" else 0,
            characters=characters if makes == "audio" else 0,
            steps=limits.steps or 0,
            gpu_us=gpu_us_max(limits),
        ),
    )


def _recordings(task: Task, given: dict[str, Any], prefix: str) -> tuple[Source, ...]:
    """Remove the recording from the input and return it, if it was sent inline or is an upload.

    A URL, or an id of the upstream, stays in the input unchanged.
    """
    if task != "voice-clone" or RECORDING not in given:
        return ()
    try:
        found = read_given(given[RECORDING])
    except ValueError:
        return ()
    if isinstance(found, RemoteSource):
        return ()
    del given[RECORDING]
    return (Source("audio", found, f"{prefix}{RECORDING}"),)

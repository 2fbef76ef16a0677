"""The tasks that a model can do, with their input and output modalities. A closed set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from gateway.catalog.schema import CatalogEntry

Modality: TypeAlias = Literal[
    "text", "embedding", "ranking", "transcript", "image", "video", "audio"
]
Task: TypeAlias = Literal[
    "text-generation",
    "text-embedding",
    "rerank",
    "text-to-image",
    "image-to-image",
    "image-edit",
    "image-relight",
    "image-restyle",
    "image-blend",
    "image-upscale",
    "text-to-video",
    "image-to-video",
    "video-upscale",
    "talking-head",
    "text-to-speech",
    "voice-clone",
    "text-to-music",
    "speech-to-text",
]


@dataclass(frozen=True, slots=True)
class TaskKind:
    """Modalities that a task reads and produces."""

    reads: tuple[Modality, ...]
    makes: Modality
    images_min: int = 1
    """Minimum number of images, if the task reads any."""


TASKS: Final[Mapping[Task, TaskKind]] = {
    "text-generation": TaskKind(("text",), "text"),
    "text-embedding": TaskKind(("text",), "embedding"),
    "rerank": TaskKind(("text",), "ranking"),
    "text-to-image": TaskKind(("text",), "image"),
    "image-to-image": TaskKind(("text", "image"), "image"),
    "image-edit": TaskKind(("text", "image"), "image"),
    "image-relight": TaskKind(("text", "image"), "image"),
    "image-restyle": TaskKind(("text", "image"), "image"),
    "image-blend": TaskKind(("text", "image"), "image", images_min=2),
    "image-upscale": TaskKind(("image",), "image"),
    "text-to-video": TaskKind(("text",), "video"),
    "image-to-video": TaskKind(("text", "image"), "video"),
    "video-upscale": TaskKind(("video",), "video"),
    "talking-head": TaskKind(("text", "image", "audio"), "video"),
    "text-to-speech": TaskKind(("text",), "audio"),
    "voice-clone": TaskKind(("text", "audio"), "audio"),
    "text-to-music": TaskKind(("text",), "audio"),
    "speech-to-text": TaskKind(("audio",), "transcript"),
}


def makes(task: str) -> Modality | None:
    """Return the output modality of a task, or None if the task is unknown."""
    return next((kind.makes for name, kind in TASKS.items() if name == task), None)


def flows_as(task: Task) -> Modality:
    """Return what a later step of a workflow reads of an output: of a transcript, its text."""
    made = TASKS[task].makes
    return "text" if made == "transcript" else made


PICTURES: Final = ("sources", "source_tokens")
"""Limits of the images in a conversation."""
_READ_PICTURES: Final = ("echo", "llm")
"""Engines whose conversations can contain images; llm if its checkpoint has a vision tower."""


def input_conflicts(entry: CatalogEntry) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Find what an entry lacks for images in conversations, or states without them."""
    if entry.input and entry.task != "text-generation":
        yield ("input",), f"{entry.task} itself says what it reads; only text-generation has it"
        return
    if entry.input and "text" not in entry.input:
        yield ("input",), "a conversation always contains text; add it"
    if "image" in entry.input:
        if entry.limits.source_tokens is None:
            yield ("limits",), "images need limits.source_tokens to bound the price of a prompt"
        dialect = entry.upstream.dialect if entry.upstream is not None else None
        if entry.engine not in _READ_PICTURES and dialect != "openai":
            runs_on = entry.engine or dialect
            yield ("input",), f"{runs_on} reads no images; the engine llm and the dialect openai do"
    elif entry.task == "text-generation":
        for name in PICTURES:
            if getattr(entry.limits, name) is not None:
                yield ("limits", name), "only models that read images have it; see input"

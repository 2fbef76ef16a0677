"""The tasks that a model can do, with their input and output modalities. A closed set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Modality: TypeAlias = Literal["text", "embedding", "image", "video", "audio"]
Task: TypeAlias = Literal[
    "text-generation",
    "text-embedding",
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
}


def makes(task: str) -> Modality | None:
    """Return the output modality of a task, or None if the task is unknown."""
    return next((kind.makes for name, kind in TASKS.items() if name == task), None)

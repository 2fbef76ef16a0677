"""Inputs and outputs of the tasks that make pictures, videos and sound.

What a client sends along (a source picture, a mask, a clip) is attached to the job as blobs, in the
order in which the input names them: first ``images`` sources, then the mask, then the video. What
comes out lies in ``Completed.blobs``, described place by place by ``Completed.output["media"]``.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

ImageFormat: TypeAlias = Literal["png", "jpeg", "webp"]
VideoFormat: TypeAlias = Literal["mp4", "webp"]
MediumKind: TypeAlias = Literal["image", "video", "audio"]


class ImageInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of every task that makes pictures. None leaves a choice to the model's entry.

    The gateway always sets ``seed``; picture number ``i`` of ``n`` is drawn with ``seed + i``.
    """

    prompt: str = ""
    negative_prompt: str = ""
    images: int = 0
    """Source pictures among the attachments."""
    mask: bool = False
    """Whether a mask follows them: only where it is white, or transparent, may anything change."""
    n: int = 1
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    strength: float | None = None
    """Of an image-to-image: 0 keeps the source, 1 forgets it."""
    scheduler: str | None = None
    seed: int = 0
    quality: str = ""
    """A name from the entry, such as ``low`` or ``high``; its price may depend on it."""
    scale: int = 1
    """How many times larger than drawn the picture is delivered."""
    format: ImageFormat = "png"
    compression: int = 90
    """Quality of JPEG and WebP, 1 to 100."""
    previews: int = 0
    """Unfinished pictures to be shown on the way, of each output."""
    parameters: dict[str, Any] = {}
    """Whatever else an upstream's model understands; never read here."""


class VideoInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of every task that makes a video: from text, from a first picture, from a video."""

    prompt: str = ""
    negative_prompt: str = ""
    images: int = 0
    """Source pictures among the attachments; the first is the first frame."""
    video: bool = False
    """Whether a video follows them."""
    width: int | None = None
    height: int | None = None
    duration_ms: int | None = None
    fps: int | None = None
    steps: int | None = None
    guidance: float | None = None
    scheduler: str | None = None
    seed: int = 0
    scale: int | None = None
    """Of ``video-upscale``: how many times wider and higher."""
    format: VideoFormat = "mp4"
    parameters: dict[str, Any] = {}


class Medium(msgspec.Struct, frozen=True, omit_defaults=True):
    """One output. Where it failed there is an ``error`` and no blob; it is not billed."""

    kind: MediumKind
    index: int = 0
    """Which of ``n`` it is."""
    blob: int | None = None
    """Its place in ``Completed.blobs``."""
    role: Literal["output", "thumbnail", "spritesheet"] = "output"
    content_type: str = ""
    width: int = 0
    height: int = 0
    duration_ms: int = 0
    fps: int = 0
    seed: int = 0
    error: str | None = None


class File(msgspec.Struct, frozen=True):
    """Bytes on their way between an engine and its agent; only blobs travel further."""

    content_type: str
    data: bytes

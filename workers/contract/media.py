"""Inputs and outputs of the tasks that make pictures, videos and sound.

What a client sends along (a source picture, a mask, a clip) is attached to the job as blobs, in the
order in which the input names them: first ``images`` sources, then the mask, then the video; of
speech the recording; of a talking head the portrait and then what it says. What comes out lies in
``Completed.blobs``, described place by place by ``Completed.output["media"]``.
"""

from __future__ import annotations

import unicodedata
from typing import Any, Final, Literal, TypeAlias

import msgspec

ImageFormat: TypeAlias = Literal["png", "jpeg", "webp"]
VideoFormat: TypeAlias = Literal["mp4", "webp"]
AudioFormat: TypeAlias = Literal["wav", "mp3", "opus", "flac", "aac", "pcm", "ulaw", "alaw"]
"""Opus comes in Ogg, AAC in ADTS; ``pcm`` is bare samples, 16 bits signed and little-endian, of two
channels by turns; ``ulaw`` and ``alaw`` are those of telephones (G.711), 8 bits at 8 kHz."""
RATE_MIN: Final = 8_000
RATE_MAX: Final = 48_000
"""Of sound that can be asked for, in Hz."""
SPEED_MIN: Final = 0.25
SPEED_MAX: Final = 4.0
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
    previews: int = 0
    """Frames of what it will be to be shown on the way."""


class SpeechInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of every task that speaks. None, or an empty text, leaves a choice to the entry.

    The gateway always sets ``seed``: with it a second attempt repeats the first (see ``Sound``).
    """

    text: str
    voice: str = ""
    """A name from the entry."""
    language: str = ""
    """A tag such as ``en`` or ``pt-BR``: how numbers and dates are read, and by some models all."""
    speed: float = 1.0
    """How many times as fast as the model would speak by itself."""
    instructions: str = ""
    """How it is to be spoken, of models that understand that."""
    recording: bool = False
    """Whether a recording of the voice to be spoken in is attached."""
    transcript: str = ""
    """What is said in that recording."""
    format: AudioFormat = "mp3"
    sample_rate: int | None = None
    """In Hz; by default the model's own, or the nearest above it that the format knows."""
    seed: int = 0
    parameters: dict[str, Any] = {}
    """Whatever else an upstream's model understands; never read here."""
    bitrate: int | None = None
    """In bits a second, of a format that loses some; the nearest that it has."""


class MusicInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of ``text-to-music``; what was said of ``SpeechInput`` holds here too."""

    prompt: str = ""
    lyrics: str = ""
    key: str = ""
    """Such as ``C major`` or ``F# minor``."""
    tempo: float | None = None
    """In beats a minute."""
    mood: str = ""
    duration_ms: int | None = None
    format: AudioFormat = "mp3"
    sample_rate: int | None = None
    seed: int = 0
    parameters: dict[str, Any] = {}
    bitrate: int | None = None


class TalkingInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of ``talking-head`` of a model that runs here: portrait and recording are attached."""

    fps: int | None = None


def characters(text: str) -> int:
    """How many characters of a text are counted and charged for: the Unicode code points of what
    the client sent, after normalisation to NFC, whether they are spoken or not."""
    return len(unicodedata.normalize("NFC", text))


class Medium(msgspec.Struct, frozen=True, omit_defaults=True):
    """One output. Where it failed there is an ``error`` and no blob; it is not billed."""

    kind: MediumKind
    index: int = 0
    """Which of ``n`` it is."""
    blob: int | None = None
    """Its place in ``Completed.blobs``."""
    role: Literal["output", "thumbnail", "spritesheet", "score", "preview"] = "output"
    """``score``: the notes of a piece of music. ``preview``: the last preview that was delivered of
    a picture whose request ended early."""
    content_type: str = ""
    width: int = 0
    height: int = 0
    duration_ms: int = 0
    fps: int = 0
    sample_rate: int = 0
    """Of sound, in Hz."""
    seed: int = 0
    error: str | None = None
    cut: bool = False
    """Of speech: whether it ends at the request's limit instead of the end of its text."""


class File(msgspec.Struct, frozen=True):
    """Bytes on their way between an engine and its agent; only blobs travel further."""

    content_type: str
    data: bytes

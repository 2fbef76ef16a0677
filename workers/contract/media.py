"""Inputs and outputs of the tasks beside text generation and embeddings.

Attachments are blobs of the job, in this order: first ``images`` source images, then the mask, the
picture of the control network, the reference image, and the video; for speech the recording; for a
talking head the portrait, then the audio. Outputs are in ``Completed.blobs``, and
``Completed.output["media"]`` describes each of them.
"""

from __future__ import annotations

import unicodedata
from typing import Any, Final, Literal, TypeAlias

import msgspec

ImageFormat: TypeAlias = Literal["png", "jpeg", "webp"]
VideoFormat: TypeAlias = Literal["mp4", "webp"]
AudioFormat: TypeAlias = Literal["wav", "mp3", "opus", "flac", "aac", "pcm", "ulaw", "alaw"]
"""Opus is in Ogg, AAC in ADTS. ``pcm`` is raw samples: 16-bit signed little-endian, channels
interleaved. ``ulaw`` and ``alaw`` are G.711: 8 bits at 8 kHz."""
RATE_MIN: Final = 8_000
RATE_MAX: Final = 48_000
"""Range of sample rates that can be requested, in Hz."""
SPEED_MIN: Final = 0.25
SPEED_MAX: Final = 4.0
MediumKind: TypeAlias = Literal["image", "video", "audio"]


class ImageInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of every task that produces images. None selects the default of the catalog entry.

    The gateway always sets ``seed``; image ``i`` of ``n`` is generated with ``seed + i``.
    """

    prompt: str = ""
    negative_prompt: str = ""
    images: int = 0
    """Number of source images among the attachments."""
    mask: bool = False
    """Whether a mask follows them; only its white or transparent area may change."""
    n: int = 1
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    strength: float | None = None
    """For image-to-image: 0 keeps the source, 1 ignores it."""
    scheduler: str | None = None
    seed: int = 0
    quality: str = ""
    """A name from the entry, such as ``low`` or ``high``; the price can depend on it."""
    scale: int = 1
    """Upscaling factor of the delivered image."""
    format: ImageFormat = "png"
    compression: int = 90
    """Quality of JPEG and WebP, 1 to 100."""
    previews: int = 0
    """Number of previews of each output."""
    parameters: dict[str, Any] = {}
    """Further parameters for an upstream's model; never interpreted here."""
    adapters: dict[str, float] = {}
    """Names of LoRA adapters of the entry, with their scales."""
    control: str = ""
    """Name of a control network of the entry, whose picture is attached."""
    control_strength: float | None = None
    reference: bool = False
    """Whether a reference image is attached, which is read as a part of the prompt."""
    reference_strength: float | None = None


class VideoInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of every task that produces video: from text, from a first frame, from a video."""

    prompt: str = ""
    negative_prompt: str = ""
    images: int = 0
    """Number of source images among the attachments; the first is the first frame."""
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
    """For ``video-upscale``: upscaling factor of width and height."""
    format: VideoFormat = "mp4"
    parameters: dict[str, Any] = {}
    previews: int = 0
    """Number of preview frames."""
    adapters: dict[str, float] = {}
    """As in ``ImageInput``."""


class SpeechInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of every speech task. None, or an empty string, selects the default of the entry.

    The gateway always sets ``seed``: with it a second attempt repeats the first (see
    ``AudioChunk``).
    """

    text: str
    voice: str = ""
    """A name from the entry."""
    language: str = ""
    """A tag such as ``en`` or ``pt-BR``: selects how numbers and dates are pronounced and, for some
    models, the whole pronunciation."""
    speed: float = 1.0
    """Speed relative to the model's own."""
    instructions: str = ""
    """Speaking instructions, for models that support them."""
    recording: bool = False
    """Whether a recording of the voice is attached."""
    transcript: str = ""
    """Transcript of the recording."""
    format: AudioFormat = "mp3"
    sample_rate: int | None = None
    """In Hz. Default: the model's, or the next higher one that the format supports."""
    seed: int = 0
    parameters: dict[str, Any] = {}
    """Further parameters for an upstream's model; never interpreted here."""
    bitrate: int | None = None
    """In bits per second, for lossy formats; the nearest supported one is used."""


class MusicInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of ``text-to-music``; defaults and ``seed`` as in ``SpeechInput``."""

    prompt: str = ""
    lyrics: str = ""
    key: str = ""
    """Such as ``C major`` or ``F# minor``."""
    tempo: float | None = None
    """In beats per minute."""
    mood: str = ""
    duration_ms: int | None = None
    format: AudioFormat = "mp3"
    sample_rate: int | None = None
    seed: int = 0
    parameters: dict[str, Any] = {}
    bitrate: int | None = None


class TalkingInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of ``talking-head`` for local models; portrait and recording are attachments."""

    fps: int | None = None


class TranscriptionInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of ``speech-to-text``; the recording is the attachment. An empty language is detected.

    The gateway always sets ``seed``, which matters only above temperature 0.
    """

    language: str = ""
    prompt: str = ""
    """Text that precedes the recording, such as names that occur in it."""
    translate: bool = False
    """Whether the text is English, whatever is spoken."""
    temperature: float = 0.0
    timestamps: tuple[Literal["segment", "word"], ...] = ()
    seed: int = 0


class TranscribedSegment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A segment of a transcript: its times within the recording, and how sure the model was."""

    start_ms: int
    end_ms: int
    text: str
    tokens: tuple[int, ...] = ()
    """The model's own tokens, timestamps included."""
    seek: int = 0
    """First frame of its window, in hundredths of a second."""
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0


class TranscribedWord(msgspec.Struct, frozen=True):
    """A word of a transcript, with its times within the recording."""

    text: str
    start_ms: int
    end_ms: int


class Transcript(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a transcription knows beside its text, which is choice 0 of the output."""

    duration_ms: int
    language: str = ""
    """Name of the language, such as ``english``; empty if the model knows one only."""
    segments: tuple[TranscribedSegment, ...] = ()
    words: tuple[TranscribedWord, ...] = ()


class RerankInput(msgspec.Struct, frozen=True):
    """Input of a ``rerank`` job; every document is scored."""

    query: str
    documents: tuple[str, ...]


def characters(text: str) -> int:
    """Return the number of characters charged for a text: its Unicode code points after
    normalisation to NFC, whether they are spoken or not."""
    return len(unicodedata.normalize("NFC", text))


class Medium(msgspec.Struct, frozen=True, omit_defaults=True):
    """One output. A failed one has an ``error`` and no blob, and is not charged."""

    kind: MediumKind
    index: int = 0
    """Number of the output, from 0 to ``n - 1``."""
    blob: int | None = None
    """Index in ``Completed.blobs``."""
    role: Literal["output", "thumbnail", "spritesheet", "score", "preview"] = "output"
    """``score``: the notes of generated music. ``preview``: the last delivered preview of an image
    whose request ended early."""
    content_type: str = ""
    width: int = 0
    height: int = 0
    duration_ms: int = 0
    fps: int = 0
    sample_rate: int = 0
    """For audio, in Hz."""
    seed: int = 0
    error: str | None = None
    cut: bool = False
    """For speech: whether it was truncated at the request's limit."""


class File(msgspec.Struct, frozen=True):
    """File content exchanged between an engine and its agent; elsewhere, files are blobs."""

    content_type: str
    data: bytes

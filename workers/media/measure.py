"""What a finished file says of itself: size, rate, length, read from its header alone."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Final

import av
from PIL import Image

_FORMATS: Final = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,wav,mp3,flac,ogg,aac"
_BROKEN: Final = (
    av.FFmpegError,
    Image.DecompressionBombError,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    SyntaxError,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """0 is unknown."""

    width: int = 0
    height: int = 0
    duration_ms: int = 0
    fps: int = 0


def measure(data: bytes, content_type: str) -> Measured:
    """Read what the header says; everything is unknown of a file that cannot be read."""
    try:
        if content_type.startswith("image/"):
            return _picture(data)
        return _container(data)
    except _BROKEN:
        return Measured()


def _picture(data: bytes) -> Measured:
    with warnings.catch_warnings():
        # Nothing is decoded here, so its size is no danger.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP", "GIF")) as image:
            return Measured(*image.size)


def _container(data: bytes) -> Measured:
    # Opened as itself, never as a playlist that would lead to other files.
    with av.open(io.BytesIO(data), "r", options={"format_whitelist": _FORMATS}) as container:
        duration_ms = round((container.duration or 0) / 1000)
        if not container.streams.video:
            return Measured(duration_ms=duration_ms)
        stream = container.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
        return Measured(
            stream.codec_context.width,
            stream.codec_context.height,
            duration_ms,
            round(rate) if rate else 0,
        )

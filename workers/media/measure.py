"""Reads size, frame rate and duration from the header of a file, without decoding it."""

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
class MediaProperties:
    """Properties of an image, a video or audio; 0 means unknown."""

    width: int = 0
    height: int = 0
    duration_ms: int = 0
    fps: int = 0


def measure(data: bytes, content_type: str) -> MediaProperties:
    """Read a file's header. If it is invalid, all properties are unknown."""
    try:
        if content_type.startswith("image/"):
            return _measure_image(data)
        return _measure_container(data)
    except _BROKEN:
        return MediaProperties()


def _measure_image(data: bytes) -> MediaProperties:
    with warnings.catch_warnings():
        # Nothing is decoded here, so a large size is harmless.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP", "GIF")) as image:
            return MediaProperties(*image.size)


def _measure_container(data: bytes) -> MediaProperties:
    # Only these formats: a playlist could refer to other files.
    with av.open(io.BytesIO(data), "r", options={"format_whitelist": _FORMATS}) as container:
        duration_ms = round((container.duration or 0) / 1000)
        if not container.streams.video:
            return MediaProperties(duration_ms=duration_ms)
        stream = container.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
        return MediaProperties(
            stream.codec_context.width,
            stream.codec_context.height,
            duration_ms,
            round(rate) if rate else 0,
        )

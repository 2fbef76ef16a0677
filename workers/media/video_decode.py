"""Clips that clients send, frame by frame at a constant rate.

As hostile as pictures, and there is more of it: size, rate and length are read from the header and
checked first, then checked again while frames come, because headers lie. Nothing outside the bytes
is ever opened.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, TypeAlias

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from workers.media.pixels import Audio, MediaError, Pixels

_ACCEPTED: Final = "MP4, MOV, WebM and animated WebP are accepted"
_CODECS: Final = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "prores")
_FPS_MAX: Final = 120
_FPS_UNKNOWN: Final = Fraction(25)
_RATE_MAX: Final = 192_000
"""Of sound, in Hz; what claims more is as good as silent."""
_DECODED_MAX: Final = 4
"""Frames decoded for each that is allowed: a rate that varies drops some."""
_WHOLE: Final = Fraction(9, 10)
"""Of its length as the header has it; a clip that ends earlier is cut off."""
_BROKEN: Final = (av.FFmpegError, OSError, EOFError, ValueError, LookupError, OverflowError)
"""What the libraries are known to raise at damaged bytes."""
_BT601, _BT709 = 5, 1
_HD_HEIGHT: Final = 720
_UNSPECIFIED: Final = 2

_Timed: TypeAlias = Iterator[tuple[Fraction, Pixels]]
"""Frames with their time in seconds."""


@dataclass(frozen=True, slots=True)
class Footage:
    """A clip whose header was read; ``frames`` decodes as it is iterated, once."""

    width: int
    height: int
    fps: Fraction
    frames_expected: int
    """What the header says; there may be some more or fewer."""
    frames: Iterator[Pixels]
    """Each ``(H, W, 3)``. Raise ``MediaError`` where a frame is damaged or one too many."""
    audio: Audio | None = None


@dataclass(frozen=True, slots=True)
class _Limits:
    pixels: int
    frames: int
    seconds: float

    def check_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise MediaError(f"The video is {width}x{height}, which is no size.")
        if width * height > self.pixels:
            raise MediaError(
                f"The video is {width}x{height}, {width * height} pixels; at most {self.pixels}."
            )

    def check_length(self, seconds: float | Fraction) -> None:
        if seconds > self.seconds:
            raise MediaError(
                f"The video is {float(seconds):.1f} seconds long; at most {self.seconds:g}."
            )

    def check_frames(self, count: int) -> None:
        if count > self.frames:
            raise MediaError(f"The video has more than {self.frames} frames.")


def open_video(
    data: bytes,
    *,
    pixels_max: int,
    frames_max: int,
    seconds_max: float,
    audio: bool = False,
) -> Footage:
    """Read a clip's header, and its sound if wanted. ``pixels_max`` is of one frame.

    Raise ``MediaError``. A rate that varies becomes constant: frames are repeated or left out.
    """
    limits = _Limits(pixels_max, frames_max, seconds_max)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _open_webp(data, limits)
    try:
        return _open_container(data, limits, audio=audio)
    except MediaError:
        raise
    except _BROKEN as error:
        raise MediaError("The video is damaged and cannot be read.") from error


# --- MP4, MOV and WebM ---------------------------------------------------------------------------


def _open_container(data: bytes, limits: _Limits, *, audio: bool) -> Footage:
    kind = _kind(data)
    with _demuxer(data, kind, limits) as container:
        stream = _picture_stream(container)
        context = stream.codec_context
        limits.check_size(context.width, context.height)
        length = _length(container, stream)
        limits.check_length(length or 0)
        rate = stream.average_rate or stream.guessed_rate
        fps = Fraction(rate) if rate and 0 < rate <= _FPS_MAX else _FPS_UNKNOWN
        expected = max(1, round(length * fps) if length else stream.frames)
        limits.check_frames(expected)
        sound = _sound(data, kind, limits) if audio and container.streams.audio else None
    frames = _guarded(_steady(_decoded(data, kind, limits), fps, limits))
    first = next(frames, None)
    if first is None:
        raise MediaError("The video has no frame.")
    height, width = first.shape[:2]
    return Footage(width, height, fps, expected, _with_first(first, frames), sound)


def _kind(data: bytes) -> str:
    """The one demuxer to try; Matroska only as WebM."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3" and b"webm" in data[:64]:
        return "matroska"
    raise MediaError(f"This is no video that can be read; {_ACCEPTED}.")


def _demuxer(data: bytes, kind: str, limits: _Limits) -> InputContainer:
    # Reading the header decodes a frame where that alone tells its form; the codec refuses it too.
    options = {"max_pixels": str(limits.pixels)}
    return av.open(io.BytesIO(data), "r", format=kind, options=options, metadata_errors="replace")


def _picture_stream(container: InputContainer) -> VideoStream:
    if not container.streams.video:
        raise MediaError("The video has no picture, only sound.")
    stream = container.streams.video[0]
    # A stream in a codec that the library does not know has no context, whatever its types say.
    codec = getattr(stream.codec_context, "codec", None)
    name = codec.canonical_name if codec else "something unknown"
    if name not in _CODECS:
        raise MediaError(f"The video is coded as {name}; accepted are {', '.join(_CODECS)}.")
    return stream


def _length(container: InputContainer, stream: VideoStream) -> Fraction | None:
    """Seconds as the header says: of the picture, or of what is shown of it, if that is less."""
    lengths = []
    if container.duration and container.duration > 0:
        lengths.append(Fraction(container.duration, 1_000_000))
    if stream.duration and stream.duration > 0 and stream.time_base:
        lengths.append(stream.duration * stream.time_base)
    return min(lengths, default=None)


def _decoded(data: bytes, kind: str, limits: _Limits) -> _Timed:
    """Upright frames with their times, all of the first one's size."""
    with _demuxer(data, kind, limits) as container:
        stream = _picture_stream(container)
        stream.codec_context.options = {"max_pixels": str(limits.pixels)}
        stream.thread_type = "AUTO"
        length = _length(container, stream)
        size: tuple[int, int] | None = None
        start = end = Fraction(0)
        for count, frame in enumerate(container.decode(stream)):
            limits.check_size(frame.width, frame.height)
            limits.check_frames(count // _DECODED_MAX)
            if frame.is_corrupt:
                raise MediaError(f"The video is damaged at frame {count}.")
            size = size or (frame.width, frame.height)
            if frame.pts is None or frame.time_base is None:
                end += 1 / _FPS_UNKNOWN
            else:
                time = frame.pts * frame.time_base
                start = time if count == 0 else start
                end = max(end, time - start)
            yield end, _pixels(frame, size)
        if length and end < length * _WHOLE - 1:
            raise MediaError(
                f"The video breaks off after {float(end):.1f} of {float(length):.1f} seconds."
            )


def _pixels(frame: VideoFrame, size: tuple[int, int]) -> Pixels:
    """RGB by the frame's own colour matrix; where it names none, by the habit of its height."""
    unnamed = _BT709 if frame.height >= _HD_HEIGHT else _BT601
    space = unnamed if frame.colorspace in (0, _UNSPECIFIED) else frame.colorspace
    drawn = frame.reformat(*size, format="rgb24", src_colorspace=space)
    turned = np.rot90(np.asarray(drawn.to_ndarray(), np.uint8), frame.rotation // 90 % 4)
    return np.ascontiguousarray(turned)


def _sound(data: bytes, kind: str, limits: _Limits) -> Audio | None:
    """All of it, in at most two channels; what exceeds the longest video is left out."""
    parts: list[np.ndarray] = []
    with _demuxer(data, kind, limits) as container:
        stream = container.streams.audio[0]
        rate = getattr(stream.codec_context, "sample_rate", 0)  # as above
        if not rate or rate > _RATE_MAX:
            return None
        layout = "mono" if stream.codec_context.channels == 1 else "stereo"
        resampler = av.AudioResampler("fltp", layout, rate)
        left = round(limits.seconds * rate)
        for frame in container.decode(stream):
            parts.extend(part.to_ndarray() for part in resampler.resample(frame))
            left -= frame.samples
            if left <= 0:
                break
        parts.extend(part.to_ndarray() for part in resampler.resample(None))
    if not parts:
        return None
    return Audio(np.concatenate(parts, axis=1).astype(np.float32), rate)


# --- Animated WebP -------------------------------------------------------------------------------


def _open_webp(data: bytes, limits: _Limits) -> Footage:
    width, height, durations = _read_chunks(data)
    limits.check_size(width, height)
    limits.check_frames(len(durations))
    seconds = Fraction(sum(durations), 1000)
    limits.check_length(seconds)
    fps = min(Fraction(1000, min(durations)), Fraction(_FPS_MAX))
    expected = max(1, round(seconds * fps))
    limits.check_frames(expected)
    frames = _guarded(_steady(_webp_frames(data, durations), fps, limits))
    return Footage(width, height, fps, expected, frames)


def _read_chunks(data: bytes) -> tuple[int, int, list[int]]:
    """Width, height and the milliseconds of each frame, without decoding one.

    The container is Google's "WebP Container Specification". Frames of 10 ms or less are shown for
    100, as browsers do.
    """
    size, durations, place = (0, 0), [], 12
    while place + 8 <= len(data):
        name, length = (
            data[place : place + 4],
            int.from_bytes(data[place + 4 : place + 8], "little"),
        )
        chunk = data[place + 8 : place + 8 + min(length, 16)]
        if name == b"VP8X" and len(chunk) >= 10:
            size = (
                int.from_bytes(chunk[4:7], "little") + 1,
                int.from_bytes(chunk[7:10], "little") + 1,
            )
        elif name == b"ANMF" and len(chunk) == 16:
            shown = int.from_bytes(chunk[12:15], "little")
            durations.append(shown if shown > 10 else 100)
        place += 8 + length + length % 2
    if not durations:
        raise MediaError(f"This WebP is not animated; as a video {_ACCEPTED}.")
    if place > len(data) + 1:
        raise MediaError("The video breaks off: its last frame is not whole.")
    return *size, durations


def _webp_frames(data: bytes, durations: list[int]) -> _Timed:
    time = 0
    with Image.open(io.BytesIO(data), formats=("WEBP",)) as image:
        for place, shown in enumerate(durations):
            image.seek(place)
            pixels = np.asarray(image.convert("RGB"))
            yield Fraction(time, 1000), pixels
            time += shown
        # Its last frame is shown for a while too.
        yield Fraction(time - min(durations), 1000), pixels


# --- Of both -------------------------------------------------------------------------------------


def _steady(timed: _Timed, fps: Fraction, limits: _Limits) -> Iterator[Pixels]:
    """The frame that is seen at each tick of a constant rate."""
    shown: Pixels | None = None
    given = 0
    with closing(timed):  # type: ignore[type-var]  # it is a generator
        for time, pixels in timed:
            limits.check_length(time)
            place = round(time * fps)
            limits.check_frames(place + 1)
            while shown is not None and given < place:
                given += 1
                yield shown
            shown = pixels
        if shown is not None:
            yield shown


def _guarded(frames: Iterator[Pixels]) -> Iterator[Pixels]:
    """Say of damage in the middle what is said of damage at the start."""
    try:
        yield from frames
    except MediaError:
        raise
    except _BROKEN as error:
        raise MediaError("The video is damaged and cannot be read.") from error


def _with_first(first: Pixels, rest: Iterator[Pixels]) -> Iterator[Pixels]:
    yield first
    yield from rest

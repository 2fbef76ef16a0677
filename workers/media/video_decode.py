"""Decodes videos from clients, frame by frame, to a constant frame rate.

The bytes are untrusted: size, rate and length are checked in the header, and again while decoding,
because headers are unreliable. Nothing outside the bytes is read.
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
"""Maximum sample rate of audio, in Hz; a track that declares more is ignored."""
_DECODED_PER_FRAME_MAX: Final = 4
"""Decoded frames per allowed frame: at a variable rate, some are dropped."""
_COMPLETE: Final = Fraction(9, 10)
"""Fraction of the length in the header below which a video counts as truncated."""
_BROKEN: Final = (av.FFmpegError, OSError, EOFError, ValueError, LookupError, OverflowError)
"""What the libraries are known to raise for damaged files."""
_BT601, _BT709 = 5, 1
_HD_HEIGHT: Final = 720
_UNSPECIFIED: Final = 2

_TimedFrames: TypeAlias = Iterator[tuple[Fraction, Pixels]]
"""Frames, each with its time in seconds."""


@dataclass(frozen=True, slots=True)
class VideoSource:
    """A video whose header was read; ``frames`` decodes lazily and can be iterated once."""

    width: int
    height: int
    fps: Fraction
    frames_expected: int
    """Number of frames by the header; the actual number can differ slightly."""
    frames: Iterator[Pixels]
    """Frames ``(H, W, 3)``. Raises ``MediaError`` if one is damaged, or if there are too many."""
    audio: Audio | None = None


@dataclass(frozen=True, slots=True)
class _Limits:
    pixels: int
    frames: int
    seconds: float

    def check_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise MediaError(f"The video is {width}x{height}, which is not a valid size.")
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
) -> VideoSource:
    """Read a video's header, and its audio if ``audio`` is set. ``pixels_max`` limits each frame.

    A variable frame rate becomes constant: frames are repeated or dropped. Raise ``MediaError``.
    """
    limits = _Limits(pixels_max, frames_max, seconds_max)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _open_webp(data, limits)
    try:
        return _open_container(data, limits, audio=audio)
    except MediaError:
        raise
    except _BROKEN as error:
        raise MediaError("The video is damaged and cannot be decoded.") from error


# --- MP4, MOV and WebM ---------------------------------------------------------------------------


def _open_container(data: bytes, limits: _Limits, *, audio: bool) -> VideoSource:
    demuxer = _demuxer_name(data)
    with _demuxer(data, demuxer, limits) as container:
        stream = _video_stream(container)
        context = stream.codec_context
        limits.check_size(context.width, context.height)
        length = _length(container, stream)
        limits.check_length(length or 0)
        rate = stream.average_rate or stream.guessed_rate
        fps = Fraction(rate) if rate and 0 < rate <= _FPS_MAX else _FPS_UNKNOWN
        expected = max(1, round(length * fps) if length else stream.frames)
        limits.check_frames(expected)
        sound = _decode_audio(data, demuxer, limits) if audio and container.streams.audio else None
    frames = _with_media_errors(_at_constant_rate(_decode(data, demuxer, limits), fps, limits))
    first = next(frames, None)
    if first is None:
        raise MediaError("The video has no frame.")
    height, width = first.shape[:2]
    return VideoSource(width, height, fps, expected, _prepend(first, frames), sound)


def _demuxer_name(data: bytes) -> str:
    """Return the demuxer for a file; Matroska only as WebM."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3" and b"webm" in data[:64]:
        return "matroska"
    raise MediaError(f"The file is not a supported video; {_ACCEPTED}.")


def _demuxer(data: bytes, demuxer: str, limits: _Limits) -> InputContainer:
    # Opening decodes a frame if the header is not sufficient, so the limit applies there too.
    options = {"max_pixels": str(limits.pixels)}
    return av.open(
        io.BytesIO(data), "r", format=demuxer, options=options, metadata_errors="replace"
    )


def _video_stream(container: InputContainer) -> VideoStream:
    if not container.streams.video:
        raise MediaError("The video has no video track, only audio.")
    stream = container.streams.video[0]
    # A stream in an unknown codec has no context, although its type annotation says so.
    codec = getattr(stream.codec_context, "codec", None)
    name = codec.canonical_name if codec else "unknown"
    if name not in _CODECS:
        raise MediaError(f"The codec of the video is {name}; accepted are {', '.join(_CODECS)}.")
    return stream


def _length(container: InputContainer, stream: VideoStream) -> Fraction | None:
    """Return the length in seconds by the header: of the track or the container, the shorter."""
    lengths = []
    if container.duration and container.duration > 0:
        lengths.append(Fraction(container.duration, 1_000_000))
    if stream.duration and stream.duration > 0 and stream.time_base:
        lengths.append(stream.duration * stream.time_base)
    return min(lengths, default=None)


def _decode(data: bytes, demuxer: str, limits: _Limits) -> _TimedFrames:
    """Yield upright frames with their times, all in the size of the first."""
    with _demuxer(data, demuxer, limits) as container:
        stream = _video_stream(container)
        stream.codec_context.options = {"max_pixels": str(limits.pixels)}
        stream.thread_type = "AUTO"
        length = _length(container, stream)
        size: tuple[int, int] | None = None
        start = end = Fraction(0)
        for count, frame in enumerate(container.decode(stream)):
            limits.check_size(frame.width, frame.height)
            limits.check_frames(count // _DECODED_PER_FRAME_MAX)
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
        if length and end < length * _COMPLETE - 1:
            raise MediaError(
                f"The video ends after {float(end):.1f} of {float(length):.1f} seconds."
            )


def _pixels(frame: VideoFrame, size: tuple[int, int]) -> Pixels:
    """Convert to RGB by the frame's colour matrix; if unspecified, by its height."""
    default_space = _BT709 if frame.height >= _HD_HEIGHT else _BT601
    space = default_space if frame.colorspace in (0, _UNSPECIFIED) else frame.colorspace
    reformatted = frame.reformat(*size, format="rgb24", src_colorspace=space)
    rotated = np.rot90(np.asarray(reformatted.to_ndarray(), np.uint8), frame.rotation // 90 % 4)
    return np.ascontiguousarray(rotated)


def _decode_audio(data: bytes, demuxer: str, limits: _Limits) -> Audio | None:
    """Decode the audio track to at most two channels; beyond the maximum length it is dropped."""
    parts: list[np.ndarray] = []
    with _demuxer(data, demuxer, limits) as container:
        stream = container.streams.audio[0]
        rate = getattr(stream.codec_context, "sample_rate", 0)  # as above
        if not rate or rate > _RATE_MAX:
            return None
        layout = "mono" if stream.codec_context.channels == 1 else "stereo"
        resampler = av.AudioResampler("fltp", layout, rate)
        samples_left = round(limits.seconds * rate)
        for frame in container.decode(stream):
            parts.extend(part.to_ndarray() for part in resampler.resample(frame))
            samples_left -= frame.samples
            if samples_left <= 0:
                break
        parts.extend(part.to_ndarray() for part in resampler.resample(None))
    if not parts:
        return None
    return Audio(np.concatenate(parts, axis=1).astype(np.float32), rate)


# --- Animated WebP -------------------------------------------------------------------------------


def _open_webp(data: bytes, limits: _Limits) -> VideoSource:
    width, height, durations = _read_chunks(data)
    limits.check_size(width, height)
    limits.check_frames(len(durations))
    seconds = Fraction(sum(durations), 1000)
    limits.check_length(seconds)
    fps = min(Fraction(1000, min(durations)), Fraction(_FPS_MAX))
    expected = max(1, round(seconds * fps))
    limits.check_frames(expected)
    frames = _with_media_errors(_at_constant_rate(_webp_frames(data, durations), fps, limits))
    return VideoSource(width, height, fps, expected, frames)


def _read_chunks(data: bytes) -> tuple[int, int, list[int]]:
    """Return width, height and the duration of each frame in ms, without decoding.

    The format is Google's "WebP Container Specification". Frames of 10 ms or less last 100 ms, as
    in browsers.
    """
    size, durations, position = (0, 0), [], 12
    while position + 8 <= len(data):
        name, length = (
            data[position : position + 4],
            int.from_bytes(data[position + 4 : position + 8], "little"),
        )
        chunk = data[position + 8 : position + 8 + min(length, 16)]
        if name == b"VP8X" and len(chunk) >= 10:
            size = (
                int.from_bytes(chunk[4:7], "little") + 1,
                int.from_bytes(chunk[7:10], "little") + 1,
            )
        elif name == b"ANMF" and len(chunk) == 16:
            duration_ms = int.from_bytes(chunk[12:15], "little")
            durations.append(duration_ms if duration_ms > 10 else 100)
        position += 8 + length + length % 2
    if not durations:
        raise MediaError(f"This WebP is not animated; as a video {_ACCEPTED}.")
    if position > len(data) + 1:
        raise MediaError("The video is truncated: its last frame is incomplete.")
    return *size, durations


def _webp_frames(data: bytes, durations: list[int]) -> _TimedFrames:
    time = 0
    with Image.open(io.BytesIO(data), formats=("WEBP",)) as image:
        for position, duration_ms in enumerate(durations):
            image.seek(position)
            pixels = np.asarray(image.convert("RGB"))
            yield Fraction(time, 1000), pixels
            time += duration_ms
        # The last frame has a duration too.
        yield Fraction(time - min(durations), 1000), pixels


# --- Shared --------------------------------------------------------------------------------------


def _at_constant_rate(frames: _TimedFrames, fps: Fraction, limits: _Limits) -> Iterator[Pixels]:
    """Yield the current frame at each tick of a constant rate."""
    current: Pixels | None = None
    emitted = 0
    with closing(frames):  # type: ignore[type-var]  # it is a generator
        for time, pixels in frames:
            limits.check_length(time)
            position = round(time * fps)
            limits.check_frames(position + 1)
            while current is not None and emitted < position:
                emitted += 1
                yield current
            current = pixels
        if current is not None:
            yield current


def _with_media_errors(frames: Iterator[Pixels]) -> Iterator[Pixels]:
    """Raise ``MediaError`` for damage found while decoding, as for damage found at the start."""
    try:
        yield from frames
    except MediaError:
        raise
    except _BROKEN as error:
        raise MediaError("The video is damaged and cannot be decoded.") from error


def _prepend(first: Pixels, rest: Iterator[Pixels]) -> Iterator[Pixels]:
    yield first
    yield from rest

"""Encodes audio for clients: as a complete file, or as a stream while it is generated.

A complete file has an exact length and names its ``Origin``, if its format has metadata: ADTS and
raw samples have none. A stream has the same format without what is known only at the end. The same
samples added in the same chunks give the same bytes; a stream can be resumed because of that.
"""

from __future__ import annotations

import io
import json
from fractions import Fraction
from typing import Final

import av
import numpy as np
import numpy.typing as npt
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream

from workers.contract.media import RATE_MAX, RATE_MIN, AudioFormat
from workers.media.encode import Origin
from workers.media.pixels import Audio

Samples = npt.NDArray[np.float32]
"""``(channels, N)`` or, for one channel, ``(N,)``, from -1 to 1."""

AUDIO_TYPES: Final[dict[AudioFormat, str]] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "aac": "audio/aac",
    "pcm": "audio/pcm",
    "ulaw": "audio/basic",
    "alaw": "audio/pcma",
}
_MUXERS: Final[dict[AudioFormat, tuple[str, str]]] = {
    "wav": ("wav", "pcm_s16le"),
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "flac": ("flac", "flac"),
    "aac": ("adts", "aac"),
    "pcm": ("s16le", "pcm_s16le"),
    "ulaw": ("mulaw", "pcm_mulaw"),
    "alaw": ("alaw", "pcm_alaw"),
}
_RATES: Final[dict[AudioFormat, tuple[int, ...]]] = {
    "mp3": (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
    "opus": (8_000, 12_000, 16_000, 24_000, 48_000),
    "aac": (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
    "ulaw": (8_000,),
    "alaw": (8_000,),
}
"""Sample rates of each codec; other formats accept any rate."""
_BITS: Final[dict[AudioFormat, float]] = {"mp3": 4.0, "opus": 2.0, "aac": 4.0}
"""Bits per sample of lossy formats, for good quality of speech and music."""
_BITRATES: Final[dict[AudioFormat, tuple[int, int]]] = {
    "mp3": (32_000, 64_000),  # MPEG 2.5, for the lowest sample rates, allows 64 kbit/s in all
    "opus": (24_000, 64_000),
    "aac": (32_000, 96_000),
}
"""Minimum and maximum bit rate per channel."""
_MP3_BITRATES: Final = (
    (24_000, (32_000, 320_000)),
    (12_000, (8_000, 160_000)),
    (0, (8_000, 64_000)),
)
"""Minimum and maximum bit rate of each MPEG version, with the sample rate that it exceeds."""
_WITHOUT_METADATA: Final[tuple[AudioFormat, ...]] = ("aac", "pcm", "ulaw", "alaw")
"""Formats without metadata."""
_PAGE_US: Final = 200_000
"""Maximum duration of an Ogg page, and so the delay of a stream."""
_STREAM_OPTIONS: Final[dict[AudioFormat, dict[str, str]]] = {
    # No seek table: it would be written at the end, to the start of the file.
    "mp3": {"write_xing": "0"},
    "opus": {"page_duration": str(_PAGE_US)},
}


def encoded_rate(format: AudioFormat, rate: int) -> int:
    """Return the sample rate in Hz at which a format stores audio of ``rate``.

    The same if the codec supports it, otherwise the next higher or its highest.
    """
    rate = min(max(rate, RATE_MIN), RATE_MAX)
    supported = _RATES.get(format, (rate,))
    return next((one for one in supported if one >= rate), supported[-1])


def encode_audio(
    audio: Audio,
    format: AudioFormat,
    *,
    rate: int | None = None,
    bitrate: int | None = None,
    origin: Origin | None = None,
) -> bytes:
    """Encode one or two channels at ``encoded_rate`` of ``rate``."""
    out = io.BytesIO()
    encoder = _Encoder(out, format, len(audio.samples), audio.rate, rate, bitrate, origin)
    encoder.add(audio.samples)
    encoder.finish()
    return out.getvalue()


class AudioWriter:
    """Encodes audio incrementally. Each call returns the bytes that became available, if any."""

    def __init__(
        self,
        format: AudioFormat,
        *,
        source_rate: int,
        channels: int = 1,
        rate: int | None = None,
        bitrate: int | None = None,
        origin: Origin | None = None,
    ) -> None:
        self._out = _Pipe()
        self._encoder = _Encoder(self._out, format, channels, source_rate, rate, bitrate, origin)
        self._source_rate = source_rate
        self._samples = 0

    @property
    def rate(self) -> int:
        """Sample rate of the output, in Hz."""
        return self._encoder.rate

    @property
    def duration_ms(self) -> int:
        """Duration of the audio added so far."""
        return round(self._samples * 1000 / self._source_rate)

    def add(self, samples: Samples) -> bytes:
        samples = np.atleast_2d(samples)
        self._samples += samples.shape[1]
        self._encoder.add(samples)
        return self._out.take()

    def finish(self) -> bytes:
        """End the stream; nothing can be added after it."""
        self._encoder.finish()
        return self._out.take()


def _bitrate(format: AudioFormat, channels: int, rate: int, requested: int | None) -> int:
    """Return the bit rate per second: the requested one, within the codec's limits."""
    if requested is None:
        least, most = _BITRATES[format]
        return int(channels * min(max(rate * _BITS[format], least), most))
    if format == "mp3":
        least, most = next(bounds for above, bounds in _MP3_BITRATES if rate > above)
        return min(max(requested, least), most)
    return min(max(requested, channels * 6_000), channels * min(256_000, rate * 6))


class _Pipe:
    """A write-only file, so that a muxer never seeks."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def write(self, data: bytes) -> int:
        self._buffer += data
        return len(data)

    def take(self) -> bytes:
        taken, self._buffer = bytes(self._buffer), bytearray()
        return taken


class _Encoder:
    def __init__(
        self,
        out: io.BytesIO | _Pipe,
        format: AudioFormat,
        channels: int,
        source_rate: int,
        rate: int | None,
        bitrate: int | None,
        origin: Origin | None,
    ) -> None:
        if channels not in (1, 2):
            raise ValueError(f"channels is {channels}; it must be 1 or 2")
        muxer, codec = _MUXERS[format]
        self.rate = encoded_rate(format, rate or source_rate)
        streamed = isinstance(out, _Pipe)
        options = {"fflags": "+bitexact"}  # no timestamp or random id in the header
        if streamed:
            options |= {"flush_packets": "1", **_STREAM_OPTIONS.get(format, {})}
        self._container = av.open(out, "w", format=muxer, options=options)
        if origin is not None and format not in _WITHOUT_METADATA:
            self._container.metadata["comment"] = json.dumps(origin.fields())
        stream = self._container.add_stream(codec, rate=self.rate)
        assert isinstance(stream, AudioStream)
        self._stream = stream
        self._layout = "mono" if channels == 1 else "stereo"
        stream.layout = self._layout
        stream.codec_context.format = "fltp" if format in ("mp3", "aac") else "s16"
        if format in _BITS:
            stream.bit_rate = _bitrate(format, channels, self.rate, bitrate)
        if format == "mp3" and streamed:
            stream.options = {"reservoir": "0"}  # each frame can be decoded independently
        self._source_rate = source_rate
        self._resampler = AudioResampler(stream.codec_context.format.name, self._layout, self.rate)
        self._added = 0

    def add(self, samples: Samples) -> None:
        if not samples.shape[1]:
            return
        block = np.ascontiguousarray(np.nan_to_num(samples).clip(-1, 1), np.float32)
        frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=self._layout)
        frame.sample_rate, frame.pts = self._source_rate, self._added
        frame.time_base = Fraction(1, self._source_rate)
        self._added += block.shape[1]
        self._write(self._resampler.resample(frame))

    def finish(self) -> None:
        if self._added:
            self._write(self._resampler.resample(None))
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def _write(self, frames: list[av.AudioFrame]) -> None:
        for frame in frames:
            self._container.mux(self._stream.encode(frame))

"""Sound as files that clients get: whole, or byte by byte while it is made.

A whole file has an exact length and says what made it (``Origin``), where its format has a place
for that: ADTS and bare samples have none. A stream has the same form but for what is known only at
the end; the same samples added in the same pieces give the same bytes, on which it rests that a
stream can go on where it broke off.
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
"""``(channels, N)`` or, of one channel, ``(N,)``, from -1 to 1."""

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
"""What a codec knows; the others take any rate."""
_BITS: Final[dict[AudioFormat, float]] = {"mp3": 4.0, "opus": 2.0, "aac": 4.0}
"""Of each sample, where it is compressed with loss: speech and music in good quality."""
_BITRATES: Final[dict[AudioFormat, tuple[int, int]]] = {
    "mp3": (32_000, 64_000),  # of MPEG 2.5, the slowest rates, at most 64 in all
    "opus": (24_000, 64_000),
    "aac": (32_000, 96_000),
}
"""Least and most for each channel."""
_MP3_BITRATES: Final = (
    (24_000, (32_000, 320_000)),
    (12_000, (8_000, 160_000)),
    (0, (8_000, 64_000)),
)
"""Least and most of each version of MPEG, known by the rate that it begins above."""
_BARE: Final[tuple[AudioFormat, ...]] = ("aac", "pcm", "ulaw", "alaw")
"""Without a place for what made them."""
_PAGE_US: Final = 200_000
"""Of an Ogg stream: what a listener waits for, at most."""
_STREAM_OPTIONS: Final[dict[AudioFormat, dict[str, str]]] = {
    # No table of contents, which is written last and in front.
    "mp3": {"write_xing": "0"},
    "opus": {"page_duration": str(_PAGE_US)},
}


def encoded_rate(format: AudioFormat, rate: int) -> int:
    """The rate in Hz at which a format holds sound of some rate: the same, or the next above it
    that the codec knows, or its highest."""
    rate = min(max(rate, RATE_MIN), RATE_MAX)
    known = _RATES.get(format, (rate,))
    return next((one for one in known if one >= rate), known[-1])


def encode_audio(
    audio: Audio,
    format: AudioFormat,
    *,
    rate: int | None = None,
    bitrate: int | None = None,
    origin: Origin | None = None,
) -> bytes:
    """Encode one or two channels at the nearest rate to ``rate`` that the format has."""
    out = io.BytesIO()
    encoder = _Encoder(out, format, len(audio.samples), audio.rate, rate, bitrate, origin)
    encoder.add(audio.samples)
    encoder.finish()
    return out.getvalue()


class AudioWriter:
    """Encodes sound as it comes. Each call returns what bytes became available, perhaps none."""

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
        self._heard = 0

    @property
    def rate(self) -> int:
        """Of what is written, in Hz."""
        return self._encoder.rate

    @property
    def duration_ms(self) -> int:
        """Of what was added so far."""
        return round(self._heard * 1000 / self._source_rate)

    def add(self, samples: Samples) -> bytes:
        samples = np.atleast_2d(samples)
        self._heard += samples.shape[1]
        self._encoder.add(samples)
        return self._out.take()

    def finish(self) -> bytes:
        """End the stream; nothing can be added after it."""
        self._encoder.finish()
        return self._out.take()


def _bitrate(format: AudioFormat, channels: int, rate: int, asked: int | None) -> int:
    """In bits a second: what was asked for, as far as the codec goes."""
    if asked is None:
        least, most = _BITRATES[format]
        return int(channels * min(max(rate * _BITS[format], least), most))
    if format == "mp3":
        least, most = next(bounds for above, bounds in _MP3_BITRATES if rate > above)
        return min(max(asked, least), most)
    return min(max(asked, channels * 6_000), channels * min(256_000, rate * 6))


class _Pipe:
    """A file that can only be written to, so that a muxer never goes back."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def write(self, data: bytes) -> int:
        self._kept += data
        return len(data)

    def take(self) -> bytes:
        taken, self._kept = bytes(self._kept), bytearray()
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
            raise ValueError(f"there are {channels} channels; 1 or 2 can be encoded")
        muxer, codec = _MUXERS[format]
        self.rate = encoded_rate(format, rate or source_rate)
        streamed = isinstance(out, _Pipe)
        options = {"fflags": "+bitexact"}  # no clock and no chance in the header
        if streamed:
            options |= {"flush_packets": "1", **_STREAM_OPTIONS.get(format, {})}
        self._container = av.open(out, "w", format=muxer, options=options)
        if origin is not None and format not in _BARE:
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
            stream.options = {"reservoir": "0"}  # each frame can be heard by itself
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

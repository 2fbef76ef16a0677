"""Sound that clients send: a voice to speak in, a tune to go on from.

As hostile as clips. A closed list of containers and codecs is opened, by the first bytes and not by
what a client calls them, and only ever these bytes. Length is counted while it is decoded, because
headers lie: a stream that was saved has none, and silence compresses without end.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer

from workers.contract.kinds import HEAD_BYTES, sniff
from workers.media.pixels import Audio, MediaError

_ACCEPTED: Final = "WAV, MP3, Ogg (Opus or Vorbis), FLAC, M4A, AAC and WebM are accepted"
_DEMUXERS: Final = {
    "audio/wav": "wav",
    "audio/mpeg": "mp3",
    "audio/ogg": "ogg",
    "audio/flac": "flac",
    "audio/mp4": "mp4",
    "video/mp4": "mp4",
    "audio/aac": "aac",
    "video/webm": "matroska",
}
_TIMED: Final = ("ogg", "flac", "mp4")
"""Whose headers say truly how long they are; those of a saved stream say nothing."""
_CODECS: Final = ("mp3", "mp2", "opus", "vorbis", "flac", "aac", "alac")
_RATES: Final = (4_000, 192_000)
_CHANNELS_MAX: Final = 8
_WHOLE: Final = Fraction(9, 10)
"""Of its length as the header has it; a recording that ends earlier is cut off."""
_FAULTS_MAX: Final = 8
"""Damaged packets that are passed over, as every player does with an MP3 that was cut."""
_BROKEN: Final = (av.FFmpegError, OSError, EOFError, ValueError, LookupError, OverflowError)


def read_audio(
    data: bytes,
    *,
    rate: int,
    seconds_max: float,
    bytes_max: int = 25 * 1024 * 1024,
    mono: bool = True,
) -> Audio:
    """Decode a recording at ``rate`` Hz, mixed to one channel, or to at most two.

    Raise ``MediaError``.
    """
    if len(data) > bytes_max:
        raise MediaError(f"The recording is {len(data)} bytes long; at most {bytes_max}.")
    kind = _DEMUXERS.get(sniff(data[:HEAD_BYTES]) or "")
    if kind is None:
        raise MediaError(f"This is no recording that can be read; {_ACCEPTED}.")
    try:
        with av.open(io.BytesIO(data), "r", format=kind, metadata_errors="replace") as container:
            return _read(container, kind, rate, seconds_max, mono=mono)
    except MediaError:
        raise
    except _BROKEN as error:
        raise MediaError("The recording is damaged and cannot be read.") from error


def _read(
    container: InputContainer, kind: str, rate: int, seconds_max: float, *, mono: bool
) -> Audio:
    stream = _sound_stream(container)
    layout = "mono" if stream.codec_context.channels == 1 else "stereo"
    resampler = AudioResampler("fltp", layout, rate)
    parts: list[AudioFrame] = []
    heard = Fraction(0)
    for frame in _frames(container, stream):
        heard += Fraction(frame.samples, frame.sample_rate)
        if heard > seconds_max:
            raise MediaError(f"The recording is longer than {seconds_max:g} seconds.")
        parts.extend(resampler.resample(frame))
    parts.extend(resampler.resample(None))
    if not parts:
        raise MediaError("The recording is empty.")
    told = Fraction(container.duration or 0, 1_000_000) if kind in _TIMED else 0
    if heard < told * _WHOLE - 1:
        raise MediaError(
            f"The recording breaks off after {float(heard):.1f} of {float(told):.1f} seconds."
        )
    samples = np.concatenate([part.to_ndarray() for part in parts], axis=1)
    samples = np.nan_to_num(samples).clip(-1, 1).astype(np.float32)
    # The library adds two channels up louder than either.
    return Audio(samples.mean(axis=0, keepdims=True) if mono else samples, rate)


def _sound_stream(container: InputContainer) -> AudioStream:
    if not container.streams.audio:
        raise MediaError("The recording has no sound.")
    stream = container.streams.audio[0]
    # A stream in a codec that the library does not know has no context, whatever its types say.
    codec = getattr(stream.codec_context, "codec", None)
    name = codec.canonical_name if codec else "something unknown"
    if name not in _CODECS and not name.startswith("pcm_"):
        raise MediaError(
            f"The recording is coded as {name}; accepted are PCM, {', '.join(_CODECS)}."
        )
    least, most = _RATES
    if not least <= stream.codec_context.sample_rate <= most:
        raise MediaError(
            f"The recording has {stream.codec_context.sample_rate} samples a second; "
            f"accepted are {least} to {most}."
        )
    if not 1 <= stream.codec_context.channels <= _CHANNELS_MAX:
        raise MediaError(
            f"The recording has {stream.codec_context.channels} channels; at most {_CHANNELS_MAX}."
        )
    return stream


def _frames(container: InputContainer, stream: AudioStream) -> Iterator[AudioFrame]:
    faults = 0
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            faults += 1
            if faults > _FAULTS_MAX:
                raise
            continue
        for frame in frames:
            assert isinstance(frame, AudioFrame)
            yield frame

"""Decodes audio from clients, such as a recording of a voice.

The bytes are untrusted. Only listed containers and codecs are opened, detected by the first bytes
and not by the declared type, and nothing outside the bytes is read. The length is counted while
decoding, because headers are unreliable: a saved stream has no length, and silence compresses
without limit.
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
_WITH_DURATION: Final = ("ogg", "flac", "mp4")
"""Containers with a reliable length in the header; a saved stream has none."""
_CODECS: Final = ("mp3", "mp2", "opus", "vorbis", "flac", "aac", "alac")
_RATES: Final = (4_000, 192_000)
_CHANNELS_MAX: Final = 8
_COMPLETE: Final = Fraction(9, 10)
"""Fraction of the length in the header below which a recording counts as truncated."""
_DAMAGED_PACKETS_MAX: Final = 8
"""Damaged packets that are skipped, as players do with an MP3 that was cut."""
_BROKEN: Final = (av.FFmpegError, OSError, EOFError, ValueError, LookupError, OverflowError)


def read_audio(
    data: bytes,
    *,
    rate: int,
    seconds_max: float,
    bytes_max: int = 25 * 1024 * 1024,
    mono: bool = True,
) -> Audio:
    """Decode a recording at ``rate`` Hz, mixed down to one channel or, without ``mono``, to two.

    Raise ``MediaError``.
    """
    if len(data) > bytes_max:
        raise MediaError(f"The recording is {len(data)} bytes long; at most {bytes_max}.")
    kind = _DEMUXERS.get(sniff(data[:HEAD_BYTES]) or "")
    if kind is None:
        raise MediaError(f"The file is not a supported recording; {_ACCEPTED}.")
    try:
        with av.open(io.BytesIO(data), "r", format=kind, metadata_errors="replace") as container:
            return _read(container, kind, rate, seconds_max, mono=mono)
    except MediaError:
        raise
    except _BROKEN as error:
        raise MediaError("The recording is damaged and cannot be decoded.") from error


def _read(
    container: InputContainer, kind: str, rate: int, seconds_max: float, *, mono: bool
) -> Audio:
    stream = _audio_stream(container)
    layout = "mono" if stream.codec_context.channels == 1 else "stereo"
    resampler = AudioResampler("fltp", layout, rate)
    parts: list[AudioFrame] = []
    decoded_s = Fraction(0)
    for frame in _frames(container, stream):
        decoded_s += Fraction(frame.samples, frame.sample_rate)
        if decoded_s > seconds_max:
            raise MediaError(f"The recording is longer than {seconds_max:g} seconds.")
        parts.extend(resampler.resample(frame))
    parts.extend(resampler.resample(None))
    if not parts:
        raise MediaError("The recording is empty.")
    declared_s = Fraction(container.duration or 0, 1_000_000) if kind in _WITH_DURATION else 0
    if decoded_s < declared_s * _COMPLETE - 1:
        raise MediaError(
            f"The recording ends after {float(decoded_s):.1f} of {float(declared_s):.1f} seconds."
        )
    samples = np.concatenate([part.to_ndarray() for part in parts], axis=1)
    samples = np.nan_to_num(samples).clip(-1, 1).astype(np.float32)
    # The library's own downmix would add the channels up, louder than either.
    return Audio(samples.mean(axis=0, keepdims=True) if mono else samples, rate)


def _audio_stream(container: InputContainer) -> AudioStream:
    if not container.streams.audio:
        raise MediaError("The recording has no audio track.")
    stream = container.streams.audio[0]
    # A stream in an unknown codec has no context, although its type annotation says so.
    codec = getattr(stream.codec_context, "codec", None)
    name = codec.canonical_name if codec else "unknown"
    if name not in _CODECS and not name.startswith("pcm_"):
        raise MediaError(
            f"The codec of the recording is {name}; accepted are PCM, {', '.join(_CODECS)}."
        )
    least, most = _RATES
    if not least <= stream.codec_context.sample_rate <= most:
        raise MediaError(
            f"The sample rate of the recording is {stream.codec_context.sample_rate} Hz; "
            f"accepted are {least} to {most}."
        )
    if not 1 <= stream.codec_context.channels <= _CHANNELS_MAX:
        raise MediaError(
            f"The recording has {stream.codec_context.channels} channels; at most {_CHANNELS_MAX}."
        )
    return stream


def _frames(container: InputContainer, stream: AudioStream) -> Iterator[AudioFrame]:
    damaged = 0
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            damaged += 1
            if damaged > _DAMAGED_PACKETS_MAX:
                raise
            continue
        for frame in frames:
            assert isinstance(frame, AudioFrame)
            yield frame

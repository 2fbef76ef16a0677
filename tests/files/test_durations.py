"""Durations that recordings state, compared with what decoding them gives."""

from __future__ import annotations

import io
from typing import get_args

import numpy as np
import pytest

from gateway.files.durations import duration_ms
from workers.contract.media import AudioFormat
from workers.media.audio import encode_audio
from workers.media.pixels import Audio
from workers.media.recordings import read_audio

STATED = [name for name in get_args(AudioFormat) if name not in ("pcm", "ulaw", "alaw")]
RATE = 24_000


def _encoded(format: AudioFormat, seconds: float = 2.5) -> bytes:
    time = np.arange(round(seconds * RATE)) / RATE
    samples = (0.3 * np.sin(2 * np.pi * 330 * time)).astype(np.float32)
    return encode_audio(Audio(samples[None], RATE), format)


def _stated(data: bytes) -> int | None:
    return duration_ms(io.BytesIO(data), len(data))  # type: ignore[arg-type]


@pytest.mark.parametrize("format", STATED)
def test_stated_duration_is_that_of_the_decoded_recording(format: AudioFormat) -> None:
    data = _encoded(format)

    stated = _stated(data)

    decoded = read_audio(data, rate=RATE, seconds_max=60).samples.shape[1] * 1000 / RATE
    assert stated is not None
    assert decoded - 60 <= stated <= decoded + 150


@pytest.mark.parametrize("format", STATED)
def test_damaged_recording_states_a_duration_or_none(format: AudioFormat) -> None:
    data = _encoded(format, 0.5)
    random = np.random.default_rng(1)

    for place in random.integers(0, len(data), 60):
        broken = bytearray(data[: int(random.integers(1, len(data)))])
        broken[place % len(broken)] ^= 0xFF
        found = _stated(bytes(broken))
        assert found is None or found > 0


def test_saved_stream_without_a_length_is_measured_by_its_size() -> None:
    data = bytearray(_encoded("wav"))
    data[40:44] = b"\xff\xff\xff\xff"

    assert _stated(bytes(data)) == 2500


def test_what_is_no_recording_states_nothing() -> None:
    assert _stated(b"") is None
    assert _stated(b"RIFF....WAVE") is None
    assert _stated(b"\x89PNG\r\n\x1a\n" + bytes(60)) is None

"""Recordings from clients, valid and hostile."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest

from tests.workers.media.test_audio import tone
from workers.contract.media import AudioFormat
from workers.media.audio import encode_audio
from workers.media.pixels import Audio, MediaError
from workers.media.recordings import read_audio


def wav(
    samples: np.ndarray, *, rate: int = 16_000, channels: int = 1, form: int = 1, bits: int = 16
) -> bytes:
    body = samples.tobytes()
    width = bits // 8
    head = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, form, channels, rate, rate * channels * width,
        channels * width, bits,
    )  # fmt: skip
    data = struct.pack("<4sI", b"data", len(body)) + body
    return struct.pack("<4sI4s", b"RIFF", 4 + len(head) + len(data), b"WAVE") + head + data


def m4a(seconds: float) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="ipod") as container:
        stream = container.add_stream("aac", rate=44_100)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(tone(seconds, 44_100), format="fltp", layout="mono")
        frame.sample_rate = 44_100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize("format", ["wav", "mp3", "opus", "flac", "aac"])
@pytest.mark.parametrize("channels", [1, 2])
def test_every_format_is_decoded_at_the_requested_rate(format: AudioFormat, channels: int) -> None:
    data = encode_audio(Audio(tone(1.0, 24_000, channels), 24_000), format)

    mono = read_audio(data, rate=16_000, seconds_max=5)
    both = read_audio(data, rate=16_000, seconds_max=5, mono=False)

    assert (mono.samples.shape[0], both.samples.shape[0]) == (1, channels)
    assert mono.seconds == pytest.approx(1.0, abs=0.1 if format == "aac" else 0.002)
    assert mono.samples.dtype == np.float32
    loud = np.abs(mono.samples[0, 4000:12_000]).max()
    assert loud == pytest.approx(0.5 if channels == 1 else 0.375, abs=0.05)


def test_an_m4a_is_read() -> None:
    assert read_audio(m4a(0.5), rate=8_000, seconds_max=1).seconds == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("data", [b"", b"RIFF", b"hello", b"\x89PNG\r\n\x1a\n", b"%PDF-1.7"])
def test_invalid_recording_is_refused(data: bytes) -> None:
    with pytest.raises(MediaError, match="WAV, MP3, Ogg"):
        read_audio(data, rate=16_000, seconds_max=5)


def test_too_many_bytes_or_seconds_are_refused() -> None:
    data = encode_audio(Audio(tone(3.0, 16_000), 16_000), "flac")

    with pytest.raises(MediaError, match=r"longer than 2 seconds"):
        read_audio(data, rate=16_000, seconds_max=2)
    with pytest.raises(MediaError, match=r"at most 100\."):
        read_audio(data, rate=16_000, seconds_max=5, bytes_max=100)


def test_hours_of_silence_in_a_small_file_are_not_decoded() -> None:
    hour = np.zeros((1, 8_000 * 3_600), np.float32)
    data = encode_audio(Audio(hour, 8_000), "flac")
    assert len(data) < 1_000_000

    with pytest.raises(MediaError, match="longer than 60 seconds"):
        read_audio(data, rate=16_000, seconds_max=60)


@pytest.mark.parametrize("format", ["wav", "mp3", "opus", "flac", "aac"])
def test_damaged_recording_is_decoded_or_refused(format: AudioFormat) -> None:
    data = encode_audio(Audio(tone(0.5, 16_000), 16_000), format)
    random = np.random.default_rng(0)

    for _ in range(60):
        broken = bytearray(data)
        for place in random.integers(12, len(data), 12):
            broken[place] = random.integers(256)
        cut = bytes(broken[: random.integers(12, len(data))])
        for hostile in (bytes(broken), cut):
            try:
                found = read_audio(hostile, rate=16_000, seconds_max=5)
            except MediaError as error:
                assert str(error).endswith(".")  # noqa: PT017
            else:
                assert np.isfinite(found.samples).all()
                assert np.abs(found.samples).max() <= 1


def test_truncated_recording_is_refused() -> None:
    data = encode_audio(Audio(tone(10.0, 16_000), 16_000), "flac")

    with pytest.raises(MediaError, match="ends after"):
        read_audio(data[: len(data) // 3], rate=16_000, seconds_max=60)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (wav(np.zeros(100, "<i2"), rate=3_000), "is 3000 Hz"),
        (wav(np.zeros(2000, "<i2"), rate=400_000), "is 400000 Hz"),
        (wav(np.zeros(1600, "<i2"), channels=16), "16 channels"),
        (wav(np.zeros(1000, "u1"), form=7, bits=8), None),
        (wav(np.zeros(0, "<i2")), "empty|damaged"),
        (wav(np.zeros(1000, "<i2"), form=0x55), "not a supported|damaged|empty|codec"),
    ],
)
def test_invalid_header_is_refused(data: bytes, said: str | None) -> None:
    if said is None:
        assert read_audio(data, rate=16_000, seconds_max=5).samples.shape[1]
        return
    with pytest.raises(MediaError, match=said):
        read_audio(data, rate=16_000, seconds_max=5)


def test_non_finite_samples_become_valid_audio() -> None:
    wild = np.array([np.nan, np.inf, -np.inf, 1e30] * 1000, "<f4")

    found = read_audio(wav(wild, form=3, bits=32), rate=16_000, seconds_max=5)

    assert np.isfinite(found.samples).all()
    assert np.abs(found.samples).max() <= 1


def test_playlist_does_not_open_other_files(tmp_path: Path) -> None:
    (tmp_path / "inside.wav").write_bytes(wav(np.zeros(1000, "<i2")))
    playlist = f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path}/inside.wav\n".encode()

    with pytest.raises(MediaError):
        read_audio(playlist, rate=16_000, seconds_max=5)

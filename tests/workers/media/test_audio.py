"""Audio files and streams: exact lengths, reproducible bytes, no clicks."""

from __future__ import annotations

import io
import json
from typing import Any

import av
import numpy as np
import pytest

from workers.contract.kinds import UNMARKED, sniff
from workers.contract.media import AudioFormat, characters
from workers.media.audio import AUDIO_TYPES, AudioWriter, encode_audio, encoded_rate
from workers.media.crossfade import Crossfader, TimeStretcher
from workers.media.encode import Origin
from workers.media.pixels import Audio

BARE = {"pcm": "s16le", "ulaw": "mulaw", "alaw": "alaw"}
RATES = (8_000, 22_050, 24_000, 44_100)
FRAMES = {"mp3": 1152, "aac": 1024}
"""Samples of a frame of codecs that do not say where within it sound begins and ends."""


def tone(seconds: float, rate: int, channels: int = 1, hertz: float = 440.0) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    wave = 0.5 * np.sin(2 * np.pi * hertz * times)
    return np.stack([wave * (1 - 0.5 * channel) for channel in range(channels)]).astype(np.float32)


def decoded(data: bytes, format: AudioFormat, rate: int, channels: int) -> tuple[np.ndarray, int]:
    layout = "mono" if channels == 1 else "stereo"
    kind = BARE.get(format)
    options = {"sample_rate": str(rate), "ch_layout": layout} if kind else {}
    with av.open(io.BytesIO(data), format=kind, options=options) as container:
        resampler = av.AudioResampler("fltp", layout)
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
        samples = np.concatenate([frame.to_ndarray() for frame in frames], axis=1)
        return samples, frames[0].sample_rate


def streamed(wave: np.ndarray, format: AudioFormat, rate: int, **settings: Any) -> list[bytes]:
    writer = AudioWriter(format, source_rate=rate, channels=len(wave), **settings)
    parts = [writer.add(wave[:, at : at + 999]) for at in range(0, wave.shape[1], 999)]
    assert writer.duration_ms == round(wave.shape[1] * 1000 / rate)
    return [*parts, writer.finish()]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("format", AUDIO_TYPES)
def test_file_has_the_length_of_its_input(format: AudioFormat, rate: int, channels: int) -> None:
    wave = tone(1.2345, rate, channels)

    data = encode_audio(Audio(wave, rate), format)

    found, found_rate = decoded(data, format, encoded_rate(format, rate), channels)
    slack = 2 * FRAMES["aac"] if format == "aac" else 2
    assert abs(found.shape[1] - wave.shape[1] * found_rate / rate) <= slack
    assert found_rate == (48_000 if format == "opus" else encoded_rate(format, rate))
    middle = found[:, found.shape[1] // 3 : found.shape[1] // 2]
    assert np.abs(middle).max() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("format", AUDIO_TYPES)
def test_stream_is_incremental_and_reproducible(format: AudioFormat, rate: int) -> None:
    wave = tone(1.2345, rate)

    first, again = streamed(wave, format, rate), streamed(wave, format, rate)

    assert first == again
    data = b"".join(first)
    found, found_rate = decoded(data, format, encoded_rate(format, rate), 1)
    slack = 2 * FRAMES.get(format, 1)
    assert abs(found.shape[1] - wave.shape[1] * found_rate / rate) <= slack
    assert len(b"".join(first[: len(first) // 2])) > len(data) / 4


@pytest.mark.parametrize("format", AUDIO_TYPES)
def test_file_is_recognised_and_names_its_origin(format: AudioFormat) -> None:
    origin = Origin("tiny/voice", "req_1", 7)
    wave = tone(0.3, 24_000)

    for data in (
        encode_audio(Audio(wave, 24_000), format, origin=origin),
        b"".join(streamed(wave, format, 24_000, origin=origin)),
    ):
        if format in BARE:
            assert AUDIO_TYPES[format] in UNMARKED
            continue
        assert sniff(data[:64]) == AUDIO_TYPES[format]
        if format != "aac":
            with av.open(io.BytesIO(data)) as container:
                said = {**container.metadata, **container.streams[0].metadata}
            assert json.loads(said.get("comment") or said["COMMENT"]) == origin.fields()


@pytest.mark.parametrize(
    ("format", "rate", "held"),
    [
        ("opus", 22_050, 24_000),
        ("opus", 44_100, 48_000),
        ("mp3", 11_000, 11_025),
        ("wav", 12_345, 12_345),
        ("flac", 96_000, 48_000),
        ("aac", 4_000, 8_000),
        ("ulaw", 24_000, 8_000),
    ],
)
def test_unsupported_rate_becomes_the_next_higher(
    format: AudioFormat, rate: int, held: int
) -> None:
    assert encoded_rate(format, rate) == held


@pytest.mark.parametrize(
    ("format", "rate", "asked", "had"),
    [
        ("mp3", 44_100, 128_000, 128_000),
        ("mp3", 44_100, 32_000, 32_000),
        ("mp3", 44_100, 10**9, 320_000),
        ("mp3", 22_050, 256_000, 160_000),
        ("mp3", 8_000, 128_000, 64_000),
        ("opus", 48_000, 192_000, 192_000),
        ("opus", 48_000, 32_000, 32_000),
        ("aac", 44_100, 128_000, 128_000),
    ],
)
def test_codec_uses_the_requested_bitrate(
    format: AudioFormat, rate: int, asked: int, had: int
) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 3 * rate)).astype(np.float32)

    data = encode_audio(Audio(noise, rate), format, bitrate=asked)
    stream = b"".join(streamed(noise, format, rate, bitrate=asked))

    for made in (data, stream):
        assert len(made) * 8 / 3 == pytest.approx(had, rel=0.1)


def test_raw_samples_are_the_input_in_sixteen_bits() -> None:
    wave = tone(0.1, 16_000, 2)

    data = encode_audio(Audio(wave, 16_000), "pcm")

    found = np.frombuffer(data, "<i2").reshape(-1, 2).T / 32_768
    assert np.abs(found - wave).max() < 1e-4


def test_non_finite_and_loud_samples_are_clipped() -> None:
    wave = np.array([[np.nan, np.inf, -np.inf, 3.0, -3.0, 0.0]], np.float32)

    found = np.frombuffer(encode_audio(Audio(wave, 8_000), "pcm"), "<i2")

    assert found.tolist() == [0, 32_767, -32_768, 32_767, -32_768, 0]


# --- Joining -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause_ms", [0, 100])
def test_segments_are_joined_without_a_click(pause_ms: int) -> None:
    crossfader = Crossfader(24_000, pause_ms=pause_ms)
    loud = np.full(2_400, 0.8, np.float32)

    said = [
        crossfader.add(loud),
        crossfader.end_segment(),
        crossfader.add(-loud),
        crossfader.end_segment(),
        crossfader.finish(),
    ]

    whole = np.concatenate(said)
    assert np.abs(np.diff(whole, prepend=0, append=0)).max() < 0.8 * 2 / 96 + 1e-6
    fade = 96
    assert len(whole) == 4_800 + 24 * pause_ms - (0 if pause_ms else fade)


@pytest.mark.parametrize("pause_ms", [0, 100])
@pytest.mark.parametrize("size", [1, 7, 50, 96, 333])
def test_crossfade_does_not_depend_on_chunks(size: int, pause_ms: int) -> None:
    pieces = [tone(0.05, 24_000, hertz=200 * n)[0] for n in (1, 2, 3)]
    pieces.insert(1, np.full(40, 0.5, np.float32))

    whole = []
    for step in (10_000, size):
        crossfader, parts = Crossfader(24_000, pause_ms=pause_ms), []
        for piece in pieces:
            parts += [crossfader.add(piece[at : at + step]) for at in range(0, len(piece), step)]
            parts.append(crossfader.end_segment())
        whole.append(np.concatenate([*parts, crossfader.finish()]))

    assert np.array_equal(whole[0], whole[1])


@pytest.mark.parametrize("speed", [0.25, 0.8, 1.0, 1.5, 4.0])
def test_speech_is_faster_at_the_same_pitch(speed: float) -> None:
    wave, tempo = tone(2.0, 16_000, hertz=500)[0], TimeStretcher(16_000, speed)

    parts = [tempo.add(wave[at : at + 700]) for at in range(0, len(wave), 700)]

    found = np.concatenate([*parts, tempo.finish()])
    assert len(found) == pytest.approx(len(wave) / speed, rel=0.03)
    pitch = np.argmax(np.abs(np.fft.rfft(found))) * 16_000 / len(found)
    assert pitch == pytest.approx(500, rel=0.02)


@pytest.mark.parametrize("speed", [0.2, 5.0, 0.0, -1.0, float("nan")])
def test_unsupported_speed_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match=r"between 0\.25 and 4"):
        TimeStretcher(16_000, speed)


@pytest.mark.parametrize(
    ("text", "count"), [("", 0), ("abc", 3), ("e\u0301", 1), ("\u00e9", 1), ("👍🏽", 2), (" \n", 2)]
)
def test_characters_are_code_points_of_the_normalised_text(text: str, count: int) -> None:
    assert characters(text) == count

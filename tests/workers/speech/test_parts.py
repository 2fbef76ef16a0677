"""Checkpoints with our own parts: grapheme-to-phoneme, vocoder and speaker encoder."""

from __future__ import annotations

import io
import json
import shutil
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.speech.driver import Driver, samples, speak, spec
from workers.contract.jobs import Failed
from workers.engines.speech.engine import SpeechEngine
from workers.engines.speech.g2p import normalize_spelling, read_g2p
from workers.engines.speech.mel_statistics import match_mel_statistics, measure_mel_statistics
from workers.engines.speech.source_filter_vocoder import SourceFilterVocoder
from workers.engines.speech.spectra import (
    CHANNELS,
    HOP,
    MELS,
    RATE,
    analyse,
    normalize_loudness,
    pitch_of,
)
from workers.protocol.engine import Admitted

Checkpoint = Callable[[str], Path]


def hum(pitch: float, seconds: float = 1.0) -> np.ndarray:
    """Ten harmonics, as a voice has them: ``(N,)`` at ``RATE``."""
    at = np.arange(int(seconds * RATE)) / RATE
    return np.sum([np.sin(2 * np.pi * pitch * k * at) / k for k in range(1, 11)], 0) * 0.1


def as_wav(sound: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((sound.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


@pytest.mark.parametrize("pitch", [75.0, 110.0, 223.0, 390.0])
def test_pitch_is_estimated(pitch: float) -> None:
    found, voiced = pitch_of(torch.from_numpy(hum(pitch)).float())

    assert voiced[5:-5].all()
    assert float(found[5:-5].median()) == pytest.approx(pitch, rel=0.01)


def test_noise_and_silence_have_no_pitch() -> None:
    noise = torch.randn(RATE, generator=torch.Generator().manual_seed(0)) * 0.1

    assert pitch_of(noise)[1].mean() < 0.1
    assert not pitch_of(torch.zeros(RATE))[1].any()


def test_untrained_vocoder_reproduces_its_input() -> None:
    sound = normalize_loudness(torch.from_numpy(hum(140.0)).float())
    frames = analyse(sound)

    with torch.no_grad():
        again = SourceFilterVocoder(width=8, depth=1)(frames)

    assert again.shape == (len(frames) * HOP,)
    found, voiced = pitch_of(again)
    assert float(found[voiced > 0].median()) == pytest.approx(140, rel=0.01)
    assert float(again.std()) == pytest.approx(float(sound.std()), rel=0.5)


def test_features_do_not_depend_on_the_level_of_a_recording() -> None:
    sound = torch.from_numpy(hum(140.0)).float()

    assert torch.allclose(normalize_loudness(sound * 0.01), normalize_loudness(sound), atol=1e-4)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Hello, World", "hello, world."),
        ("It's \u2018fine\u2019 \u2014 really (yes)\u2026", "it's fine, really, yes."),
        ("The USB cable of NASA?!", "the you ess bee cable of en ay ess ay?"),
        ("ALL OF IT", "all of it."),
        ("na\u00efve caf\u00e9", "naive cafe."),
        ("x", "ex."),
        ("\u65e5\u672c", ""),
        ("?!", ""),
    ],
)
def test_texts_are_normalised_to_a_small_alphabet(text: str, wanted: str) -> None:
    assert normalize_spelling(text) == wanted


def test_letters_become_phoneme_ids(checkpoint: Checkpoint) -> None:
    read = read_g2p(checkpoint("parts") / "graphemes")

    assert read("Ban, nab?").tolist() == [[2, 1, 3, 4, 3, 1, 2, 6]]
    assert read("?!").shape == (1, 0)


def test_voice_of_a_recording_is_used(checkpoint: Checkpoint) -> None:
    driver = Driver(spec(checkpoint("parts"), "text-to-speech", "voice-clone"))
    sounds = []
    for name, pitch in (("low", 90.0), ("high", 250.0), ("again", 90.0)):
        asked = {"task": "voice-clone", "text": "Ban nab."}
        assert driver.admit(name, [as_wav(hum(pitch))], **asked) == Admitted()
        driver.finish()
        sounds.append(samples(driver.file(name)))

    assert not np.array_equal(sounds[0], sounds[1])
    assert np.array_equal(sounds[0], sounds[2])


def test_recording_without_speech_is_refused(checkpoint: Checkpoint) -> None:
    driver = Driver(spec(checkpoint("parts"), "text-to-speech", "voice-clone"))

    answer = driver.admit("nobody", [as_wav(np.zeros(RATE))], task="voice-clone", text="Ban.")

    assert isinstance(answer, Failed)
    assert answer.code == "invalid_input"
    assert "too little speech" in answer.message


def test_sample_rate_is_that_of_the_vocoder(checkpoint: Checkpoint) -> None:
    assert len(speak(spec(checkpoint("parts")), text="Ban nab.")) > HOP


def test_cloning_needs_a_speaker_encoder(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("parts"), tmp_path / "deaf")
    shutil.rmtree(path / "reference")

    with pytest.raises(ValueError, match="does not support voice-clone"):
        SpeechEngine(spec(path, "text-to-speech", "voice-clone")).load()


@pytest.mark.parametrize("part", ["graphemes", "vocoder", "reference"])
def test_damaged_component_is_refused_with_its_path(
    part: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = shutil.copytree(checkpoint("parts"), tmp_path / "damaged")
    config = json.loads((path / part / "config.json").read_text())
    changed = {"chunks": [[]]} if part == "graphemes" else {"width": 9}
    (path / part / "config.json").write_text(json.dumps(config | changed))

    with pytest.raises(ValueError, match=part):
        SpeechEngine(spec(path)).load()


def _frames(count: int, *, level: float, swing: float) -> torch.Tensor:
    """Voiced all through, in every band as loud."""
    mel = level + swing * torch.sin(torch.arange(count) / 3)[:, None].expand(-1, MELS)
    return torch.cat([mel, torch.zeros(count, 1), torch.ones(count, 1)], 1)


def test_mel_statistics_are_matched_more_closely_with_more_frames() -> None:
    wanted = measure_mel_statistics(_frames(4000, level=0.5, swing=0.3))

    long, short = (
        measure_mel_statistics(match_mel_statistics(_frames(count, level=0.1, swing=0.2), wanted))
        for count in (4000, 20)
    )

    assert long.mean.numpy() == pytest.approx(wanted.mean.numpy(), abs=0.03)
    assert long.spread.numpy() == pytest.approx(wanted.spread.numpy(), abs=0.03)
    assert 0.15 < float(short.mean.mean()) < 0.35
    silence = torch.zeros(50, CHANNELS)
    assert torch.equal(match_mel_statistics(silence, wanted), silence), "nobody speaks in it"

"""The shipped voices are small, are those on the card, are understood, and copy who they hear."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.cards import check_card
from training.speech.sentences import SENTENCES
from training.speech.understanding import SpeechReader, understood
from workers.contract.models import read_specs
from workers.engines.speech.families import CLONING_TASK
from workers.engines.speech.model import Voice
from workers.engines.speech.spectra import pitch_of

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "workers" / "pocket" / "speech"


@pytest.fixture(scope="module")
def reader() -> SpeechReader:
    torch.set_num_threads(1)
    return SpeechReader(DIRECTORY)


def test_the_directory_is_small_and_the_weights_are_those_on_the_card() -> None:
    check_card(DIRECTORY, most=8_000_000, weights="model.safetensors")


def test_catalog_offers_all_voices(reader: SpeechReader) -> None:
    spec = next(one for one in read_specs(ROOT / "catalog.yaml") if one.name == "pocket-speech")

    assert CLONING_TASK in spec.also
    assert sorted(spec.options["voices"]) == sorted(reader.voices)
    assert len(reader.voices) >= 12


@pytest.mark.long
def test_independent_recogniser_understands_it(reader: SpeechReader) -> None:
    found = understood(
        lambda text, name: reader.say(text, reader.voices[name]),
        sorted(reader.voices),
        SENTENCES[:36],
    )

    assert found >= 0.3, "of a teacher's own 0.45: each of 400 words is as likely"


def test_cloned_voice_has_the_pitch_of_its_recording_and_is_closest_to_it(
    reader: SpeechReader,
) -> None:
    """Of two voices far apart, which the model itself speaks."""
    low, high = (reader.say(SENTENCES[3], reader.voices[name]) for name in ("ivo", "lena"))

    copies = [reader.say(SENTENCES[8], Voice("", recording=one)) for one in (low, high)]

    wanted, found = ([_pitch(one) for one in sounds] for sounds in ((low, high), copies))
    assert found == pytest.approx(wanted, rel=0.2)
    assert wanted[1] > 1.8 * wanted[0]


def _pitch(sound: np.ndarray) -> float:
    """The median, in Hz."""
    pitch, voiced = pitch_of(torch.from_numpy(sound))
    return float(pitch[voiced > 0].median())

"""The shipped music model: small, as on its card, and faithful to its prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.cards import check_card
from training.music.score import Made, held_out_tunes, load, run, score

DIRECTORY = Path(__file__).parents[3] / "workers" / "pocket" / "music"
OF = held_out_tunes(6)


def test_the_directory_is_small_and_the_weights_are_those_on_the_card() -> None:
    check_card(DIRECTORY, most=6_000_000)


@pytest.fixture(scope="module")
def made() -> list[Made]:
    orders = [
        {"prompt": said, "seed": seed, "duration_ms": 12_000} for seed, (_, said) in enumerate(OF)
    ]
    return run(load(DIRECTORY), orders)


@pytest.mark.long
def test_analysis_finds_the_requested_key_and_tempo(
    made: list[Made],
) -> None:
    marks = score(OF, made)

    assert marks["key as prompted"] == 1
    assert marks["tempo as prompted"] == 1
    assert marks["instruments as prompted"] == 1
    assert marks["notes in the scale"] >= 0.93
    assert marks["ends on the tonic"] == 1
    assert marks["key found in the audio, or its relative"] >= 0.8
    assert marks["tempo found, or a simple multiple"] >= 0.6, "of short pieces"


def test_no_piece_is_silent_or_longer_than_requested(made: list[Made]) -> None:
    for one in made:
        sound, rate = one.sound

        assert 9 <= len(sound) / rate <= 12
        assert sound.std() > 0.01

"""Tunes composed by rule: exact, tonal, complete at any length, and described truthfully."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from training.music.music_analysis import in_scale, is_near, keys_of, pitch_classes
from training.music.styles import STYLES
from training.music.tunes import tune
from workers.engines.music.form import bars_for, plan
from workers.engines.music.notes import METRES, MOODS, RANGES, SCALES, Key, Piece
from workers.engines.music.prompt import caption, known_words, parse_prompt

SEEDS = range(60)


def tunes() -> list[Piece]:
    return [tune(random.Random(seed)) for seed in SEEDS]


def test_the_same_seed_makes_the_same_tune() -> None:
    assert tunes() == tunes()


@pytest.mark.parametrize("bars", range(1, 70))
def test_a_tune_of_any_length_ends_as_a_tune_does(bars: int) -> None:
    places = plan(bars)

    assert len(places) == bars
    assert places[-1][0] == "outro"
    assert all(place == 1 or (section, place - 1) in places for section, place in places)


def test_a_long_tune_brings_a_second_section_and_the_first_again() -> None:
    sections = [section for section, place in plan(22) if place == 1]

    assert sections == ["intro", "a", "b", "a", "outro"]


def test_a_tune_has_as_many_bars_as_there_is_time_for() -> None:
    piece = tune(random.Random(1), bars=bars_for(31, "4/4", 96))

    assert len(piece.bars) == 12
    assert bars_for(30.9, "4/4", 96) == 11
    assert bars_for(3.4, "4/4", 96) == 0


def test_tunes_are_of_their_mood() -> None:
    for seed, mood in enumerate(MOODS):
        piece, style = tune(random.Random(seed), mood=mood), STYLES[mood]

        assert piece.mood == mood
        assert style.tempos[0] <= piece.tempo <= style.tempos[1]
        assert piece.metre in style.metres


def test_nearly_every_note_is_of_the_key_and_the_rest_is_the_leading_note() -> None:
    for piece in tunes():
        assert in_scale(piece) >= 0.88
        allowed = {*SCALES[piece.key.mode], 11}
        for bar in piece.bars:
            for note in bar.notes:
                if note.part in ("lead", "bass"):
                    assert (note.pitch - piece.key.tonic) % 12 in allowed


def test_tunes_end_on_the_tonic() -> None:
    for piece in tunes():
        last = piece.bars[-1]

        assert last.chords[0][1].root == 0
        bass = [note.pitch for note in last.notes if note.part == "bass"]
        lead = [note.pitch for note in last.notes if note.part == "lead"]
        assert {(pitch - piece.key.tonic) % 12 for pitch in (*bass, *lead)} == {0}


def test_every_note_is_in_the_range_of_its_part_and_begins_in_its_bar() -> None:
    for piece in tunes():
        for bar in piece.bars:
            for note in bar.notes:
                shift = 0 if note.part == "drums" else piece.key.shift
                assert note.pitch - shift in RANGES[note.part]
                assert 0 <= note.start < METRES[piece.metre].bar


def test_chords_move_by_small_steps() -> None:
    for piece in tunes():
        tops = [
            max(note.pitch for note in bar.notes if note.part == "chords") for bar in piece.bars
        ]
        leaps = [abs(after - before) for before, after in pairwise(tops)]
        assert sum(leaps) / len(leaps) <= 4


def test_the_melody_sings_mostly_by_step_and_never_leaps_far() -> None:
    steps = []
    for piece in tunes():
        lead = [note.pitch for bar in piece.bars for note in bar.notes if note.part == "lead"]
        steps += [abs(after - before) for before, after in pairwise(lead)]

    assert sum(step <= 5 for step in steps) / len(steps) >= 0.8
    assert max(steps) <= 24


def test_motif_is_repeated() -> None:
    for piece in tunes():
        rhythms = [
            tuple((note.start, note.steps) for note in bar.notes if note.part == "lead")
            for bar in piece.bars
            if bar.section in "ab"
        ]
        assert len(set(rhythms)) < len(rhythms)


def test_full_caption_describes_the_piece() -> None:
    for seed in SEEDS:
        r = random.Random(seed)
        piece = tune(r)
        told = parse_prompt(caption(piece, r, full=True))

        assert (told.key, told.tempo) == (piece.key, piece.tempo)
        assert told.metre == piece.metre


def test_captions_use_words_that_the_model_knows() -> None:
    known = set(known_words())
    for seed in range(300):
        r = random.Random(seed)
        said = parse_prompt(caption(tune(r, bars=1), r)).words

        assert {word for word in said if not word.startswith("<")} <= known


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a calm piece in A minor at 80 bpm", Key(9, "minor")),
        ("A sad song, F# minor", Key(6, "minor")),
        ("something in B flat major", Key(10, "major")),
        ("Bb major fanfare", Key(10, "major")),
        ("in C-sharp minor", Key(1, "minor")),
        ("Em pentatonic", None),
        ("a major hit", None),
        ("a minor problem; in Ab major", Key(8, "major")),
        ("minor worries", None),
    ],
)
def test_keys_are_read(text: str, key: Key | None) -> None:
    assert parse_prompt(text).key == key


def test_tempo_and_metre_are_read() -> None:
    told = parse_prompt("A waltz at 97 BPM with piano")

    assert (told.tempo, told.metre) == (97, "3/4")
    assert told.words == ("a", "waltz", "at", "<tempo:96>", "with", "piano")


@pytest.mark.parametrize(
    ("text", "mood", "instruments"),
    [
        ("a gloomy tune", "dark", {}),
        ("a grand piano piece, no drums", None, {"lead": "piano", "drums": "none"}),
        ("with guitar, guitar and bass guitar", None, {"lead": "guitar", "chords": "guitar"}),
        ("dark synth pad with bells", "dark", {"chords": "pad", "lead": "bells"}),
        ("violins, a cello and a drum machine", None, {"lead": "violin", "drums": "electronic"}),
    ],
)
def test_moods_and_instruments_are_read(
    text: str, mood: str | None, instruments: dict[str, str]
) -> None:
    told = parse_prompt(text)

    assert told.mood == mood
    assert instruments.items() <= told.instruments.items()


def test_full_caption_is_parsed_to_the_properties_of_its_piece() -> None:
    for piece in tunes():
        told = parse_prompt(caption(piece, random.Random(1), full=True))

        assert (told.mood, told.key, told.tempo) == (piece.mood, piece.key, piece.tempo)
        assert (told.instruments["lead"], told.instruments["bass"]) == (piece.lead, piece.bass)
        assert told.instruments["drums"] == piece.drums


def test_prompt_cannot_contain_music_tokens() -> None:
    assert parse_prompt("<tempo:200> <end>").words == ("tempo", "end")


def test_a_listener_hears_the_key_of_a_tune() -> None:
    heard = [is_near(keys_of(pitch_classes(piece))[0], piece.key) for piece in tunes()]

    assert sum(heard) / len(heard) >= 0.8

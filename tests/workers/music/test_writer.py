"""Whatever its weights, a model generates a valid piece with the requested numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from training.music.music_analysis import in_scale
from training.music.score import moods_of
from training.music.train import CONTEXT, HEAD, batches, make_model, make_tokenizer
from training.music.tunes import tune
from workers.engines.music.form import RING, bars_for, plan
from workers.engines.music.notes import END, TOKENS, Key, Piece, decode, encode
from workers.engines.music.writer import PieceSpec, PieceWriter

VOCABULARY: dict[str, int] = make_tokenizer().get_vocab()


def write(order: PieceSpec, *, context: int = CONTEXT) -> PieceWriter:
    """As a model would that says anything."""
    writer = PieceWriter(order, VOCABULARY, context=context)
    chance = torch.Generator().manual_seed(order.seed)
    held = 0
    while not writer.ended:
        start, ids = writer.next_input()
        assert ids
        assert start in (0, held)
        assert (held := start + len(ids)) <= context
        writer.sample(torch.randn(len(VOCABULARY), generator=chance))
    return writer


def piece_of(writer: PieceWriter) -> Piece:
    assert writer.head is not None
    return replace(writer.head, bars=tuple(writer.bars))


def test_generated_piece_has_the_planned_length() -> None:
    writer = write(PieceSpec("a sad waltz in F# minor at 91 bpm", seconds=12, seed=3))

    piece = piece_of(writer)
    assert (piece.key, piece.tempo, piece.metre) == (Key(6, "minor"), 91, "3/4")
    assert len(piece.bars) == writer.count == bars_for(12, "3/4", 91)
    assert [(bar.section, bar.place) for bar in piece.bars] == list(plan(writer.count))
    as_written = replace(piece, tempo=92)
    assert decode(encode(as_written)) == as_written
    assert 0 <= in_scale(piece) <= 1
    assert {chord.root for _, chord in piece.bars[-1].chords} == {0}


def test_parameters_take_precedence_over_the_prompt() -> None:
    order = PieceSpec(
        "in C major at 60 bpm", key=Key(2, "minor"), tempo=150, mood="tense", seconds=4
    )
    head = piece_of(write(order))

    assert (head.key, head.tempo, head.mood) == (Key(2, "minor"), 150, "tense")


def test_mood_and_instruments_of_a_prompt_are_kept() -> None:
    head = piece_of(write(PieceSpec("a gloomy waltz with organ and cello, no drums", seconds=4)))

    assert (head.mood, head.lead, head.bass, head.drums) == ("dark", "organ", "cello", "none")


def test_same_seed_generates_the_same_piece() -> None:
    once, again, other = (
        piece_of(write(PieceSpec("a tune", tempo=120, seconds=4, seed=seed))) for seed in (1, 1, 2)
    )

    assert once == again
    assert once.bars != other.bars


def test_a_piece_may_be_longer_than_the_context() -> None:
    writer = write(PieceSpec(tempo=120, metre="4/4", seconds=61), context=300)

    assert len(writer.bars) == 30
    assert len(encode(piece_of(writer))) > 600


@pytest.mark.parametrize("seconds", [2, 3, 5])
def test_a_short_piece_is_fast_enough_for_a_bar(seconds: float) -> None:
    for seed in range(5):
        piece = piece_of(write(PieceSpec(seconds=seconds, seed=seed)))

        assert piece.bars
        assert len(piece.bars) * piece.bar_seconds <= seconds - RING + 1e-6


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (PieceSpec(seconds=1.5), "1.5 seconds are too short for a bar"),
        (PieceSpec(seconds=3, tempo=50), "3 seconds are too short for a bar at 50 beats a minute"),
        (PieceSpec("at 90 bpm in 4/4", seconds=3), "at 90 beats a minute"),
    ],
)
def test_length_too_short_for_a_bar_is_refused(order: PieceSpec, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PieceWriter(order, VOCABULARY, context=CONTEXT)


def test_every_token_has_a_number_of_its_own() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(list(TOKENS))

    assert len(set(ids)) == len(TOKENS)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.convert_ids_to_tokens(tokenizer("<tune> <mood:sad>").input_ids) == [
        "<tune>",
        "<mood:sad>",
    ]


def test_the_model_fits_in_six_megabytes() -> None:
    weights = sum(p.numel() for p in make_model(make_tokenizer()).parameters())

    assert 2_000_000 < weights < 3_000_000
    assert HEAD < CONTEXT


def test_lessons_count_the_tune_only() -> None:
    tokenizer = make_tokenizer()
    inputs, targets = next(batches(tokenizer, 1))

    known = set(tokenizer.convert_tokens_to_ids([*TOKENS, END]))
    counted = targets[targets >= 0].tolist()
    assert set(counted) <= known
    assert inputs.shape == targets.shape
    begins = (inputs == tokenizer.convert_tokens_to_ids("<tune>")).nonzero()
    row, at = begins[0].tolist()
    assert targets[row, :at].eq(-100).all()
    assert targets[row, at] >= 0


def test_analysis_distinguishes_moods() -> None:
    pieces = [tune(random.Random(f"mood {seed}"), bars=12) for seed in range(16)]

    assert sum(piece.mood in moods_of(piece)[:2] for piece in pieces) >= 12

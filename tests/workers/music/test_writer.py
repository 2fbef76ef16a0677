"""Whatever a model knows, what it writes is a piece, and what was ordered by number is kept."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from workers.pocket.hearing import in_scale
from workers.pocket.notes import END, TOKENS, Key, decode, encode
from workers.pocket.score_music import moods_of
from workers.pocket.train_music import CONTEXT, HEAD, ROW, batches, make_model, make_tokenizer
from workers.pocket.tunes import bars_for, plan, tune
from workers.pocket.writer import Order, Writer


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """Of a model that knows nothing."""
    torch.manual_seed(0)
    directory: Path = tmp_path_factory.mktemp("music")
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=400,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Writer(directory)


def test_what_is_written_is_a_piece_as_long_as_planned(writer: Writer) -> None:
    writing = writer.begin(Order("a sad waltz in F# minor at 91 bpm", seconds=12, seed=3))
    bars = tuple(writing.bars())

    head = writing.head
    assert (head.key, head.tempo, head.metre) == (Key(6, "minor"), 91, "3/4")
    assert len(bars) == writing.count == bars_for(12, "3/4", 91)
    assert [(bar.section, bar.place) for bar in bars] == list(plan(len(bars)))
    piece = replace(head, tempo=92, bars=bars)
    assert decode(encode(piece)) == piece
    assert 0 <= in_scale(piece) <= 1


def test_an_order_goes_before_its_prompt(writer: Writer) -> None:
    order = Order("in C major at 60 bpm", key=Key(2, "minor"), tempo=150, mood="tense", seconds=1)
    head = writer.begin(order).head

    assert (head.key, head.tempo, head.mood) == (Key(2, "minor"), 150, "tense")


def test_the_same_seed_writes_the_same(writer: Writer) -> None:
    once, again, other = (
        tuple(writer.begin(Order("a tune", tempo=120, seconds=4, seed=seed)).bars())
        for seed in (1, 1, 2)
    )

    assert once == again
    assert once != other


def test_a_piece_may_be_longer_than_the_context(writer: Writer) -> None:
    writing = writer.begin(Order(tempo=120, metre="4/4", seconds=60))
    bars = tuple(writing.bars())

    assert len(bars) == 30
    assert len(encode(replace(writing.head, bars=bars))) > 400


def test_a_mood_that_is_none_is_refused(writer: Writer) -> None:
    with pytest.raises(ValueError, match="there are happy"):
        writer.begin(Order(mood="blue"))


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
    assert HEAD < ROW <= CONTEXT


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


def test_a_listener_tells_moods_apart() -> None:
    pieces = [tune(random.Random(f"mood {seed}"), bars=12) for seed in range(16)]

    assert sum(piece.mood in moods_of(piece)[:2] for piece in pieces) >= 12

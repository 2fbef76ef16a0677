"""Contents that scores ask for are not in the training data of the pocket models."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from training.common import captions
from training.common.samples import choose_ambiguous, choose_sample
from training.common.split import HELD_OUT_SHARE, Example, choose, drawn, is_held_out
from training.music.samples import describe
from training.video.clips import clip


def test_the_split_depends_on_the_content_only() -> None:
    held = [number for number in range(4000) if is_held_out(("numbers", number, 7))]

    assert held[:3] == [7, 10, 11]
    assert abs(len(held) / 4000 - HELD_OUT_SHARE) < 0.02
    assert not is_held_out(None)


@pytest.mark.parametrize(
    "make",
    [
        *captions.EDITS[:1],
        captions.describe,
        captions.add,
        captions.reground,
        captions.relight,
        captions.restyle,
        captions.blend,
        clip,
        describe,
    ],
    ids=lambda make: make.__name__,
)
def test_both_sides_of_every_kind_have_contents(make: Callable[[random.Random], Example]) -> None:
    make_one = partial(make, random.Random(5))

    assert is_held_out(choose(make_one, held_out=True).content)
    assert not is_held_out(choose(make_one).content)


def test_training_draws_no_held_out_scene() -> None:
    contents = drawn(choose_sample, 600) | drawn(choose_ambiguous, 200)

    assert len(contents) > 700
    assert not any(map(is_held_out, contents))

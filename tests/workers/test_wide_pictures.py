"""The pictures that ``training.image`` teaches next: drawn, described and judged."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from training.common import captions
from training.common.samples import choose_sample
from training.common.scenes import MORE_COLOURS, MORE_SHAPES, SHIPPED, WIDE, Scene, Thing, draw
from training.common.verifier import SIDE, verify
from training.common.wide_captions import add_beside, counted, inside, negated

COUNT = 12


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=marks, id=make.__name__)
        for make, marks in (
            (captions.describe, ()),
            (counted, pytest.mark.long),
            (inside, pytest.mark.long),
            (negated, pytest.mark.long),
            (add_beside, ()),
        )
    ],
)
def test_judge_finds_true_renders_right_and_no_other(make: Callable[..., captions.Sample]) -> None:
    r = random.Random(7)
    samples = [make(r, world=WIDE) for _ in range(COUNT)]
    pictures = draw([one.target for one in samples], SIDE)

    right = [
        verify(picture, one.target, world=WIDE).right
        for picture, one in zip(pictures, samples, strict=True)
    ]
    other = [
        verify(picture, samples[number - 1].target, world=WIDE).right
        for number, picture in enumerate(pictures)
    ]

    assert sum(right) >= COUNT - 1
    assert sum(other) <= 1


@pytest.mark.parametrize("shape", MORE_SHAPES)
def test_each_further_shape_is_told_from_all_others(shape: str) -> None:
    scene = Scene((Thing(shape, "teal", "large", 0.0, 0.0),))
    others = [name for name in WIDE.shapes if name != shape]

    (picture,) = draw([scene], SIDE)

    assert verify(picture, scene, world=WIDE).right
    for other in others:
        wrong = Scene((Thing(other, "teal", "large", 0.0, 0.0),))
        assert not verify(picture, wrong, world=WIDE).right, other


@pytest.mark.parametrize("colour", MORE_COLOURS)
def test_each_further_colour_is_told_from_all_others(colour: str) -> None:
    (picture,) = draw([Scene((Thing("circle", colour, "medium", 0.0, 0.0),))], SIDE)

    seen = [
        name
        for name in WIDE.colours
        if verify(picture, Scene((Thing("circle", name, "medium", 0.0, 0.0),)), world=WIDE).right
    ]

    assert seen == [colour]


def test_shipped_weights_are_asked_for_what_they_know_only() -> None:
    r = random.Random(3)
    make = partial(choose_sample, r)

    things = {(one.shape, one.colour) for _ in range(300) for one in make().target.things}

    assert {shape for shape, _ in things} == set(SHIPPED.shapes)
    assert {colour for _, colour in things} == set(SHIPPED.colours)


def test_a_thing_is_added_beside_one_that_keeps_its_place() -> None:
    r = random.Random(5)

    for _ in range(50):
        made = add_beside(r)
        (before,), (new, kept) = made.sources[0].things, made.target.things
        assert kept == before
        assert abs(new.x) + new.radius <= 1.05
        assert abs(new.y) + new.radius <= 1.05

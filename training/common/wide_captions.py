"""Further texts for ``pocket-image``: counts, one thing inside another, "not", and additions.

They are what people try first beyond ``captions``, and need the things of ``scenes.WIDE``. The
weights that are shipped were not trained on them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

from training.common.captions import (
    COLOUR_WORDS,
    RELATION_WORDS,
    SHAPE_WORDS,
    SIZE_WORDS,
    Sample,
    clauses,
    describe,
    meaning,
    name_thing,
    reference,
    with_article,
)
from training.common.scenes import (
    FINE,
    HOLLOW,
    INSIDE,
    RELATIONS,
    SHIPPED,
    WIDE,
    Thing,
    World,
    clashes,
    scene,
    thing,
)

COUNT_WORDS: Final = {2: ("two", "2", "a pair of"), 3: ("three", "3"), 4: ("four", "4")}
INSIDE_WORDS: Final = ("inside", "in", "within", "in the middle of")
_PLACES: Final = {
    2: ((-0.45, 0.0), (0.45, 0.0)),
    3: ((-0.6, 0.0), (0.0, 0.0), (0.6, 0.0)),
    4: ((-0.4, -0.4), (0.4, -0.4), (-0.4, 0.4), (0.4, 0.4)),
}
_ROOMY: Final = 1.7
"""Factor of a large ring that has room for a small thing."""
_GAP: Final = 0.08


def _plural(noun: str) -> str:
    return f"{noun}es" if noun[-1] in "sx" else f"{noun}s"


def counted(r: random.Random, *, world: World = WIDE) -> Sample:
    """Two to four equal things: "three small blue stars"."""
    s = scene(r, things=1, world=world)
    count = r.choice(tuple(_PLACES))
    size = "small" if count > 2 else r.choice(("small", "medium"))
    one = replace(s.things[0], size=size)
    things = tuple(replace(one, x=x, y=y) for x, y in _PLACES[count])
    words = (
        r.choice(COUNT_WORDS[count]),
        r.choice(SIZE_WORDS[size]) if r.random() < 0.5 else "",
        r.choice(COLOUR_WORDS.get(one.colour, (one.colour,))),
        _plural(r.choice(SHAPE_WORDS[one.shape]) if r.random() < 0.3 else one.shape),
    )
    target = replace(s, things=things)
    told = {"task": "draw", "count": str(count), "shape1": one.shape, "colour1": one.colour}
    return Sample(clauses(" ".join(filter(None, words)), target, r), target, meaning=told)


def inside(r: random.Random, *, world: World = WIDE) -> Sample:
    """A small thing inside a ring."""
    s = scene(r, things=1, world=world)
    inner = replace(s.things[0], size="small", x=0.0, y=0.0)
    while True:
        colour = r.choice(world.colours)
        if not clashes(colour, s.background) and (colour, HOLLOW) != (inner.colour, inner.shape):
            break
    outer = Thing(HOLLOW, colour, "large", 0.0, 0.0, scale=_ROOMY)
    target = replace(s, things=(inner, outer), relation=INSIDE, style="flat")
    shown = with_article(name_thing(replace(inner, size="medium"), r).removeprefix("medium "))
    text = f"{shown} {r.choice(INSIDE_WORDS)} {with_article(f'{colour} {HOLLOW}')}"
    told = {
        "task": "draw",
        "count": "inside",
        "shape1": inner.shape,
        "colour1": inner.colour,
        "colour2": colour,
    }
    return Sample(clauses(text, target, r), target, meaning=told)


def negated(r: random.Random, *, world: World = WIDE) -> Sample:
    """A thing, and something that must not be there: "a blue circle, not red"."""
    s = scene(r, things=1, world=world)
    one = s.things[0]
    colour = r.choice([name for name in world.colours if name != one.colour])
    shape = r.choice([name for name in world.shapes if name != one.shape])
    named = with_article(name_thing(one, r))
    text = r.choice(
        (
            f"{named}, not {colour}",
            f"{named}, not {with_article(shape)}",
            f"{named} without {with_article(shape)}",
            f"{named} and no {shape}",
            f"no {shape}, {named}",
            f"not {with_article(f'{colour} {shape}')} but {named}",
        )
    )
    told = {key: value for key, value in meaning(s).items() if not key.startswith("place")}
    return Sample(clauses(text, s, r), s, meaning=told)


def add_beside(r: random.Random, *, world: World = SHIPPED) -> Sample:
    """Add a thing to one in the centre, as users do to a generated image; ``captions.add`` leaves
    room for it. Without a named place it comes to the right."""
    while True:
        s = scene(r, things=1, plain=0.7, world=world)
        one = s.things[0]
        new = thing(r, s.background, other=one, world=world)
        size = "medium" if one.size == "small" and r.random() < 0.5 else "small"
        new = replace(new, size=size)
        if s.style == "flat" or new.shape not in FINE:
            break
    relation = r.choice(tuple(RELATIONS))
    named = name_thing(new, r).removeprefix("small ").removeprefix("medium ")
    text = f"{r.choice(('add', 'put', 'draw'))} {with_article(named)}"
    if r.random() < 0.3:
        relation = "right of"
        text += r.choice(("", " to it", " next to it", f" beside {reference(s, 0, r)}"))
    else:
        text += f" {r.choice(RELATION_WORDS[relation])} {reference(s, 0, r)}"
    dx, dy = RELATIONS[relation]
    far = one.radius + new.radius + _GAP
    new = replace(new, x=one.x + dx * far, y=one.y + dy * far)
    told = {"task": "add", "shape2": new.shape, "colour2": new.colour, "place2": relation}
    target = replace(s, things=(new, one), relation=relation)
    return Sample(text, target, (s,), "image-edit", told)


def describe_more(r: random.Random, *, world: World = WIDE) -> Sample:
    """Choose a text without a source image, of ``captions`` or of this module."""
    kind = r.random()
    if kind < 0.64:
        return describe(r, world=world)
    more = counted if kind < 0.79 else inside if kind < 0.89 else negated
    return more(r, world=world)

"""Texts for the pocket image models: captions of scenes, and instructions that change them.

Every ``Sample`` is exact: its target is what the text asks for, and nothing else changes. What a
caption omits has its default: a white background, daylight, flat style, medium size. Training
chooses samples whose content is not held out (``training.common.split``).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from training.common import scenes
from training.common.scenes import (
    BACKGROUNDS,
    FINE,
    LIGHTS,
    RELATIONS,
    SHIPPED,
    SIZES,
    STYLES,
    Scene,
    Thing,
    World,
    clashes,
    place,
    scene,
)
from training.common.split import Content

SHAPE_WORDS: Final = {
    "circle": ("circle", "disc", "ball", "dot"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "heart": ("heart",),
    "cross": ("cross", "plus"),
    "rectangle": ("rectangle", "oblong"),
    "hexagon": ("hexagon",),
    "ring": ("ring", "hoop"),
    "moon": ("moon", "crescent"),
    "cat": ("cat", "kitten"),
    "shoe": ("shoe", "boot"),
    "cup": ("cup", "mug"),
}
SIZE_WORDS: Final = {
    "small": ("small", "little", "tiny"),
    "medium": ("", "", "", "medium"),
    "large": ("large", "big", "huge"),
}
RELATION_WORDS: Final = {
    "left of": ("left of", "to the left of", "on the left of"),
    "right of": ("right of", "to the right of", "on the right of"),
    "above": ("above", "over", "on top of"),
    "below": ("below", "under", "beneath"),
}
COLOUR_WORDS: Final = {
    "purple": ("purple", "violet"),
    "grey": ("grey", "gray"),
    "gold": ("gold", "golden"),
}
BACKGROUND_WORDS: Final = {
    "white": ("white",),
    "grey": ("grey", "gray"),
    "dark": ("dark", "black"),
    "light blue": ("light blue", "sky blue"),
}
LIGHT_WORDS: Final = {
    "daylight": ("bright daylight", "in daylight", "by day"),
    "left": ("soft light from the left", "light from the left", "lit from the left"),
    "right": ("soft light from the right", "light from the right", "lit from the right"),
    "night": ("calm night light", "at night", "by night"),
}
STYLE_WORDS: Final = {
    "flat": ("flat style", "clean edges", "flat"),
    "outline": ("outline style", "as an outline", "in outline style", "outlined"),
    "pixel": ("pixel art", "in pixel style", "as pixel art", "pixelated"),
}
OPENINGS: Final = (
    "",
    "",
    "",
    "",
    "draw ",
    "a picture of ",
    "an image of ",
    "please draw ",
    "show me ",
    "paint ",
    "i want ",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A text, its source scenes (none, one or two), and the target scene that it asks for.

    ``meaning`` is the text's meaning as classes, to train the text encoder.
    """

    text: str
    target: Scene
    sources: tuple[Scene, ...] = ()
    task: str = "text-to-image"
    meaning: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> Content:
        """The scenes, in whatever words the text asks for the target."""
        shown = (part for one in (*self.sources, self.target) for part in scenes.content(one))
        return (self.task, *shown)


def name_thing(one: Thing, r: random.Random) -> str:
    """Name a thing by size, colour and shape, in one of many ways."""
    words = (
        r.choice(SIZE_WORDS[one.size]),
        r.choice(COLOUR_WORDS.get(one.colour, (one.colour,))),
        r.choice(SHAPE_WORDS[one.shape]) if r.random() < 0.3 else one.shape,
    )
    return " ".join(filter(None, words))


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def caption(s: Scene, r: random.Random) -> str:
    """Describe a scene in one of many ways."""
    bare = r.random() < 0.15
    things = [name_thing(one, r) for one in s.things]
    if not bare:
        things = [with_article(words) for words in things]
    text = things[0]
    if s.relation:
        text += f" {r.choice(RELATION_WORDS[s.relation])} {things[1]}"
    return clauses(text, s, r)


def clauses(text: str, s: Scene, r: random.Random) -> str:
    """Add background, light and style to the things of a caption."""
    found = []
    if s.background != "white" or r.random() < 0.4:
        ground = r.choice(BACKGROUND_WORDS[s.background])
        forms = (f"on a {ground} background", f"on {ground}", f"{ground} background")
        found.append(r.choice(forms))
    if s.light != "daylight" or r.random() < 0.15:
        found.append(r.choice(LIGHT_WORDS[s.light]))
    if s.style != "flat" or r.random() < 0.15:
        found.append(r.choice(STYLE_WORDS[s.style]))
    r.shuffle(found)
    comma = ", " if r.random() < 0.6 else " "
    return r.choice(OPENINGS) + comma.join([text, *found]) + ("." if r.random() < 0.2 else "")


def meaning(s: Scene) -> dict[str, str]:
    """Return the meaning of a caption as classes."""
    found = {"task": "draw", "background": s.background, "light": s.light, "style": s.style}
    places = (s.relation, _OPPOSITE.get(s.relation or ""))
    for number, (one, where) in enumerate(zip(s.things, places, strict=False), start=1):
        found |= {
            f"shape{number}": one.shape,
            f"colour{number}": one.colour,
            f"size{number}": one.size,
            f"place{number}": where or "anywhere",
        }
    if len(s.things) == 1:
        found["shape2"] = found["colour2"] = found["size2"] = found["place2"] = "none"
    return found


_OPPOSITE: Final = {
    "left of": "right of",
    "right of": "left of",
    "above": "below",
    "below": "above",
}

# --- Instructions --------------------------------------------------------------------------------


def reference(s: Scene, index: int, r: random.Random) -> str:
    """Name a thing of a scene unambiguously."""
    one = s.things[index]
    others = [other for place_, other in enumerate(s.things) if place_ != index]
    choices = [f"the {one.colour} {one.shape}"]
    if all(other.shape != one.shape for other in others):
        choices += [f"the {one.shape}"] * 2
    if not others:
        choices.append("it")
    return r.choice(choices)


def _with(s: Scene, index: int, one: Thing) -> Scene:
    things = list(s.things)
    things[index] = one
    return replace(s, things=tuple(things))


def _about(s: Scene, index: int) -> dict[str, str]:
    return {"colour1": s.things[index].colour, "shape1": s.things[index].shape}


def _other(r: random.Random, choices: Iterable[str], now: str) -> str:
    return r.choice([one for one in choices if one != now])


def recolour(r: random.Random, *, world: World = SHIPPED) -> Sample:
    s = scene(r, wide=True, world=world)
    index = r.randrange(len(s.things))
    one = s.things[index]
    while True:
        colour = _other(r, world.colours, one.colour)
        new = replace(one, colour=colour)
        if clashes(colour, s.background):
            continue
        if all((new.shape, colour) != (x.shape, x.colour) for x in s.things):
            break
    name = reference(s, index, r)
    text = r.choice(
        (
            f"make {name} {colour}",
            f"change {name} to {colour}",
            f"paint {name} {colour}",
            f"turn {name} {colour}",
            f"{name} should be {colour}",
        )
    )
    told = _about(s, index) | {"task": "recolour", "colour2": colour}
    return Sample(text, _with(s, index, new), (s,), "image-edit", told)


def reshape(r: random.Random, *, world: World = SHIPPED) -> Sample:
    s = scene(r, wide=True, world=world)
    index = r.randrange(len(s.things))
    one = s.things[index]
    while True:
        shape = _other(r, world.shapes, one.shape)
        if shape in FINE and s.style != "flat":
            continue
        new = replace(one, shape=shape)
        if all((shape, new.colour) != (x.shape, x.colour) for x in s.things):
            break
    name = reference(s, index, r)
    text = r.choice(
        (
            f"turn {name} into {with_article(shape)}",
            f"replace {name} with {with_article(shape)}",
            f"change {name} to {with_article(shape)}",
            f"make {name} {with_article(shape)}",
        )
    )
    told = _about(s, index) | {"task": "reshape", "shape2": shape}
    return Sample(text, _with(s, index, new), (s,), "image-edit", told)


def resize(r: random.Random, *, world: World = SHIPPED) -> Sample:
    order = tuple(SIZES)
    while True:
        s = scene(r, wide=True, world=world)
        index = r.randrange(len(s.things))
        now = order.index(s.things[index].size)
        to = now + r.choice((-1, 1))
        if 0 <= to < len(order):
            break
    new = replace(s.things[index], size=order[to])
    name = reference(s, index, r)
    words = ("larger", "bigger") if to > now else ("smaller",)
    way = "larger" if to > now else "smaller"
    text = f"make {name} {r.choice(words)}"
    told = _about(s, index) | {"task": way}
    return Sample(text, _with(s, index, new), (s,), "image-edit", told)


def remove(r: random.Random, *, world: World = SHIPPED) -> Sample:
    s = scene(r, things=2, wide=True, world=world)
    index = r.randrange(2)
    name = reference(s, index, r)
    text = r.choice((f"remove {name}", f"delete {name}", f"take {name} away", f"without {name}"))
    kept = replace(s, things=(s.things[1 - index],), relation=None)
    return Sample(text, kept, (s,), "image-edit", _about(s, index) | {"task": "remove"})


def add(r: random.Random, *, world: World = SHIPPED) -> Sample:
    s = scene(r, things=2, wide=True, world=world)
    assert s.relation is not None
    before = replace(s, things=(s.things[1],), relation=None)
    words = r.choice(RELATION_WORDS[s.relation])
    name = reference(before, 0, r)
    what = with_article(name_thing(s.things[0], r))
    text = f"{r.choice(('add', 'put', 'draw'))} {what} {words} {name}"
    told = {
        "task": "add",
        "shape2": s.things[0].shape,
        "colour2": s.things[0].colour,
        "size2": s.things[0].size,
        "place2": s.relation,
        "shape1": s.things[1].shape,
    }
    if name == "it":
        del told["shape1"]
    return Sample(text, s, (before,), "image-edit", told)


def reground(r: random.Random, *, world: World = SHIPPED) -> Sample:
    while True:
        s = scene(r, plain=0.3, wide=True, world=world)
        to = _other(r, BACKGROUNDS, s.background)
        if not any(clashes(one.colour, to) for one in s.things):
            break
    words = r.choice(BACKGROUND_WORDS[to])
    text = r.choice(
        (
            f"make the background {words}",
            f"change the background to {words}",
            f"on a {words} background",
            f"{words} background",
        )
    )
    told = {"task": "reground", "background": to}
    return Sample(text, replace(s, background=to), (s,), "image-edit", told)


def relight(r: random.Random, *, world: World = SHIPPED) -> Sample:
    s = scene(r, plain=0.3, wide=True, world=world)
    to = _other(r, LIGHTS, s.light)
    words = r.choice(LIGHT_WORDS[to])
    text = r.choice((words, words, f"make it {words}", f"relight it, {words}"))
    told = {"task": "relight", "light": to}
    return Sample(text, replace(s, light=to), (s,), "image-relight", told)


def restyle(r: random.Random, *, world: World = SHIPPED) -> Sample:
    s = scene(r, plain=0.3, wide=True, world=world)
    to = _other(r, STYLES, s.style)
    words = r.choice(STYLE_WORDS[to])
    text = r.choice((words, words, f"make it {words}", f"restyle it, {words}", f"draw it {words}"))
    told = {"task": "restyle", "style": to}
    return Sample(text, replace(s, style=to), (s,), "image-restyle", told)


def blend(r: random.Random, *, world: World = SHIPPED) -> Sample:
    """Place the second scene's thing beside the first scene's, in the first scene's world.

    In each source the thing is near the centre.
    """
    while True:
        a, b = (scene(r, things=1, world=world) for _ in range(2))
        first, second = a.things[0], b.things[0]
        if not clashes(second.colour, a.background) and (first.shape, first.colour) != (
            second.shape,
            second.colour,
        ):
            break
    relation = r.choice(tuple(RELATIONS))
    target = replace(a, things=place((first, second), relation, r), relation=relation)
    words = r.choice(RELATION_WORDS[relation])
    if relation == "left of" and r.random() < 0.4:
        text = r.choice(("blend them", "blend both pictures", "put them together", "combine them"))
    else:
        text = r.choice(
            (
                f"the first {words} the second",
                f"put the first {words} the second",
                f"blend, the first {words} the second",
            )
        )
    told = {"task": "blend", "place1": relation}
    return Sample(text, target, (a, b), "image-blend", told)


def describe(r: random.Random, *, world: World = SHIPPED) -> Sample:
    s = scene(r, world=world)
    return Sample(caption(s, r), s, meaning=meaning(s))


EDITS: Final = (recolour, recolour, reshape, reshape, resize, remove, remove, add, reground)


def fields(world: World = SHIPPED) -> dict[str, tuple[str, ...]]:
    """Return the classes of each field of a meaning."""
    whole: dict[str, tuple[str, ...]] = {
        "task": (
            *("draw", "recolour", "reshape", "larger", "smaller", "remove", "add"),
            *("reground", "relight", "restyle", "blend"),
        ),
        "background": tuple(BACKGROUNDS),
        "light": LIGHTS,
        "style": STYLES,
    }
    if world is not SHIPPED:
        whole["count"] = ("2", "3", "4", "inside")
    things = (
        ("shape", world.shapes),
        ("colour", world.colours),
        ("size", tuple(SIZES)),
        ("place", (*RELATIONS, "anywhere")),
    )
    return whole | {
        f"{name}{number}": (*values, "none") for number in (1, 2) for name, values in things
    }

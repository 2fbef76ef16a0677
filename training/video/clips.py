"""Moving scenes with their texts, to train and to verify the pocket video model.

The first thing of a scene moves, grows or shrinks; a second one does not. Movement is uniform and
stops short of the edge, so that a clip can be continued from its last frame.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from training.common import captions
from training.common.captions import (
    BACKGROUND_WORDS,
    LIGHT_WORDS,
    OPENINGS,
    RELATION_WORDS,
    STYLE_WORDS,
    meaning,
    name_thing,
    with_article,
)
from training.common.scenes import Scene, content, draw, scene
from training.common.split import Content

FRAMES: Final = 16
FPS: Final = 8
DIRECTIONS: Final = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
MOTIONS: Final = (*DIRECTIONS, "grows", "shrinks")
REACH: Final = 0.85
"""Distance that a thing moves in a clip, in image coordinates from -1 to 1."""
EDGE: Final = 0.58
"""Coordinate at which a thing's centre stops."""
GROWTH: Final = 0.7

MOTION_WORDS: Final = {
    "left": ("moves left", "moves to the left", "slides left", "flies left", "moving left"),
    "right": ("moves right", "moves to the right", "slides right", "flies right", "moving right"),
    "up": ("moves up", "rises", "flies up", "moving up", "goes up"),
    "down": ("moves down", "falls", "sinks", "moving down", "goes down"),
    "grows": ("grows", "becomes larger", "gets bigger", "growing"),
    "shrinks": ("shrinks", "becomes smaller", "gets smaller", "shrinking"),
}


@dataclass(frozen=True, slots=True)
class Clip:
    """A scene and the motion of its first thing. ``pictured``: the first frame is given, and the
    text refers to it."""

    text: str
    scene: Scene
    motion: str
    pictured: bool
    meaning: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> Content:
        """The scene and its motion, in whatever words the text asks for it."""
        return ("clip", *content(self.scene), self.motion)


def at(clip: Clip, part: float) -> Scene:
    """Return the scene after a fraction of the clip."""
    one, *others = clip.scene.things
    if clip.motion in DIRECTIONS:
        dx, dy = DIRECTIONS[clip.motion]
        one = replace(one, x=_moved(one.x, dx * REACH * part), y=_moved(one.y, dy * REACH * part))
    else:
        factor = 1 + (GROWTH if clip.motion == "grows" else -GROWTH * 0.7) * part
        one = replace(one, scale=factor)
    return replace(clip.scene, things=(one, *others))


def _moved(start: float, way: float) -> float:
    to = start + way
    return max(min(to, max(EDGE, start)), min(-EDGE, start))


def film(clips: Sequence[Clip], side: int = 64, frames: int = FRAMES) -> torch.Tensor:
    """Render clips: ``(B, frames, 3, side, side)`` from -1 to 1."""
    scenes = [at(clip, frame / (frames - 1)) for clip in clips for frame in range(frames)]
    pictures = draw(scenes, side)
    return pictures.view(len(clips), frames, *pictures.shape[1:])


def clip(r: random.Random, *, pictured: bool | None = None, resting: float = 0.15) -> Clip:
    """Choose a clip, given by text only or with its first frame.

    ``resting`` is the probability that a thing can start where it cannot move further, as in a
    continued clip.
    """
    pictured = r.random() < 0.5 if pictured is None else pictured
    s = scene(r, wide=pictured)
    one = s.things[0]
    motion = r.choice(MOTIONS)
    if s.relation:
        across = s.relation in ("above", "below")
        sides = ("left", "right") if across else ("up", "down")
        motion = r.choice((*sides, *sides, "grows", "shrinks"))
    if motion == "grows" and one.size == "large":
        motion = "shrinks"
    if motion in DIRECTIONS:
        dx, dy = DIRECTIONS[motion]
        back = r.uniform(0.2, 0.5)
        if pictured and r.random() < 0.4:
            back = r.uniform(-0.6, 0.0) if r.random() < resting else r.uniform(-0.1, 0.6)
        one = replace(one, x=-dx * back if dx else one.x, y=-dy * back if dy else one.y)
    s = replace(s, things=(one, *s.things[1:]))
    text = _instruction(s, motion, r) if pictured else _caption(s, motion, r)
    return Clip(text, s, motion, pictured, _meaning(s, motion, pictured=pictured))


def _instruction(s: Scene, motion: str, r: random.Random) -> str:
    one = s.things[0]
    names = [f"the {one.colour} {one.shape}"]
    if all(other.shape != one.shape for other in s.things[1:]):
        names += [f"the {one.shape}"] * 2
    if len(s.things) == 1:
        names.append("it")
    return f"{r.choice(names)} {r.choice(MOTION_WORDS[motion])}"


def _caption(s: Scene, motion: str, r: random.Random) -> str:
    one = with_article(name_thing(s.things[0], r))
    moves = r.choice(MOTION_WORDS[motion])
    text = f"{one} {moves}"
    if s.relation:
        beside = (
            f"{r.choice(RELATION_WORDS[s.relation])} {with_article(name_thing(s.things[1], r))}"
        )
        text = r.choice((f"{one} {moves} {beside}", f"{one} {beside} {moves}"))
    clauses = []
    if s.background != "white" or r.random() < 0.3:
        ground = r.choice(BACKGROUND_WORDS[s.background])
        clauses.append(r.choice((f"on a {ground} background", f"on {ground}")))
    if s.light != "daylight" or r.random() < 0.1:
        clauses.append(r.choice(LIGHT_WORDS[s.light]))
    if s.style != "flat" or r.random() < 0.1:
        clauses.append(r.choice(STYLE_WORDS[s.style]))
    r.shuffle(clauses)
    comma = ", " if r.random() < 0.6 else " "
    return r.choice(OPENINGS) + comma.join([text, *clauses])


def _meaning(s: Scene, motion: str, *, pictured: bool) -> dict[str, str]:
    """Return the meaning of the text; with a given frame, the text names only the motion."""
    if pictured:
        return {"motion": motion}
    return {**meaning(s), "motion": motion}


FIELDS: Final[dict[str, tuple[str, ...]]] = {"motion": MOTIONS} | {
    name: classes for name, classes in captions.fields().items() if name != "task"
}
"""Classes of each field of a meaning."""

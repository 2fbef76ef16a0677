"""Scenes of coloured shapes, rendered from signed distances at any size.

They are the domain of the pocket image, video and upscaling models: a few things on a plain
background, under a light, in a style. A ``World`` says which things there are. A ``Scene`` is
exact, so a changed scene is the exact answer to an instruction that asks for the change. Everything
is generated from a seed; no third-party images are used.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F

from training.common.shapes import DISTANCES

COLOURS: Final = {
    "red": (0.88, 0.13, 0.14),
    "green": (0.13, 0.65, 0.25),
    "blue": (0.12, 0.25, 0.88),
    "yellow": (0.98, 0.84, 0.10),
    "orange": (0.98, 0.50, 0.05),
    "purple": (0.52, 0.15, 0.70),
    "pink": (0.98, 0.50, 0.74),
    "black": (0.05, 0.05, 0.06),
    "white": (0.98, 0.98, 0.98),
}
MORE_COLOURS: Final = {
    "brown": (0.45, 0.26, 0.10),
    "teal": (0.02, 0.50, 0.50),
    "gold": (0.80, 0.62, 0.16),
    "grey": (0.40, 0.41, 0.43),
}
PALETTE: Final = COLOURS | MORE_COLOURS
BACKGROUNDS: Final = {
    "white": (0.95, 0.95, 0.94),
    "grey": (0.55, 0.56, 0.58),
    "dark": (0.13, 0.13, 0.16),
    "light blue": (0.62, 0.80, 0.95),
}
SHAPES: Final = ("circle", "square", "triangle", "star", "heart", "cross")
MORE_SHAPES: Final = ("rectangle", "hexagon", "ring", "moon", "cat", "shoe", "cup")
FINE: Final = ("ring", "moon", "cat", "shoe", "cup")
"""Shapes that are drawn flat only."""
SIZES: Final = {"small": 0.24, "medium": 0.33, "large": 0.42}
"""Radius, in image coordinates from -1 to 1."""
LIGHTS: Final = ("daylight", "left", "right", "night")
STYLES: Final = ("flat", "outline", "pixel")
RELATIONS: Final = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
INSIDE: Final = "inside"
HOLLOW: Final = "ring"
"""Shape in which another thing can be."""

NIGHT: Final = (0.40, 0.44, 0.75)
_CLASHES: Final = {("white", "white"), ("black", "dark"), ("grey", "grey"), ("grey", "dark")}
_PIXELS: Final = 16
"""Cells along an image's side in pixel style."""
_LINE: Final = 0.055


@dataclass(frozen=True, slots=True)
class World:
    """The things that scenes consist of."""

    colours: tuple[str, ...]
    shapes: tuple[str, ...]


SHIPPED: Final = World(tuple(COLOURS), SHAPES)
"""What the weights of ``workers/pocket`` know."""
WIDE: Final = World(tuple(PALETTE), (*SHAPES, *MORE_SHAPES))
"""What ``training.image.train`` teaches."""


@dataclass(frozen=True, slots=True)
class Thing:
    shape: str
    colour: str
    size: str
    x: float
    y: float
    scale: float = 1.0
    """Factor of its size, while it grows or shrinks."""

    @property
    def radius(self) -> float:
        return SIZES[self.size] * self.scale


@dataclass(frozen=True, slots=True)
class Scene:
    things: tuple[Thing, ...]
    relation: str | None = None
    """Place of the first thing relative to the second; ``INSIDE`` it, or a place beside it."""
    background: str = "white"
    light: str = "daylight"
    style: str = "flat"


def content(s: Scene) -> tuple[str, ...]:
    """Return what a scene shows, without exact positions, to tell scenes apart."""
    things = (f"{one.size} {one.colour} {one.shape}" for one in s.things)
    return (*things, s.relation or "alone", s.background, s.light, s.style)


# --- Making scenes -------------------------------------------------------------------------------


def thing(
    r: random.Random,
    background: str,
    *,
    other: Thing | None = None,
    wide: bool = False,
    world: World = SHIPPED,
) -> Thing:
    """Choose a thing that is visible on a background and differs from ``other``.

    It is placed near the centre or, with ``wide``, anywhere.
    """
    off = 0.3 if wide else 0.06
    while True:
        shape, colour = r.choice(world.shapes), r.choice(world.colours)
        size = r.choice(tuple(SIZES))
        if clashes(colour, background):
            continue
        if other is not None and (shape, colour) == (other.shape, other.colour):
            continue
        return Thing(shape, colour, size, r.uniform(-off, off), r.uniform(-off, off))


def clashes(colour: str, background: str) -> bool:
    """Whether a thing in a colour cannot be seen on a background."""
    return (colour, background) in _CLASHES


def place(
    things: tuple[Thing, Thing], relation: str, r: random.Random, *, wide: bool = False
) -> tuple[Thing, Thing]:
    """Place two things by their relation, with little or, with ``wide``, more variation."""
    dx, dy = RELATIONS[relation]
    off = 0.07 if wide else 0.03
    placed = []
    for sign, one in zip((1, -1), things, strict=True):
        x = sign * dx * 0.48 + r.uniform(-off, off)
        y = sign * dy * 0.48 + r.uniform(-off, off)
        placed.append(replace(one, x=x, y=y))
    return placed[0], placed[1]


def scene(
    r: random.Random,
    *,
    things: int | None = None,
    plain: float = 0.5,
    wide: bool = False,
    world: World = SHIPPED,
) -> Scene:
    """Choose a scene. ``plain`` is the probability of each default of background, light and style.

    Captions name no place but the relation, so scenes generated from text alone have their things
    in canonical places; source images are ``wide``.
    """
    background = "white" if r.random() < plain * 0.7 else r.choice(tuple(BACKGROUNDS))
    light = "daylight" if r.random() < plain else r.choice(LIGHTS)
    style = "flat" if r.random() < plain else r.choice(STYLES)
    first = thing(r, background, wide=wide, world=world)
    count = things or (1 if r.random() < 0.4 else 2)
    if count == 1:
        return Scene((first,), None, background, light, style_of((first,), style))
    relation = r.choice(tuple(RELATIONS))
    second = thing(r, background, other=first, world=world)
    style = style_of((first, second), style)
    return Scene(place((first, second), relation, r, wide=wide), relation, background, light, style)


def style_of(things: Sequence[Thing], style: str) -> str:
    """Return a style in which all of the things can be recognised."""
    return "flat" if any(one.shape in FINE for one in things) else style


# --- Drawing -------------------------------------------------------------------------------------


def mask(one: Thing, side: int, *, outline: bool = False) -> torch.Tensor:
    """Return the coverage of each pixel by a thing: ``(side, side)`` from 0 to 1."""
    x, y = _grid(side, side)
    radius = one.radius
    distance = DISTANCES[one.shape]((x - one.x) / radius, (y - one.y) / radius) * radius
    return _cover(_outlined(distance) if outline else distance, side)


def _outlined(distance: torch.Tensor) -> torch.Tensor:
    return distance.abs() - _LINE


def _cover(distance: torch.Tensor, side: int) -> torch.Tensor:
    return (0.5 - distance * side / 2).clamp(0, 1)


def _grid(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixel centres as x and y; the shorter side spans -1 to 1."""
    short = min(height, width)
    x = (torch.arange(width) + 0.5) * 2 / short - width / short
    y = (torch.arange(height) + 0.5) * 2 / short - height / short
    return x[None, :].expand(height, width), y[:, None].expand(height, width)


def draw(scenes: Sequence[Scene], side: int = 64) -> torch.Tensor:
    """Render scenes: ``(B, 3, side, side)`` from -1 to 1."""
    x, y = _grid(side, side)
    image = _column([BACKGROUNDS[s.background] for s in scenes]).expand(-1, -1, side, side)
    outline = torch.tensor([s.style == "outline" for s in scenes])[:, None, None]
    for place_ in range(max(len(s.things) for s in scenes)):
        rows = [index for index, s in enumerate(scenes) if len(s.things) > place_]
        if not rows:
            continue
        things = [scenes[index].things[place_] for index in rows]
        radius = _column([(one.radius,) for one in things])[:, 0]
        left = _column([(one.x,) for one in things])[:, 0]
        top = _column([(one.y,) for one in things])[:, 0]
        x_, y_ = (x - left) / radius, (y - top) / radius
        far = torch.empty_like(x_)
        for shape in {one.shape for one in things}:
            mine = torch.tensor([one.shape == shape for one in things])
            far[mine] = DISTANCES[shape](x_[mine], y_[mine])
        far = far * radius
        far = torch.where(outline[rows], _outlined(far), far)
        cover = _cover(far, side)[:, None]
        colour = _column([PALETTE[one.colour] for one in things])
        image = image.clone() if place_ == 0 else image
        image[rows] = image[rows] * (1 - cover) + colour * cover
    lit = image * torch.stack([light_of(s.light, side) for s in scenes])
    image = _style(lit, scenes, side)
    return image.clamp(0, 1) * 2 - 1


def _column(values: Sequence[tuple[float, ...]]) -> torch.Tensor:
    return torch.tensor(values)[:, :, None, None]


def light_of(light: str, side: int) -> torch.Tensor:
    """Return the light's factor per channel and pixel: ``(3, side, side)``."""
    x, _ = _grid(side, side)
    if light == "left":
        return (0.70 - 0.38 * x).expand(3, -1, -1)
    if light == "right":
        return (0.70 + 0.38 * x).expand(3, -1, -1)
    if light == "night":
        return torch.tensor(NIGHT)[:, None, None].expand(-1, side, side)
    return torch.ones(3, side, side)


def _style(image: torch.Tensor, scenes: Sequence[Scene], side: int) -> torch.Tensor:
    rows = [index for index, s in enumerate(scenes) if s.style == "pixel"]
    if rows:
        small = F.avg_pool2d(image[rows], side // _PIXELS)
        image[rows] = F.interpolate(small, size=(side, side), mode="nearest")
    return image


def sheet(pictures: torch.Tensor, columns: int = 8, *, gap: int = 4) -> torch.Tensor:
    """Arrange images ``(N, 3, H, W)`` from -1 to 1 on one page: uint8 ``(H', W', 3)``."""
    count, _, height, width = pictures.shape
    rows = -(-count // columns)
    page = torch.full((3, rows * (height + gap) + gap, columns * (width + gap) + gap), 1.0)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        top, left = gap + row * (height + gap), gap + column * (width + gap)
        page[:, top : top + height, left : left + width] = (picture.float().clamp(-1, 1) + 1) / 2
    return (page * 255).round().byte().permute(1, 2, 0)

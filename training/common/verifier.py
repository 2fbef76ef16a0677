"""Verifies whether an image shows a scene, by its pixels and without a model.

The scene's light is divided out, and the foreground is split into connected pieces. Each piece has
a colour (the nearest known one), a shape (the one whose template of equal area covers it best) and
a place. An image in another light, with a blurred, missing or additional thing, or with the right
things in the wrong places, is rejected.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F

from training.common.scenes import (
    BACKGROUNDS,
    HOLLOW,
    INSIDE,
    PALETTE,
    RELATIONS,
    SHIPPED,
    Scene,
    Thing,
    World,
    light_of,
    mask,
)

SIDE: Final = 64
FAR: Final = 0.17
"""Difference from the background's colour above which a pixel is foreground."""
BACKGROUND_FAR: Final = 0.10
"""Maximum difference of the background's mean colour from the requested one."""
COVER: Final = 0.66
"""Minimum intersection over union with the requested shape's template."""
TIE: Final = 0.03
"""Difference in cover below which templates cannot be distinguished at this size."""
PIXEL_COVER: Final = 0.55
PIXEL_TIE: Final = 0.15
_CENTRED: Final = 0.15
HOLE: Final = 0.15
"""Share of a disc's area above which a hole makes it a ring."""
SPECK: Final = 0.12
"""Size of a piece, relative to the largest, below which it is ignored."""
SPECK_INSIDE: Final = 0.04
"""The same where a small thing is inside a large one."""
_SMALLEST: Final = 14
_WITH_HOLES: Final = (HOLLOW, "cat", "cup")


@dataclass(frozen=True, slots=True)
class Piece:
    """A connected piece: colour name, cover by shape, centre (from -1 to 1) and pixel count."""

    colour: str
    cover: dict[str, float]
    x: float
    y: float
    pixels: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which aspects are right. ``things`` is the number of pieces; colours, shapes and places must
    be right for all of them."""

    background: bool
    things: bool
    colours: bool
    shapes: bool
    places: bool

    @property
    def right(self) -> bool:
        return self.background and self.things and self.colours and self.shapes and self.places


def verify(
    picture: torch.Tensor,
    scene: Scene,
    *,
    stays: float | None = None,
    world: World = SHIPPED,
) -> Verdict:
    """Compare an image ``(3, 64, 64)`` from -1 to 1 with the scene that it should show.

    With ``stays``, each thing must also be within this distance of its place in the scene. Colours
    and shapes are told apart from the others of ``world``.
    """
    flat, front = _front(picture, scene)
    ground = torch.tensor(BACKGROUNDS[scene.background])
    behind = flat[:, ~front]
    background = behind.shape[1] > SIDE and bool(
        ((behind.mean(1) - ground).abs() < BACKGROUND_FAR).all()
    )
    found = pieces(flat, front, scene, world)
    if len(found) != len(scene.things):
        return Verdict(background, False, False, False, False)
    order = _assign(found, scene.things)
    pairs = list(zip(order, scene.things, strict=True))
    return Verdict(
        background,
        True,
        all(piece.colour == thing.colour for piece, thing in pairs),
        all(_has_shape(piece, thing, scene.style) for piece, thing in pairs),
        (scene.relation is None or _related(order[0], order[1], scene.relation))
        and (stays is None or all(_stands(piece, thing, stays) for piece, thing in pairs)),
    )


def find_pieces(picture: torch.Tensor, scene: Scene, world: World = SHIPPED) -> list[Piece]:
    """Return the foreground pieces of an image, given the scene's background and light."""
    return pieces(*_front(picture, scene), scene, world)


def _front(picture: torch.Tensor, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the image with the light divided out, from 0 to 1, and the foreground mask."""
    light = light_of(scene.light, SIDE)
    flat = ((picture.float().clamp(-1, 1) + 1) / 2 / light).clamp(0, 1.2)
    ground = torch.tensor(BACKGROUNDS[scene.background])[:, None, None]
    far = (flat - ground).abs().amax(0)
    if scene.style != "pixel":
        return flat, far > FAR
    # Cells at the edge mix foreground and background.
    cells = F.avg_pool2d(far[None], SIDE // 16)[0].repeat_interleave(4, 0).repeat_interleave(4, 1)
    return flat, cells > 2 * FAR


def pieces(
    flat: torch.Tensor, front: torch.Tensor, scene: Scene, world: World = SHIPPED
) -> list[Piece]:
    """Return the connected pieces of the foreground, largest first, without specks."""
    labels = _label(front)
    found = []
    for label in torch.unique(labels[front]).tolist():
        covered = labels == label
        count = int(covered.sum())
        if count < _SMALLEST:
            continue
        found.append((count, covered))
    found.sort(key=lambda pair: -pair[0])
    speck = SPECK_INSIDE if scene.relation == INSIDE else SPECK
    kept = [pair for pair in found if pair[0] >= speck * found[0][0]]
    return [_piece(flat, covered, scene.style, world) for _, covered in kept]


def _label(front: torch.Tensor) -> torch.Tensor:
    """Label each connected piece (8-connectivity) with a positive number; 0 is background."""
    labels = torch.arange(1, front.numel() + 1, dtype=torch.float32).view(front.shape) * front
    while True:
        grown = F.max_pool2d(labels[None, None], 3, 1, 1)[0, 0] * front
        if torch.equal(grown, labels):
            return labels
        labels = grown


def _piece(flat: torch.Tensor, covered: torch.Tensor, style: str, world: World) -> Piece:
    filled = _filled(covered)
    core = _core(covered)
    median = flat[:, core].median(1).values
    colour = min(
        world.colours, key=lambda name: float(((median - torch.tensor(PALETTE[name])) ** 2).sum())
    )
    ys, xs = filled.nonzero(as_tuple=True)
    half = SIDE / 2
    x, y = float(xs.float().mean() + 0.5) / half - 1, float(ys.float().mean() + 0.5) / half - 1
    cover = {shape: _covers(filled, shape, style) for shape in world.shapes}
    if style == "flat" and HOLLOW in cover:
        hollow = 1 - int(covered.sum()) / len(xs) > HOLE
        cover["circle" if hollow else HOLLOW] = 0.0
    return Piece(colour, cover, x, y, len(xs))


def _core(covered: torch.Tensor) -> torch.Tensor:
    """Remove the mixed pixels of the edge, unless too few pixels remain."""
    inner = -F.max_pool2d(-covered.float()[None, None], 3, 1, 1)[0, 0] > 0.5
    return inner if int(inner.sum()) >= 4 else covered


def _filled(covered: torch.Tensor) -> torch.Tensor:
    """Fill the holes: all pixels that cannot be reached from the border."""
    outside = _label(F.pad(~covered, (1, 1, 1, 1), value=True))
    return ~(outside == outside[0, 0])[1:-1, 1:-1]


@functools.cache
def _template(shape: str, tenths: int) -> torch.Tensor:
    """Render a shape with its centroid in the middle; the radius is in tenths of a pixel."""
    radius = tenths / 10 / (SIDE / 2)
    plain = Thing(shape, "red", "large", 0.0, 0.0, scale=radius / 0.42)
    drawn = mask(plain, SIDE)
    if shape in _WITH_HOLES:
        drawn = torch.maximum(drawn, _filled(drawn > 0.5).float())
    ys, xs = torch.meshgrid(torch.arange(SIDE) + 0.5, torch.arange(SIDE) + 0.5, indexing="ij")
    whole = drawn.sum()
    dx = float((drawn * xs).sum() / whole) / (SIDE / 2) - 1
    dy = float((drawn * ys).sum() / whole) / (SIDE / 2) - 1
    found = mask(Thing(shape, "red", "large", -dx, -dy, scale=radius / 0.42), SIDE)
    return torch.maximum(found, _filled(found > 0.5).float()) if shape in _WITH_HOLES else found


@functools.cache
def _area(shape: str) -> float:
    """Return the area in pixels of a shape with a radius of 1 pixel."""
    return float(_template(shape, 200).sum()) / 400


def _covers(filled: torch.Tensor, shape: str, style: str) -> float:
    """Return the intersection over union with a template of the same area and centroid."""
    count = int(filled.sum())
    tenths = max(10, round(math.sqrt(count / _area(shape)) * 10))
    if tenths > 10 * SIDE // 2:
        return 0.0
    ys, xs = filled.nonzero(as_tuple=True)
    best = 0.0
    middle = (SIDE - 1) / 2
    for radius in (tenths, round(tenths * 0.94), round(tenths * 1.06)):
        template = _template(shape, radius)
        dy, dx = float(ys.float().mean()) - middle, float(xs.float().mean()) - middle
        moved = torch.roll(template, (round(dy), round(dx)), (0, 1))
        if style == "pixel":
            cells = F.avg_pool2d(moved[None], SIDE // 16)[0]
            moved = cells.repeat_interleave(4, 0).repeat_interleave(4, 1)
        over = moved > 0.5
        union = int((over | filled).sum())
        best = max(best, int((over & filled).sum()) / max(1, union))
    return best


def _has_shape(piece: Piece, thing: Thing, style: str) -> bool:
    least, tie = (PIXEL_COVER, PIXEL_TIE) if style == "pixel" else (COVER, TIE)
    cover = piece.cover[thing.shape]
    return cover >= least and cover >= max(piece.cover.values()) - tie


def _assign(found: Sequence[Piece], things: Sequence[Thing]) -> list[Piece]:
    """Assign pieces to things so that colours and shapes fit best."""

    def fit(order: Iterable[Piece]) -> float:
        return sum(
            (piece.colour == thing.colour) + piece.cover[thing.shape]
            for piece, thing in zip(order, things, strict=True)
        )

    return list(max(itertools.permutations(found), key=fit))


def _stands(piece: Piece, thing: Thing, most: float) -> bool:
    return abs(piece.x - thing.x) <= most and abs(piece.y - thing.y) <= most


def _related(first: Piece, second: Piece, relation: str) -> bool:
    x, y = first.x - second.x, first.y - second.y
    if relation == INSIDE:
        return max(abs(x), abs(y)) < _CENTRED and first.pixels < second.pixels
    dx, dy = RELATIONS[relation]
    along, across = x * dx + y * dy, abs(x * dy) + abs(y * dx)
    return along > 0.25 and along > across


def share(verdicts: Sequence[Any], name: str) -> float:
    """Return the fraction of verdicts in which an aspect is right."""
    return sum(bool(getattr(one, name)) for one in verdicts) / max(1, len(verdicts))

"""Shapes of radius 1 by signed distance: negative inside, positive outside; y grows downwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeAlias

import torch

Distance: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_HEART: Final = 1.62
"""Unit of the heart's formula, in radii."""


def _circle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _from(x, y, 0, 0) - 0.95


def _square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.84


def _triangle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(0.894 * x.abs() - 0.447 * y - 0.44, y - 0.80)


def _star(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A five-pointed star, measured from the edge of the nearest point."""
    half = math.pi / 5
    angle = torch.atan2(x, -y)
    radius = (x * x + y * y).sqrt()
    folded = (torch.remainder(angle + half, 2 * half) - half).abs()
    px, py = radius * torch.sin(folded), radius * torch.cos(folded)
    ex, ey = 0.46 * math.sin(half), 0.46 * math.cos(half) - 1.12
    return (-(px * ey - (py - 1.12) * ex)) / math.hypot(ex, ey)


def _heart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A square on its tip, with half a disc on each upper side."""
    x, y = x.abs() / _HEART, (0.88 - y) / _HEART
    lobe = ((x - 0.25) ** 2 + (y - 0.75) ** 2).sqrt() - math.sqrt(2) / 4
    dent = (x * x + (y - 1) ** 2).sqrt()
    along = ((x + y) / 2).clamp(min=0)
    edge = ((x - along) ** 2 + (y - along) ** 2).sqrt()
    below = torch.minimum(dent, edge) * torch.sign(x - y)
    return torch.where(x + y > 1, lobe, below) * _HEART


def _cross(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.minimum(_box(x, y, 0, 0, 0.95, 0.34), _box(x, y, 0, 0, 0.34, 0.95))


def _rectangle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _box(x, y, 0, 0, 0.98, 0.52)


def _hexagon(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(0.866 * x.abs() + 0.5 * y.abs(), y.abs()) - 0.82


def _ring(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (_from(x, y, 0, 0) - 0.73).abs() - 0.22


def _moon(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A disc without the disc that covers its right."""
    return torch.maximum(_from(x, y, 0, 0) - 0.95, 0.80 - _from(x, y, 0.50, -0.12))


def _cat(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A cat's head: a wide disc with two ears and two eyes."""
    x = x.abs()
    head = _from(x / 1.15, y, 0, 0.22) - 0.68
    ear = torch.maximum(torch.maximum(x - 0.74, 0.7 * x - 0.71 * y - 1.2), y - 0.2)
    ear = torch.maximum(ear, 0.15 - x - 0.4 * (y + 0.4))
    eye = 0.12 - _from(x, y, 0.30, 0.12)
    return torch.maximum(torch.minimum(head, ear), eye)


def _shoe(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A shoe from the side: shaft, toe and sole."""
    shaft = _box(x, y, -0.55, -0.05, 0.38, 0.60)
    toe = torch.maximum(_from(x, y * 1.5, 0.12, 0.60) - 0.80, y - 0.5)
    return torch.minimum(torch.minimum(shaft, toe), _box(x, y, 0, 0.55, 0.95, 0.14))


def _cup(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A cup that narrows downwards, with a handle on its right."""
    inner = torch.maximum((x + 0.22).abs() + 0.16 * y - 0.60, y.abs() - 0.72)
    handle = torch.maximum((_from(x, y, 0.40, -0.10) - 0.40).abs() - 0.11, 0.2 - x)
    return torch.minimum(inner, handle)


def _from(x: torch.Tensor, y: torch.Tensor, left: float, top: float) -> torch.Tensor:
    return ((x - left) ** 2 + (y - top) ** 2).sqrt()


def _box(
    x: torch.Tensor, y: torch.Tensor, left: float, top: float, width: float, height: float
) -> torch.Tensor:
    return torch.maximum((x - left).abs() - width, (y - top).abs() - height)


DISTANCES: Final[dict[str, Distance]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "cross": _cross,
    "rectangle": _rectangle,
    "hexagon": _hexagon,
    "ring": _ring,
    "moon": _moon,
    "cat": _cat,
    "shoe": _shoe,
    "cup": _cup,
}

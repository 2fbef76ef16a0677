"""Three small networks: one hears what a mouth does, one finds it, one moves and paints it.

All work at fixed scales (rows a hundredth of a second apart, squares of 96 and of 64 pixels), so
that portraits of any size are rows of one batch. Weights are read as data only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

ARCHITECTURE: Final = "tollgate-talking-1"
WEIGHTS: Final = "model.safetensors"
BANDS: Final = 40
SHAPES: Final = 4
"""Of a mouth: opening, width (-1 rounded, 1 spread), teeth, tongue."""
POINTS: Final = 5
"""Corners of the mouth, chin, eyes; left is left in the picture."""
FINDER_SIDE: Final = 96
PAINTER_SIDE: Final = 64
_HEAR: Final = 64
_REACH: Final = 0.3
"""The farthest that a pixel comes from, of half of the square."""


class MouthPredictor(nn.Module):
    """Loudness of bands ``(B, 40, T)``, a row each hundredth of a second, to mouths ``(B, 4, T)``.

    It hears 0.3 seconds back and ahead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(BANDS, _HEAR, 5, padding=2)
        self.layers = nn.ModuleList(
            nn.Conv1d(_HEAR, _HEAR, 5, padding=2 * wide, dilation=wide) for wide in (1, 2, 4, 8)
        )
        self.last = nn.Conv1d(_HEAR, SHAPES, 1)

    def forward(self, bands: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.first(bands))
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        said = self.last(hidden)
        opening, width, rest = said[:, :1], said[:, 1:2], said[:, 2:]
        return torch.cat([opening.sigmoid(), width.tanh(), rest.sigmoid()], dim=1)


class LandmarkDetector(nn.Module):
    """Pictures ``(B, 3, 96, 96)`` from 0 to 1 to maps ``(B, 5, 24, 24)``, whose peaks are points of
    a face, and whether there is a mouth ``(B,)``, as a logit."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.SiLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.SiLU(),
        )
        self.coarse = nn.Sequential(
            nn.Conv2d(32, 48, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(48, 56, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(56, 56, 3, padding=2, dilation=2),
            nn.SiLU(),
            nn.Conv2d(56, 56, 3, padding=1),
            nn.SiLU(),
        )
        self.joined = nn.Sequential(nn.Conv2d(88, 32, 3, padding=1), nn.SiLU())
        self.map = nn.Conv2d(32, POINTS, 3, padding=1)
        self.there = nn.Linear(56 + POINTS, 1)

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fine = self.fine(pictures * 2 - 1)
        coarse = self.coarse(fine)
        wide = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        maps = self.map(self.joined(torch.cat([fine, wide], dim=1)))
        seen = torch.cat([coarse.mean((2, 3)), maps.amax((2, 3)) - maps.mean((2, 3))], dim=1)
        return maps, self.there(seen)[:, 0]

    @staticmethod
    def places(maps: torch.Tensor) -> torch.Tensor:
        """Where the peaks are, to a part of a cell: ``(B, 5, 2)``, x and y from -1 to 1."""
        count, points, high, wide = maps.shape
        best = maps.flatten(2).argmax(2)
        line = (torch.arange(wide, device=maps.device) + 0.5) * 2 / wide - 1
        row, column = best // wide, best % wide
        cells = torch.arange(wide, device=maps.device)
        near_y = ((cells[None, None] - row[..., None]).abs() <= 2)[..., :, None]
        near_x = ((cells[None, None] - column[..., None]).abs() <= 2)[..., None, :]
        weights = maps.masked_fill(~(near_y & near_x), -torch.inf).flatten(2).softmax(2)
        weights = weights.view(count, points, high, wide)
        x = (weights.sum(2) * line).sum(2)
        y = (weights.sum(3) * line).sum(2)
        return torch.stack([x, y], dim=2)


class MouthRenderer(nn.Module):
    """Mouths ``(B, 3, 64, 64)`` from 0 to 1, as they are and how they shall be ``(B, 4)``, to how
    each is moved and what is painted over it: see ``Stroke``."""

    def __init__(self) -> None:
        super().__init__()
        self.in1 = nn.Conv2d(3, 16, 3, padding=1)
        self.in2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.in3 = nn.Conv2d(32, 48, 3, stride=2, padding=1)
        self.in4 = nn.Conv2d(48, 64, 3, stride=2, padding=1)
        self.told = nn.Sequential(nn.Linear(SHAPES, 32), nn.SiLU(), nn.Linear(32, 2 * 176))
        self.middle = nn.Conv2d(64, 64, 3, padding=1)
        self.out3 = nn.Conv2d(64 + 48, 48, 3, padding=1)
        self.out2 = nn.Conv2d(48 + 32, 40, 3, padding=1)
        self.out1 = nn.Conv2d(40 + 16, 24, 3, padding=1)
        self.last = nn.Conv2d(24, 6, 3, padding=1)
        line = (torch.arange(PAINTER_SIDE) + 0.5) * 2 / PAINTER_SIDE - 1
        fade = ((1 - line.abs()) / 0.15).clamp(0, 1)
        fade = fade * fade * (3 - 2 * fade)
        self.window: torch.Tensor
        # Nothing moves at the edge, so that nobody sees where the square was.
        self.register_buffer("window", fade[:, None] * fade[None, :], persistent=False)

    def look(self, mouths: torch.Tensor) -> list[torch.Tensor]:
        """What does not depend on how a mouth shall be: once for each portrait."""
        found = [F.silu(self.in1(mouths * 2 - 1))]
        for layer in (self.in2, self.in3, self.in4):
            found.append(F.silu(layer(found[-1])))
        return found

    def forward(self, seen: list[torch.Tensor], shapes: torch.Tensor) -> Stroke:
        told = self.told(shapes)[:, :, None, None]
        scale, shift = told.chunk(2, dim=1)
        place = 0

        def tell(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal place
            part = slice(place, place + hidden.shape[1])
            place += hidden.shape[1]
            return F.silu(hidden * (1 + scale[:, part]) + shift[:, part])

        hidden = tell(self.middle(seen[3]))
        for layer, other in ((self.out3, seen[2]), (self.out2, seen[1]), (self.out1, seen[0])):
            hidden = F.interpolate(hidden, scale_factor=2, mode="bilinear", align_corners=False)
            hidden = tell(layer(torch.cat([hidden, other], dim=1)))
        drawn = self.last(hidden)
        return Stroke(
            drawn[:, :2].tanh() * _REACH * self.window,
            drawn[:, 2:3].sigmoid() * self.window,
            drawn[:, 3:].sigmoid(),
        )


@dataclass(frozen=True, slots=True)
class Stroke:
    """``flow`` ``(B, 2, H, W)``: how far from each place its pixel comes, x and y, in halves of the
    square; ``cover`` ``(B, 1, H, W)``: how much ``paint`` ``(B, 3, H, W)`` hides it."""

    flow: torch.Tensor
    cover: torch.Tensor
    paint: torch.Tensor


@dataclass(frozen=True, slots=True)
class Square:
    """Where a mouth is worked on: ``centre`` ``(B, 2)``, ``half`` its half side and ``turn`` its
    angle, ``(B,)``, in whatever unit the points were."""

    centre: torch.Tensor
    half: torch.Tensor
    turn: torch.Tensor

    def places(self, side: int) -> torch.Tensor:
        """Centres of its pixels: ``(B, side, side, 2)``."""
        line = (torch.arange(side, device=self.half.device) + 0.5) * 2 / side - 1
        v, u = torch.meshgrid(line, line, indexing="ij")
        return self.at(torch.stack([u, v], dim=2)[None])

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """Take ``(B, H, W, 2)`` from -1 to 1 within the square to where that is outside."""
        cos, sin = (f(self.turn)[:, None, None] for f in (torch.cos, torch.sin))
        u, v = places[..., 0], places[..., 1]
        turned = torch.stack([cos * u - sin * v, sin * u + cos * v], dim=3)
        return turned * self.half[:, None, None, None] + self.centre[:, None, None]


def mouth_square(points: torch.Tensor) -> Square:
    """Around mouth and chin, upright as the mouth is. ``points`` is ``(B, 5, 2)``."""
    left, right, chin = points[:, 0], points[:, 1], points[:, 2]
    across = right - left
    turn = torch.atan2(across[:, 1], across[:, 0])
    middle = (left + right) / 2
    half_mouth = across.norm(dim=1) / 2
    to_chin = (chin - middle).norm(dim=1)
    down = torch.stack([-torch.sin(turn), torch.cos(turn)], dim=1)
    return Square(
        middle + 0.25 * to_chin[:, None] * down,
        torch.maximum(1.5 * half_mouth, 1.15 * to_chin),
        turn,
    )


@dataclass(frozen=True, slots=True)
class Networks:
    ear: MouthPredictor
    finder: LandmarkDetector
    painter: MouthRenderer

    @property
    def module(self) -> nn.Module:
        return nn.ModuleDict({"ear": self.ear, "finder": self.finder, "painter": self.painter})

    def save(self, path: Path) -> None:
        """Leave the weights in a directory, in half precision, which changes no frame visibly."""
        path.mkdir(parents=True, exist_ok=True)
        weights = {name: one.half().contiguous() for name, one in self.module.state_dict().items()}
        save_file(weights, path / WEIGHTS)
        (path / "config.json").write_text(json.dumps({"architecture": ARCHITECTURE}) + "\n")


def fresh() -> Networks:
    return Networks(MouthPredictor(), LandmarkDetector(), MouthRenderer())


def read_networks(path: Path) -> Networks:
    """Raise ``ValueError`` if the directory holds no such networks."""
    found = fresh()
    try:
        architecture = json.loads((path / "config.json").read_text()).get("architecture")
        if architecture != ARCHITECTURE:
            raise ValueError(f"its architecture is {architecture!r}, not {ARCHITECTURE!r}")
        weights = load_file(path / WEIGHTS)
        found.module.load_state_dict({name: one.float() for name, one in weights.items()})
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    found.module.eval().requires_grad_(False)
    return found

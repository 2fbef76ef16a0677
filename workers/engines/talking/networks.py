"""Three small networks: predict mouth shapes from audio, find the mouth, and render it.

All work at fixed scales (a row every 10 ms, squares of 96 and of 64 pixels), so that portraits of
any size can share a batch. Weights are read as data only.
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
"""Parameters of a mouth shape: opening, width (-1 rounded, 1 spread), teeth, tongue."""
POINTS: Final = 5
"""Landmarks: corners of the mouth, chin, eyes; left is left in the image."""
DETECTOR_SIDE: Final = 96
RENDERER_SIDE: Final = 64
_WIDTH: Final = 64
_FLOW_MAX: Final = 0.3
"""Maximum displacement of a pixel, in half sides of the square."""


class MouthPredictor(nn.Module):
    """Maps band loudness ``(B, 40, T)``, a row every 10 ms, to mouth shapes ``(B, 4, T)``.

    Its receptive field is 0.3 seconds in both directions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(BANDS, _WIDTH, 5, padding=2)
        self.layers = nn.ModuleList(
            nn.Conv1d(_WIDTH, _WIDTH, 5, padding=2 * wide, dilation=wide) for wide in (1, 2, 4, 8)
        )
        self.last = nn.Conv1d(_WIDTH, SHAPES, 1)

    def forward(self, bands: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.first(bands))
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        raw = self.last(hidden)
        opening, width, rest = raw[:, :1], raw[:, 1:2], raw[:, 2:]
        return torch.cat([opening.sigmoid(), width.tanh(), rest.sigmoid()], dim=1)


class LandmarkDetector(nn.Module):
    """Maps images ``(B, 3, 96, 96)`` from 0 to 1 to heat maps ``(B, 5, 24, 24)``, whose peaks are
    the landmarks of a face, and to the logit of a mouth being present ``(B,)``."""

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

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fine = self.fine(images * 2 - 1)
        coarse = self.coarse(fine)
        wide = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        maps = self.map(self.joined(torch.cat([fine, wide], dim=1)))
        features = torch.cat([coarse.mean((2, 3)), maps.amax((2, 3)) - maps.mean((2, 3))], dim=1)
        return maps, self.there(features)[:, 0]

    @staticmethod
    def peaks(maps: torch.Tensor) -> torch.Tensor:
        """Locate the peaks with subcell precision: ``(B, 5, 2)``, x and y from -1 to 1."""
        count, points, high, wide = maps.shape
        best = maps.flatten(2).argmax(2)
        axis = (torch.arange(wide, device=maps.device) + 0.5) * 2 / wide - 1
        row, column = best // wide, best % wide
        cells = torch.arange(wide, device=maps.device)
        near_y = ((cells[None, None] - row[..., None]).abs() <= 2)[..., :, None]
        near_x = ((cells[None, None] - column[..., None]).abs() <= 2)[..., None, :]
        weights = maps.masked_fill(~(near_y & near_x), -torch.inf).flatten(2).softmax(2)
        weights = weights.view(count, points, high, wide)
        x = (weights.sum(2) * axis).sum(2)
        y = (weights.sum(3) * axis).sum(2)
        return torch.stack([x, y], dim=2)


class MouthRenderer(nn.Module):
    """Maps mouth images ``(B, 3, 64, 64)`` from 0 to 1 and target shapes ``(B, 4)`` to a
    ``MouthPatch``: how pixels are moved, and what is painted over them."""

    def __init__(self) -> None:
        super().__init__()
        self.in1 = nn.Conv2d(3, 16, 3, padding=1)
        self.in2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.in3 = nn.Conv2d(32, 48, 3, stride=2, padding=1)
        self.in4 = nn.Conv2d(48, 64, 3, stride=2, padding=1)
        # Attribute names are those of the weights in a checkpoint.
        self.told = nn.Sequential(nn.Linear(SHAPES, 32), nn.SiLU(), nn.Linear(32, 2 * 176))
        self.middle = nn.Conv2d(64, 64, 3, padding=1)
        self.out3 = nn.Conv2d(64 + 48, 48, 3, padding=1)
        self.out2 = nn.Conv2d(48 + 32, 40, 3, padding=1)
        self.out1 = nn.Conv2d(40 + 16, 24, 3, padding=1)
        self.last = nn.Conv2d(24, 6, 3, padding=1)
        axis = (torch.arange(RENDERER_SIDE) + 0.5) * 2 / RENDERER_SIDE - 1
        fade = ((1 - axis.abs()) / 0.15).clamp(0, 1)
        fade = fade * fade * (3 - 2 * fade)
        self.window: torch.Tensor
        # Nothing changes at the edge, so that the square leaves no visible border.
        self.register_buffer("window", fade[:, None] * fade[None, :], persistent=False)

    def encode(self, mouths: torch.Tensor) -> list[torch.Tensor]:
        """Compute the features that do not depend on the shape; once per portrait."""
        networks = [F.silu(self.in1(mouths * 2 - 1))]
        for layer in (self.in2, self.in3, self.in4):
            networks.append(F.silu(layer(networks[-1])))
        return networks

    def forward(self, features: list[torch.Tensor], shapes: torch.Tensor) -> MouthPatch:
        modulation = self.told(shapes)[:, :, None, None]
        scale, shift = modulation.chunk(2, dim=1)
        channel = 0

        def modulate(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal channel
            part = slice(channel, channel + hidden.shape[1])
            channel += hidden.shape[1]
            return F.silu(hidden * (1 + scale[:, part]) + shift[:, part])

        hidden = modulate(self.middle(features[3]))
        for layer, skip in (
            (self.out3, features[2]),
            (self.out2, features[1]),
            (self.out1, features[0]),
        ):
            hidden = F.interpolate(hidden, scale_factor=2, mode="bilinear", align_corners=False)
            hidden = modulate(layer(torch.cat([hidden, skip], dim=1)))
        raw = self.last(hidden)
        return MouthPatch(
            raw[:, :2].tanh() * _FLOW_MAX * self.window,
            raw[:, 2:3].sigmoid() * self.window,
            raw[:, 3:].sigmoid(),
        )


@dataclass(frozen=True, slots=True)
class MouthPatch:
    """A change of the mouth square.

    ``flow`` ``(B, 2, H, W)``: offset x and y of each pixel's source, in half sides; ``cover``
    ``(B, 1, H, W)``: opacity of ``paint`` ``(B, 3, H, W)`` over it.
    """

    flow: torch.Tensor
    cover: torch.Tensor
    paint: torch.Tensor


@dataclass(frozen=True, slots=True)
class Square:
    """Squares around mouths: ``centre`` ``(B, 2)``, ``half`` side ``(B,)`` and ``turn``, the angle,
    ``(B,)``; lengths are in the unit of the landmarks."""

    centre: torch.Tensor
    half: torch.Tensor
    turn: torch.Tensor

    def pixel_centres(self, side: int) -> torch.Tensor:
        """Return the centres of ``side`` by ``side`` pixels: ``(B, side, side, 2)``."""
        axis = (torch.arange(side, device=self.half.device) + 0.5) * 2 / side - 1
        v, u = torch.meshgrid(axis, axis, indexing="ij")
        return self.to_image(torch.stack([u, v], dim=2)[None])

    def to_image(self, positions: torch.Tensor) -> torch.Tensor:
        """Map positions ``(B, H, W, 2)`` from -1 to 1 in the square to image coordinates."""
        cos, sin = (f(self.turn)[:, None, None] for f in (torch.cos, torch.sin))
        u, v = positions[..., 0], positions[..., 1]
        turned = torch.stack([cos * u - sin * v, sin * u + cos * v], dim=3)
        return turned * self.half[:, None, None, None] + self.centre[:, None, None]


def mouth_square(points: torch.Tensor) -> Square:
    """Return the square around mouth and chin, rotated with the mouth; points ``(B, 5, 2)``."""
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
    mouth_predictor: MouthPredictor
    landmark_detector: LandmarkDetector
    mouth_renderer: MouthRenderer

    @property
    def module(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "ear": self.mouth_predictor,
                "finder": self.landmark_detector,
                "painter": self.mouth_renderer,
            }
        )

    def save(self, path: Path) -> None:
        """Save the weights in half precision, which has no visible effect on frames."""
        path.mkdir(parents=True, exist_ok=True)
        weights = {name: one.half().contiguous() for name, one in self.module.state_dict().items()}
        save_file(weights, path / WEIGHTS)
        (path / "config.json").write_text(json.dumps({"architecture": ARCHITECTURE}) + "\n")


def create_networks() -> Networks:
    return Networks(MouthPredictor(), LandmarkDetector(), MouthRenderer())


def check_architecture(path: Path) -> None:
    """Raise ``ValueError`` if a directory is not for these networks."""
    try:
        architecture = json.loads((path / "config.json").read_text()).get("architecture")
        if architecture != ARCHITECTURE:
            raise ValueError(f"its architecture is {architecture!r}, not {ARCHITECTURE!r}")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_networks(path: Path) -> Networks:
    """Load the networks. Raise ``ValueError`` if the directory does not contain them."""
    check_architecture(path)
    networks = create_networks()
    try:
        weights = load_file(path / WEIGHTS)
        networks.module.load_state_dict({name: one.float() for name, one in weights.items()})
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    networks.module.eval().requires_grad_(False)
    return networks

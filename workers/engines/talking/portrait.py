"""A portrait: where its mouth is, and its frames with the mouth as it shall be.

Only what lies in the square around mouth and chin is ever touched; every other pixel of a frame is
the portrait's own.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import torch.nn.functional as F

from workers.engines.talking.networks import (
    FINDER_SIDE,
    PAINTER_SIDE,
    LandmarkDetector,
    MouthRenderer,
    Square,
    Stroke,
    mouth_square,
)
from workers.media.pixels import Pixels

_SURE: Final = 0.0
"""Sum of the logits of two looks, from which on there is a mouth."""
_WINDOWS: Final = ((0.5, (0.5,)), (0.3, (0.3, 0.5, 0.7)))
"""Where it is looked for: half sides and middles, as parts of the picture's longer side."""
_ROOM: Final = 1.35
"""Half of a face in its square, when looked at again, of half of that."""
_LOOKS: Final = 2
_MOUTH_MIN: Final = 6.0
"""Pixels from corner to corner."""
_SPREAD: Final = (0.1, 0.9)
"""Width of a mouth, of the distance from eyes to chin: what is beyond is no face."""


class PortraitError(ValueError):
    """Why a portrait cannot speak, as a sentence for the client."""


def find(finder: LandmarkDetector, picture: torch.Tensor) -> torch.Tensor:
    """Find the points of a face, ``(5, 2)`` in pixels, in ``(3, H, W)`` from 0 to 1.

    Raise ``PortraitError``.
    """
    points, sure = _look(finder, picture, _windows(picture))
    best = int(sure.argmax())
    looks = [(points[best], float(sure[best]))]
    for _ in range(_LOOKS):
        again, surer = _look(finder, picture, _around(looks[-1][0]))
        looks.append((again[0], float(surer[0])))
    # The first look has the whole picture to go by, the others see more of the face.
    found, closer = max(looks[1:], key=lambda one: one[1])
    if looks[0][1] > closer:
        found = looks[0][0]
    if looks[0][1] + closer < _SURE or not _is_face(found):
        raise PortraitError(
            "No mouth was found in the portrait. One face is needed, seen from the front, with its "
            "mouth in view and at least a quarter of the picture high."
        )
    if float((found[1] - found[0]).norm()) < _MOUTH_MIN:
        raise PortraitError("The portrait is too small: its mouth is only a few pixels wide.")
    return found


def cut(picture: torch.Tensor, square: Square, side: int) -> torch.Tensor:
    """Squares out of ``(3, H, W)``, as ``(B, 3, side, side)``; beyond the edge it goes on."""
    shrink = float(square.half.max()) * 2 / side
    high, wide = picture.shape[1:]
    if (
        shrink > 1.5
    ):  # what is sampled at fewer places than it has pixels must be made smaller first
        size = (max(1, round(high / shrink)), max(1, round(wide / shrink)))
        small = F.interpolate(picture[None], size=size, mode="bilinear", antialias=True)[0]
    else:
        small = picture
    places = square.places(side) * 2 / torch.tensor([wide, high], device=picture.device) - 1
    return F.grid_sample(
        small[None].expand(len(places), -1, -1, -1),
        places,
        padding_mode="border",
        align_corners=False,
    )


class Portrait:
    """One portrait, looked at once; its frames are drawn from strokes."""

    def __init__(self, pixels: Pixels, finder: LandmarkDetector, painter: MouthRenderer) -> None:
        """``pixels`` is ``(H, W, 3)``. Raise ``PortraitError``."""
        device = next(finder.parameters()).device
        self.pixels = pixels
        picture = torch.from_numpy(pixels.copy()).to(device)
        self._picture = picture.permute(2, 0, 1).float() / 255
        with torch.inference_mode():
            self.points = find(finder, self._picture)
            self._square = mouth_square(self.points[None])
            self.seen = painter.look(cut(self._picture, self._square, PAINTER_SIDE))
            self._cut_out()

    def frames(self, stroke: Stroke) -> list[Pixels]:
        """The portrait after each stroke."""
        count = len(stroke.flow)
        moved = torch.cat([stroke.flow, stroke.cover, stroke.paint], dim=1)
        shown = F.grid_sample(
            moved, self._inner.expand(count, -1, -1, -1), mode="bicubic", align_corners=False
        )
        inside = self._inside
        flow, cover = shown[:, :2] * inside, shown[:, 2:3].clamp(0, 1) * inside
        places = self._square.at(self._inner + flow.permute(0, 2, 3, 1))
        high, wide = self._picture.shape[1:]
        places = places * 2 / torch.tensor([wide, high], device=places.device) - 1
        picture = self._picture[None].expand(count, -1, -1, -1)
        warped = F.grid_sample(picture, places, padding_mode="border", align_corners=False)
        drawn = warped * (1 - cover) + shown[:, 3:].clamp(0, 1) * cover
        patches = (drawn * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
        found = []
        for patch in patches:
            frame = self.pixels.copy()
            frame[
                self._top : self._top + patch.shape[0], self._left : self._left + patch.shape[1]
            ] = patch
            found.append(frame)
        return found

    def _cut_out(self) -> None:
        """Find the pixels around the square, and where in it each of them is."""
        high, wide = self._picture.shape[1:]
        square = self._square
        reach = float(square.half[0]) * (
            abs(np.sin(float(square.turn[0]))) + abs(np.cos(float(square.turn[0])))
        )
        x, y = (float(one) for one in square.centre[0])
        self._left, self._top = max(0, int(x - reach)), max(0, int(y - reach))
        right, bottom = min(wide, int(x + reach) + 2), min(high, int(y + reach) + 2)
        device = self._picture.device
        row = torch.arange(self._top, bottom, device=device) + 0.5
        column = torch.arange(self._left, right, device=device) + 0.5
        py, px = torch.meshgrid(row, column, indexing="ij")
        dx, dy = (px - x) / square.half[0], (py - y) / square.half[0]
        cos, sin = torch.cos(square.turn[0]), torch.sin(square.turn[0])
        self._inner = torch.stack([cos * dx + sin * dy, cos * dy - sin * dx], dim=2)[None]
        self._inside = (self._inner.abs().amax(3) < 1).float()[:, None]


def _windows(picture: torch.Tensor) -> Square:
    high, wide = picture.shape[1:]
    longer = max(high, wide)
    # Of a picture that is not square, the longer side has the choice.
    found = {
        (_within(x, wide, longer * part), _within(y, high, longer * part), longer * part)
        for part, middles in _WINDOWS
        for y in middles
        for x in middles
    }
    table = torch.tensor(sorted(found), device=picture.device)
    return Square(table[:, :2], table[:, 2], torch.zeros(len(table), device=picture.device))


def _within(part: float, length: int, half: float) -> float:
    """The middle of a window, so that it lies within a side if it can."""
    if 2 * half >= length:
        return length / 2
    return min(max(part * length, half), length - half)


def _around(points: torch.Tensor) -> Square:
    """A square around a face, turned so that the face is upright."""
    left, right, chin, left_eye, right_eye = points
    eyes = (left_eye + right_eye) / 2
    half_face = (chin - eyes).norm() / 1.1
    across = (right - left) + (right_eye - left_eye)
    turn = torch.atan2(across[1], across[0])
    down = torch.stack([-torch.sin(turn), torch.cos(turn)])
    centre = eyes + 0.1 * half_face * down
    return Square(centre[None], (_ROOM * half_face)[None], turn[None])


def _look(
    finder: LandmarkDetector, picture: torch.Tensor, squares: Square
) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in pixels of the picture ``(B, 5, 2)``, and how sure a mouth is there ``(B,)``."""
    looked = torch.cat(
        [
            cut(
                picture,
                Square(squares.centre[i : i + 1], squares.half[i : i + 1], squares.turn[i : i + 1]),
                FINDER_SIDE,
            )
            for i in range(len(squares.half))
        ]
    )
    maps, sure = finder(looked)
    places = finder.places(maps)
    return squares.at(places[:, :, None])[:, :, 0], sure


def _is_face(points: torch.Tensor) -> bool:
    """Whether the points lie as those of a face do."""
    left, right, chin, left_eye, right_eye = points
    eyes, mouth = (left_eye + right_eye) / 2, (left + right) / 2
    height = (chin - eyes).norm()
    down = (chin - eyes) / height.clamp(min=1e-3)
    least, most = _SPREAD
    return bool(
        least * height < (right - left).norm() < most * height
        and ((mouth - eyes) * down).sum() > 0.25 * height
        and ((chin - mouth) * down).sum() > 0.08 * height
        and right[0] > left[0]
    )

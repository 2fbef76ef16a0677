"""A portrait: finds its mouth, and renders frames with the mouth in another shape.

Only pixels in the square around mouth and chin change; all others are those of the portrait.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import torch.nn.functional as F

from workers.engines.talking.networks import (
    DETECTOR_SIDE,
    RENDERER_SIDE,
    LandmarkDetector,
    MouthPatch,
    MouthRenderer,
    Square,
    mouth_square,
)
from workers.media.pixels import Pixels

_LOGIT_MIN: Final = 0.0
"""Minimum sum of the logits of two detections for a mouth to be accepted."""
_WINDOWS: Final = ((0.5, (0.5,)), (0.3, (0.3, 0.5, 0.7)))
"""Search windows: half sides and centres, as fractions of the image's longer side."""
_MARGIN: Final = 1.35
"""Half side of the square for a refined detection, in units of half the face."""
_REFINEMENTS: Final = 2
_MOUTH_MIN: Final = 6.0
"""Minimum width of a mouth, in pixels."""
_MOUTH_WIDTH: Final = (0.1, 0.9)
"""Accepted width of a mouth, as a fraction of the distance from eyes to chin."""


class PortraitError(ValueError):
    """No usable mouth in a portrait. The message is a sentence for the client."""


def find_landmarks(landmark_detector: LandmarkDetector, image: torch.Tensor) -> torch.Tensor:
    """Find the landmarks of a face, ``(5, 2)`` in pixels, in an image ``(3, H, W)`` from 0 to 1.

    Raise ``PortraitError`` if there is none, or its mouth is too small.
    """
    points, logits = _detect(landmark_detector, image, _windows(image))
    best = int(logits.argmax())
    detections = [(points[best], float(logits[best]))]
    for _ in range(_REFINEMENTS):
        refined, logit = _detect(landmark_detector, image, _face_square(detections[-1][0]))
        detections.append((refined[0], float(logit[0])))
    # The first detection sees more context, the refined ones see the face in more detail.
    landmarks, closer = max(detections[1:], key=lambda one: one[1])
    if detections[0][1] > closer:
        landmarks = detections[0][0]
    if detections[0][1] + closer < _LOGIT_MIN or not _is_face(landmarks):
        raise PortraitError(
            "No mouth was found in the portrait. It must show one face from the front, with a "
            "visible mouth, at least a quarter as high as the image."
        )
    if float((landmarks[1] - landmarks[0]).norm()) < _MOUTH_MIN:
        raise PortraitError("The portrait is too small: its mouth is only a few pixels wide.")
    return landmarks


def sample_squares(image: torch.Tensor, square: Square, side: int) -> torch.Tensor:
    """Resample squares of ``(3, H, W)`` to ``(B, 3, side, side)``; edge pixels are repeated."""
    shrink = float(square.half.max()) * 2 / side
    high, wide = image.shape[1:]
    if shrink > 1.5:  # sampling far fewer points than pixels would alias
        size = (max(1, round(high / shrink)), max(1, round(wide / shrink)))
        small = F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]
    else:
        small = image
    positions = square.pixel_centres(side) * 2 / torch.tensor([wide, high], device=image.device) - 1
    return F.grid_sample(
        small[None].expand(len(positions), -1, -1, -1),
        positions,
        padding_mode="border",
        align_corners=False,
    )


class Portrait:
    """One portrait, analysed once; frames are rendered from mouth patches."""

    def __init__(
        self, pixels: Pixels, landmark_detector: LandmarkDetector, mouth_renderer: MouthRenderer
    ) -> None:
        """``pixels`` is ``(H, W, 3)``. Raise ``PortraitError``."""
        device = next(landmark_detector.parameters()).device
        self.pixels = pixels
        image = torch.from_numpy(pixels.copy()).to(device)
        self._image = image.permute(2, 0, 1).float() / 255
        with torch.no_grad():
            self.points = find_landmarks(landmark_detector, self._image)
            self._square = mouth_square(self.points[None])
            self.features = mouth_renderer.encode(
                sample_squares(self._image, self._square, RENDERER_SIDE)
            )
            self._locate_square()

    def frames(self, patch: MouthPatch) -> list[Pixels]:
        """Apply each mouth patch to a copy of the portrait."""
        count = len(patch.flow)
        moved = torch.cat([patch.flow, patch.cover, patch.paint], dim=1)
        sampled = F.grid_sample(
            moved,
            self._positions_in_square.expand(count, -1, -1, -1),
            mode="bicubic",
            align_corners=False,
        )
        inside = self._inside
        flow, cover = sampled[:, :2] * inside, sampled[:, 2:3].clamp(0, 1) * inside
        positions = self._square.to_image(self._positions_in_square + flow.permute(0, 2, 3, 1))
        high, wide = self._image.shape[1:]
        positions = positions * 2 / torch.tensor([wide, high], device=positions.device) - 1
        image = self._image[None].expand(count, -1, -1, -1)
        warped = F.grid_sample(image, positions, padding_mode="border", align_corners=False)
        blended = warped * (1 - cover) + sampled[:, 3:].clamp(0, 1) * cover
        patches = (blended * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
        frames = []
        for mouth in patches:
            frame = self.pixels.copy()
            high, wide = mouth.shape[:2]
            frame[self._top : self._top + high, self._left : self._left + wide] = mouth
            frames.append(frame)
        return frames

    def _locate_square(self) -> None:
        """Find the pixels around the mouth square, and their positions within it."""
        high, wide = self._image.shape[1:]
        square = self._square
        reach = float(square.half[0]) * (
            abs(np.sin(float(square.turn[0]))) + abs(np.cos(float(square.turn[0])))
        )
        x, y = (float(one) for one in square.centre[0])
        self._left, self._top = max(0, int(x - reach)), max(0, int(y - reach))
        right, bottom = min(wide, int(x + reach) + 2), min(high, int(y + reach) + 2)
        device = self._image.device
        row = torch.arange(self._top, bottom, device=device) + 0.5
        column = torch.arange(self._left, right, device=device) + 0.5
        py, px = torch.meshgrid(row, column, indexing="ij")
        dx, dy = (px - x) / square.half[0], (py - y) / square.half[0]
        cos, sin = torch.cos(square.turn[0]), torch.sin(square.turn[0])
        self._positions_in_square = torch.stack([cos * dx + sin * dy, cos * dy - sin * dx], dim=2)[
            None
        ]
        self._inside = (self._positions_in_square.abs().amax(3) < 1).float()[:, None]


def _windows(image: torch.Tensor) -> Square:
    high, wide = image.shape[1:]
    longer = max(high, wide)
    # If the image is not square, windows coincide along the shorter side: the set removes those.
    landmarks = {
        (
            _clamp_centre(x, wide, longer * part),
            _clamp_centre(y, high, longer * part),
            longer * part,
        )
        for part, middles in _WINDOWS
        for y in middles
        for x in middles
    }
    table = torch.tensor(sorted(landmarks), device=image.device)
    return Square(table[:, :2], table[:, 2], torch.zeros(len(table), device=image.device))


def _clamp_centre(part: float, length: int, half: float) -> float:
    """Move a window's centre so that the window lies within the image, if it fits."""
    if 2 * half >= length:
        return length / 2
    return min(max(part * length, half), length - half)


def _face_square(points: torch.Tensor) -> Square:
    """Return a square around a face, rotated so that the face is upright."""
    left, right, chin, left_eye, right_eye = points
    eyes = (left_eye + right_eye) / 2
    half_face = (chin - eyes).norm() / 1.1
    across = (right - left) + (right_eye - left_eye)
    turn = torch.atan2(across[1], across[0])
    down = torch.stack([-torch.sin(turn), torch.cos(turn)])
    centre = eyes + 0.1 * half_face * down
    return Square(centre[None], (_MARGIN * half_face)[None], turn[None])


def _detect(
    landmark_detector: LandmarkDetector, image: torch.Tensor, squares: Square
) -> tuple[torch.Tensor, torch.Tensor]:
    """Detect landmarks: ``(B, 5, 2)`` in image pixels, and the logits of a mouth ``(B,)``."""
    crops = torch.cat(
        [
            sample_squares(
                image,
                Square(squares.centre[i : i + 1], squares.half[i : i + 1], squares.turn[i : i + 1]),
                DETECTOR_SIDE,
            )
            for i in range(len(squares.half))
        ]
    )
    maps, logits = landmark_detector(crops)
    positions = landmark_detector.peaks(maps)
    return squares.to_image(positions[:, :, None])[:, :, 0], logits


def _is_face(points: torch.Tensor) -> bool:
    """Whether the landmarks are arranged like those of a face."""
    left, right, chin, left_eye, right_eye = points
    eyes, mouth = (left_eye + right_eye) / 2, (left + right) / 2
    height = (chin - eyes).norm()
    down = (chin - eyes) / height.clamp(min=1e-3)
    least, most = _MOUTH_WIDTH
    return bool(
        least * height < (right - left).norm() < most * height
        and ((mouth - eyes) * down).sum() > 0.25 * height
        and ((chin - mouth) * down).sum() > 0.08 * height
        and right[0] > left[0]
    )

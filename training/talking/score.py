"""Scores ``pocket-talking`` on held-out voices and faces.

python -m training.talking.score --sheet docs/img/pocket-talking.png
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from training.common import scenes
from training.talking import faces
from training.talking.utterances import utter
from workers.engines.talking.mouth_shapes import loudness, predict_mouths
from workers.engines.talking.networks import MouthPredictor, Networks, read_networks
from workers.engines.talking.portrait import Portrait, PortraitError
from workers.media.pixels import Pixels

HELD_OUT: Final = 987_654
SIDE: Final = 192
_SCENES: Final = 48


@dataclass(frozen=True, slots=True)
class MouthScore:
    """``correlation`` with the truth of opening, width, teeth and tongue; ``silent`` is the 95th
    percentile of the opening during silence."""

    correlation: tuple[float, float, float, float]
    silent: float


def score_ear(ear: MouthPredictor, *, count: int = 24) -> MouthScore:
    r = np.random.default_rng(HELD_OUT)
    heard: list[npt.NDArray[np.float32]] = []
    truth: list[npt.NDArray[np.float32]] = []
    silent: list[npt.NDArray[np.bool_]] = []
    for _ in range(count):
        one = utter(r, seconds=5.12)
        rows = len(one.mouths)
        bands = loudness(one.samples)
        heard.append(predict_mouths(ear, bands, fps=Fraction(100), frames=rows))
        truth.append(one.mouths)
        silent.append(one.silent)
    said, meant, quiet = np.concatenate(heard), np.concatenate(truth), np.concatenate(silent)
    opening, width, teeth, tongue = (
        float(np.corrcoef(said[:, i], meant[:, i])[0, 1]) for i in range(4)
    )
    return MouthScore((opening, width, teeth, tongue), float(np.quantile(said[quiet, 0], 0.95)))


@dataclass(frozen=True, slots=True)
class FaceScore:
    """Scores of detection and rendering.

    ``missed`` and ``imagined`` are the fractions of portraits without and of other images with a
    detected face. ``off`` is the mean distance of a detected mouth corner, in pixels of ``SIDE``.
    ``painted`` is the error of rendered mouths relative to that of unchanged ones. ``follows`` is
    the correlation of the image's change with the requested opening.
    """

    missed: float
    imagined: float
    off: float
    painted: float
    follows: float


def score_eyes(networks: Networks, *, count: int = 48) -> FaceScore:
    g = torch.Generator().manual_seed(HELD_OUT)
    off, error, plain, follows, missed = [], [], [], [], 0
    for _ in range(count):
        people = faces.choose(g, 1, near=(0.4, 0.9))
        shut = torch.zeros(1, 4)
        points = (faces.points(people, shut)[0] + 1) * SIDE / 2
        try:
            portrait = Portrait(
                drawn(people, shut), networks.landmark_detector, networks.mouth_renderer
            )
        except PortraitError:
            missed += 1
            continue
        off.append(float((portrait.points[:2] - points[:2]).norm(dim=1).mean()))
        shapes = torch.rand(6, 4, generator=g)
        shapes[:, 1] = shapes[:, 1] * 2 - 1
        shapes[0] = 0
        frames = spoken(networks, portrait, shapes)
        true = [drawn(people, shape[None]) for shape in shapes]
        error.append(np.mean([_change(a, b) for a, b in zip(frames, true, strict=True)]))
        plain.append(np.mean([_change(portrait.pixels, b) for b in true]))
        changes = [_change(portrait.pixels, frame) for frame in frames]
        follows.append(float(np.corrcoef(changes, shapes[:, 0].numpy())[0, 1]))
    imagined = 0
    for seed in range(_SCENES):
        scene = scenes.draw([faceless(seed)], SIDE)[0]
        pixels = ((scene + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
        try:
            Portrait(pixels, networks.landmark_detector, networks.mouth_renderer)
            imagined += 1
        except PortraitError:
            continue
    return FaceScore(
        missed / count,
        imagined / _SCENES,
        float(np.mean(off)),
        float(np.sum(error) / np.sum(plain)),
        float(np.mean(follows)),
    )


def drawn(people: faces.Faces, shapes: torch.Tensor, *, side: int = SIDE) -> Pixels:
    """Render a portrait: ``(side, side, 3)``."""
    pictures, _ = faces.draw(people, shapes, faces.grid(1, side))
    return np.asarray((pictures[0] * 255).round().byte().permute(1, 2, 0).numpy())


def spoken(networks: Networks, portrait: Portrait, shapes: torch.Tensor) -> list[Pixels]:
    """Render a portrait with each of the mouth shapes ``(T, 4)``."""
    with torch.inference_mode():
        seen = [one.expand(len(shapes), -1, -1, -1) for one in portrait.features]
        return portrait.frames(networks.mouth_renderer(seen, shapes))


def faceless(seed: int) -> scenes.Scene:
    return scenes.scene(random.Random(HELD_OUT + seed), wide=True)


def sheet(networks: Networks, path: Path, *, rows: int = 6, columns: int = 9) -> None:
    """Save a page of talking heads: each portrait, and frames at 5 per second."""
    g = torch.Generator().manual_seed(HELD_OUT + 1)
    r = np.random.default_rng(HELD_OUT + 1)
    page: list[Pixels] = []
    while len(page) < rows * columns:
        people = faces.choose(g, 1, near=(0.6, 0.85))
        try:
            pixels = drawn(people, torch.zeros(1, 4))
            portrait = Portrait(pixels, networks.landmark_detector, networks.mouth_renderer)
        except PortraitError:
            continue
        bands = loudness(utter(r, seconds=1.6).samples)
        shapes = predict_mouths(
            networks.mouth_predictor, bands, fps=Fraction(5), frames=columns - 1
        )
        page += [portrait.pixels, *spoken(networks, portrait, torch.from_numpy(shapes))]
    pictures = torch.from_numpy(np.stack(page)).permute(0, 3, 1, 2) / 127.5 - 1
    laid = scenes.sheet(pictures, columns=columns).numpy()
    Image.fromarray(laid).resize((laid.shape[1] * 2 // 3, laid.shape[0] * 2 // 3)).save(
        path, optimize=True
    )


def _change(one: Pixels, other: Pixels) -> float:
    return float(np.abs(one.astype(np.int16) - other).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure pocket-talking.")
    parser.add_argument("--checkpoint", type=Path, default=Path("workers/pocket/talking"))
    parser.add_argument("--sheet", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    networks = read_networks(asked.checkpoint)
    print(score_ear(networks.mouth_predictor))
    print(score_eyes(networks))
    if asked.sheet:
        sheet(networks, asked.sheet)


if __name__ == "__main__":
    main()

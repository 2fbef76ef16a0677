"""Trains the networks of ``pocket-talking``: mouth predictor, landmark detector, mouth renderer.

    python -m training.talking.train --minutes 20 --out workers/pocket/talking

Speech comes from ``utterances``, faces from ``faces``; both have exact mouth shapes. ``score.py``
measures on held-out voices and faces.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F

from training.common import scenes
from training.common.loop import Mean, adam, clock, set_rate, step
from training.talking import faces
from training.talking.utterances import Utterance, utter
from workers.engines.talking import networks
from workers.engines.talking.mouth_shapes import loudness
from workers.engines.talking.networks import (
    DETECTOR_SIDE,
    RENDERER_SIDE,
    LandmarkDetector,
    MouthPredictor,
    MouthRenderer,
    Square,
    mouth_square,
)

PARTS: Final = {"ear": 0.2, "finder": 0.35, "painter": 0.45}
"""Fraction of the time for each network."""
_BATCH: Final = 16
_UTTERANCES: Final = 320
_PICTURES: Final = 768
_PAIRS: Final = 640
_FRESH: Final = 4
"""Number of samples in a pool that are replaced in every step."""
_MOUTHLESS: Final = 0.12
_FACELESS: Final = 0.22


def mouths(generator: torch.Generator, count: int, *, closed: float = 0.0) -> torch.Tensor:
    """Choose mouth shapes ``(B, 4)``; ``closed`` is the fraction that is closed and at rest."""
    shapes = torch.rand(count, 4, generator=generator)
    shapes[:, 1] = shapes[:, 1] * 2 - 1
    shut = torch.rand(count, generator=generator)
    shapes[shut < 0.15 + closed, 0] = 0.0
    shapes[shut < closed, 1] = 0.0
    return shapes


# --- Mouth predictor -----------------------------------------------------------------------------


def train_ear(ear: MouthPredictor, *, minutes: float, seed: int) -> None:
    r = np.random.default_rng(seed)
    pool = [_sample(utter(r)) for _ in range(_UTTERANCES)]
    optimizer = adam((ear.parameters(), 2e-3))
    mean, shown = Mean(list(ear.parameters()), keep=0.995), 0.0
    for turns, done in enumerate(clock(minutes), start=1):
        set_rate(optimizer, done)
        pool[int(r.integers(_UTTERANCES))] = _sample(utter(r))
        chosen = [pool[int(i)] for i in r.integers(_UTTERANCES, size=_BATCH)]
        bands, truth, silent = (torch.stack([one[i] for one in chosen]) for i in range(3))
        shapes = ear(bands)
        error = (shapes - truth).square()
        weight = 1 + 2 * silent
        # Width, teeth and tongue are visible only as far as the mouth is open.
        visible = truth[:, :1].clamp(min=0.1)
        loss = (3 * error[:, 0] * weight).mean() + (error[:, 1:] * visible).mean()
        step(optimizer, ear.parameters(), loss)
        mean.update()
        if done - shown > 0.1:
            shown = done
            found = torch.corrcoef(torch.stack([shapes[:, 0].flatten(), truth[:, 0].flatten()]))
            print(f"ear {done:.2f} step {turns} loss {loss:.4f} r {found[0, 1]:.3f}", flush=True)
    mean.swap()


def _sample(one: Utterance) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bands = loudness(one.samples)
    return bands, torch.from_numpy(one.mouths.T.copy()), torch.from_numpy(one.silent).float()


# --- Landmark detector ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FinderBatch:
    """Images ``(B, 3, 96, 96)``, landmarks ``(B, 5, 2)`` from -1 to 1, and whether they exist."""

    pictures: torch.Tensor
    points: torch.Tensor
    there: torch.Tensor


def draw_finder_batch(generator: torch.Generator, count: int) -> FinderBatch:
    """Render faces at any place and size, some without a mouth, and images without a face."""
    people = faces.choose(generator, count, near=(0.28, 1.0))
    shapes = mouths(generator, count, closed=0.4)
    chance = torch.rand(count, generator=generator)
    mouthless = (chance < _MOUTHLESS).float()
    places = faces.grid(count, DETECTOR_SIDE)
    drawn, _ = faces.draw(people, shapes, places, mouthless=mouthless[:, None, None])
    points = faces.points(people, shapes)
    inside = (points[:, :3].abs() < 0.97).flatten(1).all(1)
    there = inside & (mouthless == 0)
    faceless = (chance > 1 - _FACELESS).nonzero()[:, 0].tolist()
    for row in faceless:
        drawn[row] = _draw_faceless(generator)
        there[row] = False
    upside = ((chance > _MOUTHLESS) & (chance < _MOUTHLESS + 0.03)).nonzero()[:, 0]
    drawn[upside] = drawn[upside].flip(2)
    there[upside] = False
    return FinderBatch(_degrade(drawn, generator), points, there)


def _draw_faceless(generator: torch.Generator) -> torch.Tensor:
    seed = int(torch.randint(2**31, (1,), generator=generator))
    kind = seed % 4
    if kind < 2:
        scene = scenes.scene(random.Random(seed), wide=True)
        return (scenes.draw([scene], DETECTOR_SIDE)[0] + 1) / 2
    coarse = torch.rand(1, 3, 3 + seed % 20, 3 + seed % 20, generator=generator)
    mode = "bilinear" if kind == 2 else "nearest"
    return F.interpolate(coarse, size=DETECTOR_SIDE, mode=mode)[0]


def _degrade(pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Add a little noise to all images, and blur half of them."""
    count = len(pictures)
    soft = F.avg_pool2d(F.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    much = torch.rand(count, 1, 1, 1, generator=generator) * 2 - 1
    mixed = torch.lerp(pictures, soft, much.clamp(min=0))
    noise = torch.randn(pictures.shape, generator=generator)
    return (mixed + noise * 0.04 * torch.rand(count, 1, 1, 1, generator=generator)).clamp(0, 1)


def train_finder(finder: LandmarkDetector, *, minutes: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    finder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pool = draw_finder_batch(g, 128)
    while len(pool.there) < _PICTURES:
        more = draw_finder_batch(g, 128)
        pool = FinderBatch(*(torch.cat(pair) for pair in _pairs(pool, more)))
    optimizer = adam((finder.parameters(), 2e-3))
    mean, shown = Mean(list(finder.parameters()), keep=0.995), 0.0
    for turns, done in enumerate(clock(minutes), start=1):
        set_rate(optimizer, done)
        fresh = draw_finder_batch(g, _FRESH)
        rows = torch.randint(_PICTURES, (_FRESH,), generator=g)
        for old, new in _pairs(pool, fresh):
            old[rows] = new
        rows = torch.randint(_PICTURES, (2 * _BATCH,), generator=g)
        pictures = pool.pictures[rows].contiguous(memory_format=torch.channels_last)
        points, there = pool.points[rows], pool.there[rows]
        with torch.autocast("cpu", torch.bfloat16):
            maps, sure = finder(pictures)
        maps, sure = maps.float(), sure.float()
        loss = F.binary_cross_entropy_with_logits(sure, there.float())
        off = torch.zeros(1)
        if there.any():
            maps, wanted = maps[there], points[there]
            target = _bumps(wanted, maps.shape[-1])
            near = -(target * maps.flatten(2).log_softmax(2)).sum(2).mean()
            off = (finder.peaks(maps) - wanted).norm(dim=2)
            loss = loss + 0.5 * near + 4 * off.clamp(max=0.15).mean()
        step(optimizer, finder.parameters(), loss)
        mean.update()
        if done - shown > 0.1:
            shown = done
            right = ((sure > 0) == there).float().mean()
            pixels = off.mean() * DETECTOR_SIDE / 2
            print(
                f"finder {done:.2f} step {turns} loss {loss:.3f} right {right:.2f} "
                f"off {pixels:.2f} px",
                flush=True,
            )
    mean.swap()
    finder.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def _bumps(points: torch.Tensor, cells: int) -> torch.Tensor:
    """Return the target heat maps ``(B, 5, cells * cells)``, each of which sums to 1."""
    line = (torch.arange(cells) + 0.5) * 2 / cells - 1
    x = (line - points[..., :1]) * cells / 2
    y = (line - points[..., 1:]) * cells / 2
    far = y[..., :, None] ** 2 + x[..., None, :] ** 2
    return (-far / (2 * 0.7**2)).flatten(2).softmax(2)


def _pairs(one: FinderBatch, other: FinderBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for name in ("pictures", "points", "there"):
        yield getattr(one, name), getattr(other, name)


# --- Mouth renderer ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pairs:
    """Squares around mouths ``(B, 3, 64, 64)`` before and after; the shapes after ``(B, 4)``; the
    coverage by the inside of the mouth after ``(B, 1, 64, 64)``."""

    before: torch.Tensor
    after: torch.Tensor
    shapes: torch.Tensor
    inside: torch.Tensor


def draw_pairs(generator: torch.Generator, count: int, *, unsure: float = 0.03) -> Pairs:
    """Render faces with two mouth shapes each; ``unsure`` is the error of the landmarks."""
    people = faces.choose(generator, count, near=(0.5, 0.9))
    old, new = mouths(generator, count, closed=0.65), mouths(generator, count)
    shut = torch.rand(count, generator=generator) < 0.5
    old[:, 0] = torch.where(shut, old[:, 0] * 0.2, old[:, 0] * 0.6)
    points = faces.points(people, old)
    half = mouth_square(points).half[:, None, None]
    found = points + unsure * half * torch.randn(points.shape, generator=generator)
    square = mouth_square(found)
    size = 1 + 0.05 * torch.randn(count, generator=generator)
    places = Square(square.centre, square.half * size, square.turn).pixel_centres(RENDERER_SIDE)
    before, _ = faces.draw(people, old, places)
    after, inside = faces.draw(people, new, places)
    return Pairs(before, after, new, inside)


def painted(
    painter: MouthRenderer, before: torch.Tensor, shapes: torch.Tensor
) -> tuple[torch.Tensor, networks.MouthPatch]:
    """Apply a patch to images at the square's resolution; return the images and the patch."""
    stroke = painter(painter.encode(before), shapes)
    flow = stroke.flow.float().permute(0, 2, 3, 1)
    whole = faces.grid(len(before), before.shape[-1])
    warped = F.grid_sample(before, whole + flow, padding_mode="border", align_corners=False)
    return warped * (1 - stroke.cover) + stroke.paint * stroke.cover, stroke


def train_painter(painter: MouthRenderer, *, minutes: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    painter.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parts = [draw_pairs(g, 64) for _ in range(_PAIRS // 64)]
    pool = Pairs(*(torch.cat([getattr(one, name) for one in parts]) for name in _FIELDS))
    optimizer = adam((painter.parameters(), 2e-3))
    mean, shown = Mean(list(painter.parameters()), keep=0.995), 0.0
    for turns, done in enumerate(clock(minutes), start=1):
        set_rate(optimizer, done)
        fresh = draw_pairs(g, _FRESH)
        rows = torch.randint(_PAIRS, (_FRESH,), generator=g)
        for name in _FIELDS:
            getattr(pool, name)[rows] = getattr(fresh, name)
        rows = torch.randint(_PAIRS, (_BATCH,), generator=g)
        before, after, shapes, inside = (getattr(pool, name)[rows] for name in _FIELDS)
        with torch.autocast("cpu", torch.bfloat16):
            after_stroke, stroke = painted(
                painter, before.contiguous(memory_format=torch.channels_last), shapes
            )
        after_stroke, cover = after_stroke.float(), stroke.cover.float()
        # The changed part of the square is small, but the only visible one.
        weight = 1 + 6 * ((before - after).abs().amax(1, keepdim=True) * 4).clamp(max=1)
        error = ((after_stroke - after).abs() * weight).mean()
        hidden = F.binary_cross_entropy(cover.clamp(1e-4, 1 - 1e-4), inside, reduction="none")
        bent = (
            stroke.flow.float().diff(dim=2).abs().mean()
            + stroke.flow.float().diff(dim=3).abs().mean()
        )
        loss = error + 0.25 * (hidden * (1 + 3 * inside)).mean() + 0.5 * bent
        step(optimizer, painter.parameters(), loss)
        mean.update()
        if done - shown > 0.1:
            shown = done
            plain = ((before - after).abs() * weight).mean()
            print(
                f"painter {done:.2f} step {turns} error {error:.4f} of {plain:.4f} cover "
                f"{hidden.mean():.4f}",
                flush=True,
            )
    mean.swap()
    painter.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


_FIELDS: Final = ("before", "after", "shapes", "inside")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train pocket-talking.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("workers/pocket/talking"))
    parser.add_argument(
        "--only", choices=tuple(PARTS), help="train only this network, all the time"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    found = networks.create_networks()
    if asked.only and (asked.out / networks.WEIGHTS).exists():
        found = networks.read_networks(asked.out)
        found.module.requires_grad_(True).train()
    trainers = {
        "ear": lambda minutes: train_ear(found.mouth_predictor, minutes=minutes, seed=asked.seed),
        "finder": lambda minutes: train_finder(
            found.landmark_detector, minutes=minutes, seed=asked.seed
        ),
        "painter": lambda minutes: train_painter(
            found.mouth_renderer, minutes=minutes, seed=asked.seed
        ),
    }
    for name, part in PARTS.items():
        if asked.only in (None, name):
            trainers[name](asked.minutes if asked.only else asked.minutes * part)
            found.save(asked.out)


if __name__ == "__main__":
    main()

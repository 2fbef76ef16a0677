"""Scores the pocket video model, by the engine that serves it and an exact verifier.

    python -m training.video.score workers/pocket/video --count 200

Clips are on both sides of the split (``training.common.split``); for weights that are older,
``--older`` tells the sides apart. Half of them are from text only and half have their first frame.
A video is right if the named thing keeps its colour from the first frame to the last and moves in
the named direction (or grows, or shrinks), and everything else stays in its place.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from PIL import Image

from training.common.scenes import Scene, Thing, sheet
from training.common.split import choose, drawn
from training.common.verifier import SIDE, Piece, find_pieces
from training.image.score import SEED, SIDES, EngineInput, load, png, run
from training.video.clips import DIRECTIONS, FPS, FRAMES, Clip, clip, film
from workers.contract.jobs import Completed
from workers.engines.diffusion.engine import DiffusionEngine
from workers.media.decode import read_video

TASKS: Final = ("text-to-video", "image-to-video")
STEPS: Final = 8
GUIDANCE: Final = 1.5
"""Default of the catalog."""
MOVES: Final = 0.25
"""Minimum movement of a moving thing, in image coordinates from -1 to 1."""
STAYS: Final = 0.15
GROWS: Final = 1.25
"""Minimum ratio of a growing thing's pixel counts; its inverse for a shrinking one."""


def is_right(one: Clip, frames: torch.Tensor) -> bool:
    """Whether frames ``(T, 3, 64, 64)`` from -1 to 1 show what a clip asks for."""
    ends = [_named(frames[place], one.scene) for place in (0, -1)]
    if any(found is None for found in ends):
        return False
    before, after = (found for found in ends if found is not None)
    if len(before) > 1 and _far(before[1], after[1]) > STAYS:
        return False
    dx, dy = after[0].x - before[0].x, after[0].y - before[0].y
    if one.motion in DIRECTIONS:
        x, y = DIRECTIONS[one.motion]
        along, across = dx * x + dy * y, abs(dx * y) + abs(dy * x)
        return along >= MOVES and along > 2 * across
    if _far(before[0], after[0]) > STAYS:
        return False
    factor = after[0].pixels / before[0].pixels
    return factor >= GROWS if one.motion == "grows" else factor <= 1 / GROWS


def _far(one: Piece, other: Piece) -> float:
    return max(abs(one.x - other.x), abs(one.y - other.y))


def _named(picture: torch.Tensor, scene: Scene) -> list[Piece] | None:
    """Return the pieces of the scene's things, in order; None if one is missing."""
    left = list(find_pieces(picture, scene))
    found: list[Piece] = []
    for thing in scene.things:
        fitting = [piece for piece in left if piece.colour == thing.colour]
        if not fitting:
            return None
        found.append(max(fitting, key=lambda piece: _fit(piece, thing)))
        left.remove(found[-1])
    return found


def _fit(piece: Piece, thing: Thing) -> float:
    return piece.cover[thing.shape]


def frames_of(outcome: Completed) -> torch.Tensor:
    """Decode a video to ``(T, 3, H, W)`` from -1 to 1."""
    found = read_video(
        outcome.files[0].data, pixels_max=SIDE**2 * 64, frames_max=1000, seconds_max=60
    )
    return torch.from_numpy(found.frames.copy()).permute(0, 3, 1, 2) / 127.5 - 1


def input_of(one: Clip, seed: int, *, steps: int, guidance: float) -> EngineInput:
    asked = {
        "prompt": one.text,
        "seed": seed,
        "steps": steps,
        "guidance": guidance,
        "duration_ms": FRAMES * 1000 // FPS,
        "fps": FPS,
        "images": int(one.pictured),
    }
    if not one.pictured:
        return EngineInput("text-to-video", asked)
    return EngineInput("image-to-video", asked, (png(film([one], SIDE)[0, 0]),))


def score(
    engine: DiffusionEngine,
    count: int,
    *,
    pictured: bool,
    seed: int = SEED,
    held_out: bool | None = None,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
) -> tuple[float, list[tuple[Clip, torch.Tensor]]]:
    """Return the fraction that is right, and all clips with their frames.

    ``held_out`` chooses the side of the split; None takes clips as they come.
    """
    make = partial(clip, random.Random(seed), pictured=pictured, resting=0.0)
    clips = [make() if held_out is None else choose(make, held_out=held_out) for _ in range(count)]
    orders = [
        input_of(one, seed + place, steps=steps, guidance=guidance)
        for place, one in enumerate(clips)
    ]
    made = [frames_of(outcome) for outcome in run(engine, orders)]
    right = sum(is_right(one, frames) for one, frames in zip(clips, made, strict=True))
    return right / count, list(zip(clips, made, strict=True))


def contact_sheet(pairs: Sequence[tuple[Clip, torch.Tensor]], path: Path) -> None:
    """Save a page of clips, every third frame of each."""
    pictures = [frames[::3] for _, frames in pairs]
    Image.fromarray(sheet(torch.cat(pictures), 12).numpy()).save(path)


def _right_of(pairs: Sequence[tuple[Clip, torch.Tensor]]) -> str:
    right = sum(is_right(one, frames) for one, frames in pairs)
    return f"{right / max(1, len(pairs)):.3f} of {len(pairs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument(
        "--older", type=int, default=0, help="clips of each kind that older weights were trained on"
    )
    parser.add_argument("--sheets", type=Path, help="directory for contact sheets")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = load(options.path, *TASKS)
    for pictured in (False, True):
        score_ = partial(
            score,
            engine,
            options.count,
            pictured=pictured,
            steps=options.steps,
            guidance=options.guidance,
        )
        name = "first-frame" if pictured else "words"
        if options.older:
            seen = drawn(partial(clip, pictured=pictured), options.older)
            every = score_()[1]
            sides = [[pair for pair in every if (pair[0].content in seen) is it] for it in SIDES]
        else:
            sides = [score_(held_out=not side)[1] for side in SIDES]
        pairs = [pair for side in sides for pair in side]
        print(name, *(_right_of(side) for side in sides), sep="  ", flush=True)
        if options.sheets:
            options.sheets.mkdir(parents=True, exist_ok=True)
            contact_sheet(pairs[:16], options.sheets / f"video-{name}.png")


if __name__ == "__main__":
    main()

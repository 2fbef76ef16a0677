"""Scores the pocket image model, by the engine that serves it and an exact verifier.

    python -m training.image.score workers/pocket/image --count 500

Prompts and scenes come from a seed that training never uses. An image is right if it has everything
requested: things, colours, shapes, places, background, light and style. An edit is right if its
result is, and if everything that it did not mention is still in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from training.common import captions
from training.common.captions import Sample
from training.common.scenes import draw, sheet
from training.common.verifier import SIDE, Verdict, verify
from workers.contract.jobs import Completed, Job, RequestId
from workers.contract.models import ModelSpec
from workers.engines.diffusion.engine import DiffusionEngine
from workers.protocol.engine import Deferred, Phase, Wait

HELD_OUT: Final = 1_000_003
"""Seed of the prompts; training never uses it."""
SLOTS: Final = 16
TASKS: Final = (
    "text-to-image",
    "image-edit",
    "image-relight",
    "image-restyle",
    "image-blend",
)
KINDS: Final[dict[str, Callable[[random.Random], Sample]]] = {
    "text to image": captions.describe,
    "edit: colour": captions.recolour,
    "edit: shape": captions.reshape,
    "edit: size": captions.resize,
    "edit: remove": captions.remove,
    "edit: add": captions.add,
    "edit: background": captions.reground,
    "relight": captions.relight,
    "restyle": captions.restyle,
    "blend": captions.blend,
}
STAYS: Final = 0.15
"""Maximum apparent movement of a thing, in image coordinates from -1 to 1."""


class _Clock:
    @contextlib.contextmanager
    def phase(self, _: Phase) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class EngineInput:
    """A job for the engine: task, input and source images."""

    task: str
    asked: dict[str, Any]
    sources: tuple[bytes, ...] = ()


def load(path: Path, task: str = TASKS[0], *also: str, **options: Any) -> DiffusionEngine:
    spec = ModelSpec(
        "pocket",
        task,
        engine="diffusion",
        checkpoint=str(path),
        options={"slots": SLOTS, "threads": 1, **options},
        also=also,
    )
    engine = DiffusionEngine(spec)
    engine.load()
    return engine


def run(engine: DiffusionEngine, orders: Sequence[EngineInput]) -> list[Completed]:
    """Run all jobs on a loaded engine. Raise ``AssertionError`` if one fails."""
    clock = _Clock()
    waiting, open_, found = list(enumerate(orders)), 0, dict[str, Completed]()
    while waiting or open_:
        while waiting:
            number, order = waiting[0]
            job = Job(RequestId(str(number)), "score", "pocket", order.task, order.asked)
            admission = engine.admit(job, clock, order.sources)
            if isinstance(admission, Wait):
                break
            assert not hasattr(admission, "code"), admission
            waiting.pop(0)
            open_ += 1
        for name, reported in engine.step(clock).outcomes:
            engine.release(name)
            outcome = reported.make() if isinstance(reported, Deferred) else reported
            assert isinstance(outcome, Completed), outcome
            found[name] = outcome
            open_ -= 1
    return [found[str(number)] for number in range(len(orders))]


def input_of(sample: Sample, seed: int, **asked: Any) -> EngineInput:
    files = tuple(png(draw([source], SIDE)[0]) for source in sample.sources)
    given = {"prompt": sample.text, "seed": seed, "images": len(files), **asked}
    return EngineInput(sample.task, given, files)


def picture_of(outcome: Completed) -> torch.Tensor:
    return as_tensor(outcome.files[0].data)


def as_tensor(data: bytes) -> torch.Tensor:
    """Decode an image to ``(3, H, W)`` from -1 to 1."""
    pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1


def png(picture: torch.Tensor) -> bytes:
    out = io.BytesIO()
    pixels = ((picture + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def is_right(sample: Sample, picture: torch.Tensor) -> bool:
    """Whether an image is what a sample asks for, with everything else in its place."""
    free = sample.task in ("text-to-image", "image-blend")
    return verify(picture, sample.target, stays=None if free else STAYS).right


def verdict_of(sample: Sample, picture: torch.Tensor) -> Verdict:
    return verify(picture, sample.target)


def score(
    engine: DiffusionEngine, kind: str, count: int, *, seed: int = HELD_OUT, **asked: Any
) -> tuple[float, list[tuple[Sample, torch.Tensor]]]:
    """Return the fraction that is right, and all samples with their images."""
    r = random.Random(seed)
    samples = [KINDS[kind](r) for _ in range(count)]
    orders = [input_of(one, seed + place, **asked) for place, one in enumerate(samples)]
    drawn = [picture_of(outcome) for outcome in run(engine, orders)]
    right = sum(is_right(one, picture) for one, picture in zip(samples, drawn, strict=True))
    return right / count, list(zip(samples, drawn, strict=True))


def contact_sheet(
    pairs: Sequence[tuple[Sample, torch.Tensor]], path: Path, *, columns: int = 12
) -> None:
    """Save a page of the results, each after its sources."""
    pictures = []
    for sample, picture in pairs:
        pictures += [draw([source], SIDE)[0] for source in sample.sources]
        pictures.append(picture)
    Image.fromarray(sheet(torch.stack(pictures), columns).numpy()).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=500, help="number of text prompts")
    parser.add_argument("--edits", type=int, default=60, help="number of each kind of edit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--sheets", type=Path, help="directory for contact sheets")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = load(options.path, *TASKS)
    asked = {"steps": options.steps, "guidance": options.guidance}
    for kind in KINDS:
        count = options.count if kind == "text to image" else options.edits
        right, pairs = score(engine, kind, count, **asked)
        parts = [verdict_of(sample, picture) for sample, picture in pairs]
        names = ("background", "things", "colours", "shapes", "places")
        told = {name: f"{sum(getattr(v, name) for v in parts) / count:.3f}" for name in names}
        print(f"{kind:18} {right:.3f} of {count}  {told}", flush=True)
        if options.sheets:
            options.sheets.mkdir(parents=True, exist_ok=True)
            name = kind.replace(": ", "-").replace(" ", "-")
            contact_sheet(pairs[:48], options.sheets / f"{name}.png")


if __name__ == "__main__":
    main()

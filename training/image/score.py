"""Scores the pocket image model, by the engine that serves it and an exact verifier.

    python -m training.image.score workers/pocket/image --count 500

Scenes are on both sides of the split (``training.common.split``): training may have drawn them, or
never draws them, in whatever words they are asked for. For weights that are older than the split,
``--older`` tells the sides apart by drawing as many samples again.

An image is right if it has everything requested: things, colours, shapes, places, background, light
and style. An edit is right if its result is, and if everything that it did not mention is still in
its place.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from training.common import captions
from training.common.captions import Sample
from training.common.samples import WORLDS
from training.common.scenes import SHIPPED, World, draw, sheet
from training.common.split import choose, drawn
from training.common.verifier import SIDE, Verdict, verify
from training.common.wide_captions import add_beside, counted, inside, negated
from workers.contract.jobs import Completed, Job, RequestId
from workers.contract.models import ModelSpec
from workers.engines.diffusion.engine import DiffusionEngine
from workers.protocol.engine import Deferred, Phase, Wait

SEED: Final = 1_000_003
"""Seed of the prompts; training never uses it."""
SLOTS: Final = 16
TASKS: Final = (
    "text-to-image",
    "image-edit",
    "image-relight",
    "image-restyle",
    "image-blend",
)
KINDS: Final[dict[str, Callable[..., Sample]]] = {
    "text to image": captions.describe,
    "edit: colour": captions.recolour,
    "edit: shape": captions.reshape,
    "edit: size": captions.resize,
    "edit: remove": captions.remove,
    "edit: add": captions.add,
    "edit: add to a centred thing": add_beside,
    "edit: background": captions.reground,
    "relight": captions.relight,
    "restyle": captions.restyle,
    "blend": captions.blend,
}
SIDES: Final = (True, False)
"""Columns: contents that training may have drawn, and those that it never draws."""
WIDE_KINDS: Final[dict[str, Callable[..., Sample]]] = {
    "counts": counted,
    "inside": inside,
    "not": negated,
}
"""Kinds of the world ``wide`` only."""
STAYS: Final = 0.15
"""Maximum apparent movement of a thing, in image coordinates from -1 to 1."""


class _Clock:
    alone = True

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


def is_right(sample: Sample, picture: torch.Tensor, world: World = SHIPPED) -> bool:
    """Whether an image is what a sample asks for, with everything else in its place."""
    free = sample.task in ("text-to-image", "image-blend")
    return verify(picture, sample.target, stays=None if free else STAYS, world=world).right


def verdict_of(sample: Sample, picture: torch.Tensor, world: World = SHIPPED) -> Verdict:
    return verify(picture, sample.target, world=world)


def score(
    engine: DiffusionEngine,
    kind: str,
    count: int,
    *,
    seed: int = SEED,
    held_out: bool | None = None,
    world: World = SHIPPED,
    **asked: Any,
) -> tuple[float, list[tuple[Sample, torch.Tensor]]]:
    """Return the fraction that is right, and all samples with their images.

    ``held_out`` chooses the side of the split; None takes samples as they come.
    """
    r = random.Random(seed)
    make = partial((KINDS | WIDE_KINDS)[kind], r, world=world)
    samples = [
        make() if held_out is None else choose(make, held_out=held_out) for _ in range(count)
    ]
    orders = [input_of(one, seed + place, **asked) for place, one in enumerate(samples)]
    drawn = [picture_of(outcome) for outcome in run(engine, orders)]
    right = sum(is_right(one, picture, world) for one, picture in zip(samples, drawn, strict=True))
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


def _right_of(pairs: Sequence[tuple[Sample, torch.Tensor]], world: World) -> str:
    right = sum(is_right(sample, picture, world) for sample, picture in pairs)
    return f"{right / max(1, len(pairs)):.3f} of {len(pairs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=500, help="number of text prompts")
    parser.add_argument("--edits", type=int, default=60, help="number of each kind of edit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument(
        "--older",
        type=int,
        default=0,
        help="text prompts that older weights were trained on; of each edit, an eighth as many",
    )
    parser.add_argument("--sheets", type=Path, help="directory for contact sheets")
    parser.add_argument("--world", choices=WORLDS, default="shipped", help="things to ask for")
    options = parser.parse_args()
    world = WORLDS[options.world]
    torch.set_num_threads(1)
    engine = load(options.path, *TASKS)
    asked = {"steps": options.steps, "guidance": options.guidance}
    for kind in KINDS if world is SHIPPED else KINDS | WIDE_KINDS:
        count = options.count if kind == "text to image" else options.edits
        if options.older:
            few = 1 if kind == "text to image" else 8
            seen = drawn(KINDS[kind], options.older // few)
            _, every = score(engine, kind, count, world=world, **asked)
            sides = [[pair for pair in every if (pair[0].content in seen) is it] for it in SIDES]
        else:
            sides = [
                score(engine, kind, count, held_out=not side, world=world, **asked)[1]
                for side in SIDES
            ]
        pairs = [pair for side in sides for pair in side]
        parts = [verdict_of(sample, picture, world) for sample, picture in pairs]
        names = ("background", "things", "colours", "shapes", "places")
        told = {name: f"{sum(getattr(v, name) for v in parts) / len(parts):.3f}" for name in names}
        found = "  ".join(_right_of(side, world) for side in sides)
        print(f"{kind:18} {found}  {told}", flush=True)
        if options.sheets:
            options.sheets.mkdir(parents=True, exist_ok=True)
            name = kind.replace(": ", "-").replace(" ", "-")
            contact_sheet(pairs[:48], options.sheets / f"{name}.png")


if __name__ == "__main__":
    main()

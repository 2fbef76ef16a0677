"""Plays the step loop for one engine of pictures."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from workers.contract.jobs import Completed, Event, Job, Outcome, RequestId
from workers.contract.models import ModelSpec
from workers.engines.diffusion.engine import DiffusionEngine
from workers.engines.protocol import Admission, Admitted

SIZE = 32


class PhaseNames:
    """A clock that only notes which phases there were."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


def spec(path: Path, task: str = "text-to-image", *also: str, **options: Any) -> ModelSpec:
    return ModelSpec(
        "painter",
        task,
        engine="diffusion",
        checkpoint=str(path),
        options={"steps": 4, **options},
        also=also,
    )


def picture(seed: int = 0, size: tuple[int, int] = (48, 40)) -> bytes:
    pixels = np.random.RandomState(seed).randint(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def opened(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.int16)


class Driver:
    """An engine with its requests, their events and outcomes."""

    def __init__(self, of: ModelSpec) -> None:
        self.engine = DiffusionEngine(of)
        self.engine.load()
        self.clock = PhaseNames()
        self.task = of.task
        self.events: dict[str, list[Event]] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.open: set[str] = set()
        self.steps = 0

    def admit(
        self,
        name: str,
        files: Sequence[bytes] = (),
        *,
        task: str | None = None,
        priority: int = 0,
        **asked: Any,
    ) -> Admission:
        given = {"prompt": "a red circle", "width": SIZE, "height": SIZE, "images": len(files)}
        if asked.get("mask"):
            given["images"] = len(files) - 1
        job = Job(
            RequestId(name), "acct", "painter", task or self.task, given | asked, priority=priority
        )
        admission = self.engine.admit(job, self.clock, files)
        if isinstance(admission, Admitted):
            self.open.add(name)
            self.events[name] = []
        return admission

    def step(self) -> dict[str, float]:
        """One step; the shares of it."""
        report = self.engine.step(self.clock)
        self.steps += 1
        for name, event in report.events:
            self.events[name].append(event)
        for name, outcome in report.outcomes:
            self.outcomes[name] = outcome
            self.open.discard(name)
            self.engine.release(name)
        return dict(report.weights)

    def finish(self, most: int = 400) -> None:
        while self.open:
            self.step()
            assert self.steps < most, f"{self.open} do not end"

    def files(self, name: str) -> list[bytes]:
        outcome = self.outcomes[name]
        assert isinstance(outcome, Completed), outcome
        return [file.data for file in outcome.files]

"""Plays the step loop for one engine of music."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np

from workers.contract.jobs import Completed, Event, Job, Outcome, RequestId, Sound, Usage
from workers.contract.models import ModelSpec
from workers.engines.music.engine import TASK, MusicEngine
from workers.engines.protocol import Admission, Admitted


class PhaseNames:
    """A clock that only notes which phases there were."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


def spec(path: Path, *also: str, task: str = TASK, **options: Any) -> ModelSpec:
    return ModelSpec(
        "band",
        task,
        engine="music",
        checkpoint=str(path),
        options={"threads": 1, "slots": 3, **options},
        limits={"seconds": 40},
        also=also,
    )


def samples(data: bytes, rate: int = 48_000) -> np.ndarray:
    """``(2, n)`` of any file, at some rate."""
    resampler = av.AudioResampler("flt", "stereo", rate)
    with av.open(io.BytesIO(data)) as container:
        frames = [one for frame in container.decode(audio=0) for one in resampler.resample(frame)]
    whole = [frame.to_ndarray() for frame in (*frames, *resampler.resample(None))]
    return np.concatenate(whole, axis=1).reshape(-1, 2).T


class Driver:
    """An engine with its requests, their events and outcomes."""

    def __init__(self, of: ModelSpec) -> None:
        self.engine = MusicEngine(of)
        self.engine.load()
        self.clock = PhaseNames()
        self.events: dict[str, list[Event]] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.shares: dict[str, float] = {}
        self.open: set[str] = set()
        self.steps = 0

    def admit(
        self, name: str, *, stream: bool = False, limits: Usage | None = None, **asked: Any
    ) -> Admission:
        given = {"format": "wav", "prompt": "at 180 bpm in 3/4", "duration_ms": 3000, **asked}
        job = Job(
            RequestId(name),
            "acct",
            "band",
            asked.get("task", TASK),
            {field: value for field, value in given.items() if field != "task"},
            limits=limits or Usage(),
            stream=stream,
        )
        admission = self.engine.admit(job, self.clock)
        if isinstance(admission, Admitted):
            self.open.add(name)
            self.events[name] = []
        return admission

    def step(self) -> None:
        report = self.engine.step(self.clock)
        self.steps += 1
        for name, share in report.weights.items():
            self.shares[name] = self.shares.get(name, 0) + share
        for name, event in report.events:
            self.events[name].append(event)
        for name, outcome in report.outcomes:
            self.outcomes[name] = outcome
            self.open.discard(name)
            self.engine.release(name)

    def finish(self, most: int = 4_000) -> None:
        while self.open:
            self.step()
            assert self.steps < most, f"{self.open} do not end"

    def make(self, **asked: Any) -> Completed:
        """What one request alone gets."""
        name = f"alone-{len(self.outcomes)}"
        assert self.admit(name, **asked) == Admitted()
        self.finish()
        return self.completed(name)

    def completed(self, name: str) -> Completed:
        outcome = self.outcomes[name]
        assert isinstance(outcome, Completed), outcome
        return outcome

    def streamed(self, name: str) -> bytes:
        pieces = [event for event in self.events[name] if isinstance(event, Sound)]
        whole = b""
        for piece in pieces:
            assert piece.start == len(whole)
            whole += piece.data
        return whole

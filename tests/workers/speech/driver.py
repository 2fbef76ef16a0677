"""Plays the step loop for one engine of speech."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.workers.speech.checkpoints import RATE
from workers.contract.jobs import Completed, Event, Job, Outcome, RequestId, Sound
from workers.contract.models import ModelSpec
from workers.engines.protocol import Admission, Admitted
from workers.engines.speech.engine import SpeechEngine


class PhaseNames:
    """A clock that only notes which phases there were."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


def spec(path: Path, task: str = "text-to-speech", *also: str, **options: Any) -> ModelSpec:
    return ModelSpec(
        "talker",
        task,
        engine="speech",
        checkpoint=str(path),
        options={"sentence_seconds": 0.5, "threads": 1, **options},
        also=also,
    )


def samples(data: bytes) -> np.ndarray:
    """Of a WAV."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    return np.concatenate(frames, axis=1).reshape(-1).astype(np.float32) / 32_768


class Driver:
    """An engine with its requests, their events and outcomes."""

    def __init__(self, of: ModelSpec) -> None:
        self.engine = SpeechEngine(of)
        self.engine.load()
        self.clock = PhaseNames()
        self.task = of.task
        self.events: dict[str, list[Event]] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.shares: dict[str, float] = {}
        self.open: set[str] = set()
        self.steps = 0

    def admit(
        self,
        name: str,
        files: Sequence[bytes] = (),
        *,
        task: str | None = None,
        stream: bool = False,
        priority: int = 0,
        **asked: Any,
    ) -> Admission:
        given: dict[str, Any] = {"format": "wav", "recording": bool(files)}
        given |= {"text": "Hello there."} if (task or self.task) != "text-to-music" else {}
        job = Job(
            RequestId(name),
            "acct",
            "talker",
            task or self.task,
            given | asked,
            stream=stream,
            priority=priority,
        )
        admission = self.engine.admit(job, self.clock, files)
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

    def file(self, name: str) -> bytes:
        outcome = self.outcomes[name]
        assert isinstance(outcome, Completed), outcome
        return outcome.files[0].data

    def streamed(self, name: str) -> bytes:
        pieces = [event for event in self.events[name] if isinstance(event, Sound)]
        whole = b""
        for piece in pieces:
            assert piece.start == len(whole)
            whole += piece.data
        return whole


def speak(of: ModelSpec | Driver, **asked: Any) -> np.ndarray:
    """What one request alone gets."""
    driver = of if isinstance(of, Driver) else Driver(of)
    name = f"alone-{len(driver.outcomes)}"
    assert driver.admit(name, **asked) == Admitted()
    driver.finish()
    return samples(driver.file(name))


__all__ = ["RATE", "Driver", "PhaseNames", "samples", "speak", "spec"]

"""Replaces the step loop for one engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from workers.contract.jobs import Completed, Event, Job, Outcome
from workers.protocol.engine import Admission, Admitted, Deferred, Engine

Driven = TypeVar("Driven", bound=Engine)


def made_of(reported: Any) -> Any:
    """Return what was reported; make it if it was deferred."""
    return reported.make() if isinstance(reported, Deferred) else reported


def events_of(reported: Any) -> list[Event]:
    """Return the events that were reported, made if they were deferred."""
    made = made_of(reported)
    if isinstance(made, list):
        return made
    return [] if made is None else [made]


class PhaseNames:
    """A clock that only records the phases."""

    alone = True

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


class EngineDriver(Generic[Driven]):
    """An engine with the events and outcomes of its requests."""

    def __init__(self, engine: Driven) -> None:
        self.engine = engine
        self.engine.load()
        self.clock = PhaseNames()
        self.events: dict[str, list[Event]] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.shares: dict[str, float] = {}
        self.open: set[str] = set()
        self.steps = 0

    def take(self, job: Job, files: Sequence[bytes] = ()) -> Admission:
        admission = self.engine.admit(job, self.clock, files)
        if isinstance(admission, Admitted):
            self.open.add(job.request_id)
            self.events[job.request_id] = []
        return admission

    def step(self) -> dict[str, float]:
        """Run one step. Return its weights."""
        report = self.engine.step(self.clock)
        self.steps += 1
        for name, share in report.weights.items():
            self.shares[name] = self.shares.get(name, 0) + share
        for name, event in report.events:
            self.events[name] += events_of(event)
        for name, outcome in report.outcomes:
            self.open.discard(name)
            self.engine.release(name)
            self.outcomes[name] = made_of(outcome)
        return dict(report.weights)

    def finish(self, most: int = 4_000) -> None:
        while self.open:
            self.step()
            assert self.steps < most, f"{self.open} do not end"

    def files(self, name: str) -> list[bytes]:
        outcome = self.outcomes[name]
        assert isinstance(outcome, Completed), outcome
        return [file.data for file in outcome.files]


class Run(Generic[Driven]):
    """Steps an engine until all admitted requests have ended."""

    def __init__(self, engine: Driven, *jobs: tuple[Job, list[bytes]]) -> None:
        self.engine = engine
        self.outcomes: dict[str, Outcome] = {}
        self.events: list[tuple[str, Event]] = []
        self.shared = 0
        for job, files in jobs:
            assert isinstance(engine.admit(job, PhaseNames(), files), Admitted)
        self.count = len(jobs)

    def step(self) -> None:
        report = self.engine.step(PhaseNames())
        self.shared += len(report.weights) > 1
        self.events += [(id, made) for id, event in report.events for made in events_of(event)]
        for id, outcome in report.outcomes:
            assert id not in self.outcomes
            self.engine.release(id)
            self.outcomes[id] = made_of(outcome)

    def finish(self) -> dict[str, Outcome]:
        for _ in range(500):
            if len(self.outcomes) == self.count:
                return self.outcomes
            self.step()
        raise AssertionError("they did not end")

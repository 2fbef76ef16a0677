"""An engine without a device, for property tests of the step loop; it advances the clock itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from workers.contract.jobs import (
    Cancelled,
    Completed,
    Event,
    Failed,
    Job,
    Outcome,
    RequestId,
    Tokens,
    Usage,
)
from workers.protocol.engine import (
    Admission,
    Admitted,
    CancelReason,
    PhaseClock,
    StepReport,
    Wait,
)


@dataclass
class Clock:
    us: int = 1_000_000

    def now_us(self) -> int:
        return self.us

    def unix_ms(self) -> int:
        return self.us // 1000


@dataclass
class Room:
    """Memory shared by several engines."""

    free: int


class OutOfMemoryError(Exception):
    """Named as torch names its own."""


@dataclass
class FakeEngine:
    """Serves jobs whose input says how many ``steps`` and how much ``room`` they take.

    It can be made to misbehave: to fail in some of its steps, to run out of memory in others, and
    to ignore cancels.
    """

    clock: Clock
    room: Room
    step_us: int = 1_000
    admit_us: int = 10
    failing_steps: frozenset[int] = frozenset()
    failure: Exception = field(default_factory=lambda: RuntimeError("a kernel failed"))
    starving_steps: frozenset[int] = frozenset()
    deaf: bool = False
    fails_to_load: bool = False
    load_us: int = 0
    steps_done: int = 0
    left: dict[RequestId, int] = field(default_factory=dict)
    held: dict[RequestId, int] = field(default_factory=dict)
    cancelled: dict[RequestId, CancelReason] = field(default_factory=dict)
    released: list[RequestId] = field(default_factory=list)
    prepared: dict[RequestId, float] = field(default_factory=dict)
    prepare_us: int = 0

    @property
    def whole_step_us(self) -> int:
        return self.step_us + 3 + self.step_us % 5

    def load(self) -> None:
        self.clock.us += self.load_us
        if self.fails_to_load:
            raise RuntimeError("the weights are not there")

    def unload(self) -> None:
        assert not self.held

    def admit(self, job: Job, clock: PhaseClock, files: Sequence[bytes] = ()) -> Admission:
        with clock.phase("preprocess"):
            self.clock.us += self.admit_us
        if job.input["steps"] < 1:
            return Failed(code="invalid_input", message="There is nothing to do.")
        if job.input["room"] > self.room.free:
            return Wait()
        self.room.free -= job.input["room"]
        self.held[job.request_id] = job.input["room"]
        self.left[job.request_id] = job.input["steps"]
        return Admitted()

    def step(self, clock: PhaseClock) -> StepReport:
        assert self.held, "stepped without work"
        self.steps_done += 1
        with self._slow_phases(clock):
            if self.steps_done in self.failing_steps:
                raise self.failure
            if self.steps_done in self.starving_steps:
                raise OutOfMemoryError
        weights: dict[RequestId, float] = {}
        events: list[tuple[RequestId, Event]] = []
        outcomes: list[tuple[RequestId, Outcome]] = []
        for request_id in list(self.left):
            if request_id in self.cancelled and not self.deaf:
                reason = self.cancelled[request_id]
                outcomes.append((request_id, Cancelled(reason=reason)))
                del self.left[request_id]
                continue
            weights[request_id] = 1.0 + self.left[request_id] % 3
            self.left[request_id] -= 1
            events.append((request_id, Tokens(index=0, text="a", count=1)))
            if self.left[request_id] == 0:
                outcomes.append((request_id, Completed(usage=Usage(output_tokens=1))))
                del self.left[request_id]
        return StepReport(weights, events, outcomes, self.prepared)

    @contextmanager
    def _slow_phases(self, clock: PhaseClock) -> Iterator[None]:
        with clock.phase("preprocess"):
            self.clock.us += self.prepare_us
        with clock.phase("transfer"):
            self.clock.us += self.step_us // 7
        with clock.phase("forward"):
            self.clock.us += self.step_us - self.step_us // 7
            yield
        self.clock.us += 3  # outside any phase
        with clock.phase("postprocess"):
            self.clock.us += self.step_us % 5

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self.cancelled[request_id] = reason

    def release(self, request_id: RequestId) -> None:
        self.left.pop(request_id, None)
        self.room.free += self.held.pop(request_id)
        self.released.append(request_id)

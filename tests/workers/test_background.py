"""Background work: in order, concurrent with steps, dropped if its job has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from workers.contract.jobs import (
    BlobRef,
    Cancelled,
    Completed,
    Event,
    Failed,
    Job,
    Outcome,
    Progress,
    RequestId,
    Tokens,
    Usage,
)
from workers.protocol.engine import (
    Admission,
    Admitted,
    CancelReason,
    Deferred,
    PhaseClock,
    Prepared,
    StepReport,
)
from workers.runtime import background
from workers.runtime.background import Background, StuckError
from workers.runtime.step_loop import StepLoop


def _now_us() -> int:
    return time.monotonic_ns() // 1000


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    made = ThreadPoolExecutor(2)
    yield made
    made.shutdown()


def _taken(of: Background, count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline
        found += of.take()
        time.sleep(0.001)
    return found


def test_tasks_of_one_owner_run_in_order(pool: ThreadPoolExecutor) -> None:
    beside = Background(_now_us, pool.submit)
    for number in range(20):
        beside.put("a", "n", lambda number=number: number)
        beside.put("b", "n", lambda number=number: -number)

    done = _taken(beside, 40)

    assert [one.result for one in done if one.owner == "a"] == list(range(20))
    assert [one.result for one in done if one.owner == "b"] == [-number for number in range(20)]
    assert beside.pending("a") == beside.pending("b") == 0


def test_dropped_tasks_are_not_started(pool: ThreadPoolExecutor) -> None:
    beside, go = Background(_now_us, pool.submit), threading.Event()
    done: list[int] = []
    beside.put("a", "first", go.wait)
    beside.put("a", "second", lambda: done.append(2))
    beside.drop("a")
    go.set()

    (first,) = _taken(beside, 1)

    assert first.name == "first"
    beside.put("a", "third", lambda: done.append(3))
    _taken(beside, 1)
    assert done == [3]


def test_error_is_returned_as_a_result(pool: ThreadPoolExecutor) -> None:
    beside = Background(_now_us, pool.submit)
    beside.put("a", "n", lambda: 1 // 0)

    (done,) = _taken(beside, 1)

    assert isinstance(done.error, ZeroDivisionError)


def test_stuck_task_is_detected(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LIMIT_US", 1000)
    beside, go = Background(_now_us, pool.submit), threading.Event()
    beside.put("a", "encoding", go.wait)

    try:
        with pytest.raises(StuckError, match="encoding has not ended"):
            _taken(beside, 1)
    finally:
        go.set()


# --- Under the step loop --------------------------------------------------------------------------


@dataclass
class Engine:
    """Emits one token per step; reads ``files`` and writes outputs by the given functions."""

    read: Callable[[], Any] = lambda: "read"
    write: Callable[[], Outcome] | None = None
    steps_wanted: int = 1
    steps: int = 0
    running: dict[RequestId, int] = field(default_factory=dict)
    cancelled: dict[RequestId, CancelReason] = field(default_factory=dict)
    released: list[RequestId] = field(default_factory=list)
    admitted_with: list[Any] = field(default_factory=list)

    def load(self) -> None: ...

    def unload(self) -> None: ...

    def prepare(self, job: Job, files: Sequence[bytes]) -> Any:
        return self.read()

    def admit(
        self, job: Job, clock: PhaseClock, files: Sequence[bytes] | Prepared = ()
    ) -> Admission:
        self.admitted_with.append(files)
        self.running[job.request_id] = 0
        return Admitted()

    def step(self, clock: PhaseClock) -> StepReport:
        self.steps += 1
        time.sleep(0.001)
        events: list[tuple[RequestId, Event | Deferred]] = []
        outcomes: list[tuple[RequestId, Outcome | Deferred]] = []
        for id in self.running:
            if id in self.cancelled:
                outcomes.append((id, Cancelled(self.cancelled[id])))
                continue
            self.running[id] += 1
            events.append((id, Tokens(0, "x", 1)))
            if self.running[id] == self.steps_wanted:
                if self.write is None:
                    outcomes.append((id, Completed(Usage(output_tokens=self.running[id]))))
                else:
                    events.append((id, Deferred(lambda: Progress(1, 2, 3))))
                    outcomes.append((id, Deferred(self.write, usage=Usage(steps=7))))
        return StepReport(dict.fromkeys(self.running, 1.0), events, outcomes)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self.cancelled[request_id] = reason

    def release(self, request_id: RequestId) -> None:
        del self.running[request_id]
        self.released.append(request_id)


@dataclass
class Bench:
    video: Engine
    chat: Engine
    pool: ThreadPoolExecutor
    events: list[tuple[RequestId, Event]] = field(default_factory=list)
    outcomes: dict[RequestId, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = StepLoop(
            worker="w1",
            now_us=_now_us,
            unix_ms=lambda: time.time_ns() // 1_000_000,
            background=Background(_now_us, self.pool.submit),
        )
        for name, engine in (("video", self.video), ("chat", self.chat)):
            self.loop.add(name, engine)
            self.loop.load(name)

    def admit(self, model: str, name: str, *, files: int = 0, deadline_ms: int = 0) -> RequestId:
        blobs = (BlobRef("k", "image/png", 1),) * files
        id = RequestId(name)
        job = Job(id, "a", model, "t", {}, stream=True, attachments=blobs, deadline_ms=deadline_ms)
        self.loop.admit(job, queue_us=0, leased_us=_now_us(), files=(b"x",) * files)
        return id

    def turn(self) -> None:
        report = self.loop.turn()
        self.events += report.events
        for id, outcome in report.outcomes:
            assert id not in self.outcomes
            self.outcomes[id] = outcome

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.turn()


@pytest.fixture
def go() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def test_stream_continues_while_a_video_is_encoded(
    pool: ThreadPoolExecutor, go: threading.Event
) -> None:
    def write() -> Outcome:
        assert go.wait(30)
        return Completed(Usage(video_ms=5))

    bench = Bench(Engine(write=write), Engine(steps_wanted=1000), pool)
    video = bench.admit("video", "v")
    chat = bench.admit("chat", "c")
    bench.until(lambda: bench.video.released == [video])
    before = bench.chat.steps

    bench.until(lambda: bench.chat.steps >= before + 50)

    assert video not in bench.outcomes
    assert bench.video.steps == 1, "an engine whose requests have left does not step"
    go.set()
    bench.until(lambda: video in bench.outcomes)
    outcome = bench.outcomes[video]
    assert isinstance(outcome, Completed)
    assert outcome.usage.video_ms == 5
    assert outcome.timings.postprocess_us > 20_000, "it took as long as fifty steps"
    assert 0 < outcome.usage.gpu_us < outcome.timings.postprocess_us
    kinds = [type(event).__name__ for id, event in bench.events if id == video]
    assert kinds == ["Tokens", "Progress"]
    bench.loop.cancel(chat, "client")
    bench.until(lambda: bench.loop.idle)
    assert sum(one.usage.gpu_us for one in bench.outcomes.values()) == bench.loop.busy_us


@pytest.mark.parametrize("reason", ["client", "deadline"])
def test_jobs_in_the_background_can_be_cancelled_and_have_deadlines(
    reason: str, pool: ThreadPoolExecutor, go: threading.Event
) -> None:
    def write() -> Outcome:
        go.wait(30)
        return Completed()

    bench = Bench(Engine(write=write), Engine(), pool)
    soon = time.time_ns() // 1_000_000 + 300 if reason == "deadline" else 0
    video = bench.admit("video", "v", deadline_ms=soon)
    bench.until(lambda: bench.video.released == [video])
    if reason == "client":
        bench.loop.cancel(video, "client")
    else:
        assert bench.loop.patience_s in (0.0, 0.1), "the deadline is looked at while all waits"

    bench.until(lambda: video in bench.outcomes)

    outcome = bench.outcomes[video]
    assert isinstance(outcome, Cancelled)
    assert (outcome.reason, outcome.usage.steps) == (reason, 7)
    assert bench.loop.idle
    go.set()
    again = bench.admit("video", "w")
    bench.until(lambda: again in bench.outcomes)
    assert bench.video.released == [video, again], "each is released once"


def test_reading_a_file_does_not_delay_other_jobs(
    pool: ThreadPoolExecutor, go: threading.Event
) -> None:
    def read() -> str:
        go.wait(30)
        return "pixels"

    bench = Bench(Engine(read=read), Engine(steps_wanted=1000), pool)
    slow = bench.admit("video", "slow", files=1)
    quick = bench.admit("video", "quick")
    bench.admit("chat", "c")

    bench.until(lambda: quick in bench.outcomes and bench.chat.steps > 20)

    assert slow not in bench.video.running
    go.set()
    bench.until(lambda: slow in bench.outcomes)
    assert bench.video.admitted_with == [(), Prepared("pixels")]
    outcome = bench.outcomes[slow]
    assert outcome.timings.preprocess_us > 10_000
    assert outcome.usage.gpu_us < outcome.timings.preprocess_us


def test_failed_background_task_fails_only_its_own_request(pool: ThreadPoolExecutor) -> None:
    def fail() -> Any:
        raise RuntimeError("damaged")

    bench = Bench(Engine(read=fail), Engine(write=fail), pool)
    read, written = bench.admit("video", "r", files=1), bench.admit("chat", "w")

    bench.until(lambda: bench.loop.idle)

    for id in (read, written):
        outcome = bench.outcomes[id]
        assert isinstance(outcome, Failed)
        assert outcome.code == "engine_error"

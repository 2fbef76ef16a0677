from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.fakes import Clock, FakeEngine, Room
from workers.contract.jobs import (
    Cancelled,
    Completed,
    Event,
    Failed,
    Job,
    Outcome,
    RequestId,
    Tokens,
)
from workers.failures import DeviceLostError
from workers.protocol.engine import PhaseClock, StepReport
from workers.runtime.step_loop import StepLoop

MODELS = ("small", "large")


@dataclass
class Bench:
    """A loop over two engines that share memory, with all its reports."""

    clock: Clock = field(default_factory=Clock)
    room: Room = field(default_factory=lambda: Room(10))
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    events: dict[RequestId, list[Event]] = field(default_factory=dict)
    outcomes: dict[RequestId, Outcome] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = StepLoop(
            worker="w1",
            now_us=self.clock.now_us,
            unix_ms=self.clock.unix_ms,
            quantum_us=1_000,
        )
        for model in MODELS:
            engine = self.engines.setdefault(model, FakeEngine(self.clock, self.room))
            self.loop.add(model, engine, weight=self.weights.get(model, 1.0))
        self.number = 0

    def load(self) -> Bench:
        for model in MODELS:
            assert self.loop.load(model) is None
        return self

    def submit(
        self,
        model: str = "small",
        *,
        steps: int = 1,
        room: int = 1,
        stream: bool = True,
        deadline_ms: int = 0,
    ) -> RequestId:
        self.number += 1
        job = Job(
            RequestId(f"req_{self.number:032x}"),
            "acc",
            model,
            "text-generation",
            {"steps": steps, "room": room},
            stream=stream,
            deadline_ms=deadline_ms,
        )
        self.loop.admit(job, queue_us=500, leased_us=self.clock.us)
        return job.request_id

    def turn(self) -> None:
        report = self.loop.turn()
        for request_id, event in report.events:
            assert request_id not in self.outcomes, "an event after the outcome"
            self.events.setdefault(request_id, []).append(event)
        for request_id, outcome in report.outcomes:
            assert request_id not in self.outcomes, "two outcomes"
            self.outcomes[request_id] = outcome

    def finish(self) -> None:
        turns = 0
        while not self.loop.idle:
            if change := self.loop.residency.next():
                self.loop.load(change.load.model)
            self.turn()
            turns += 1
            assert turns < 10_000, "somebody never leaves"


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, int, int, int, bool]]:
    """Commands: kind, model or request, steps, room, streamed or with a deadline."""
    verbs = st.sampled_from(["submit", "submit", "cancel", "turn", "turn", "turn"])
    numbers = st.integers(0, 30)
    return draw(
        st.lists(
            st.tuples(verbs, numbers, st.integers(0, 6), st.integers(0, 12), st.booleans()),
            max_size=60,
        )
    )


@st.composite
def engine_pairs(draw: st.DrawFn) -> tuple[FakeEngine, FakeEngine]:
    clock, room = Clock(), Room(10)
    some_steps = st.frozensets(st.integers(1, 40), max_size=4)
    small, large = (
        FakeEngine(
            clock,
            room,
            step_us=draw(st.integers(1, 20_000)),
            admit_us=draw(st.integers(0, 2_000)),
            failing_steps=draw(some_steps),
            starving_steps=draw(some_steps),
            deaf=draw(st.booleans()),
            fails_to_load=draw(st.sampled_from([False, False, False, True])),
        )
        for _ in MODELS
    )
    return small, large


@settings(max_examples=500)
@given(scripts(), engine_pairs())
def test_every_job_ends_once_and_the_shares_sum_to_the_busy_time(
    script: list[tuple[str, int, int, int, bool]], engines: tuple[FakeEngine, FakeEngine]
) -> None:
    small, large = engines
    bench = Bench(small.clock, small.room, {"small": small, "large": large})
    submitted: list[RequestId] = []

    for verb, number, steps, room, flag in script:
        if verb == "submit":
            deadline_ms = bench.clock.unix_ms() + 1 + number if number % 3 == 0 else 0
            submitted.append(
                bench.submit(
                    MODELS[number % 2],
                    steps=steps,
                    room=room,
                    stream=flag,
                    deadline_ms=deadline_ms,
                )
            )
        elif verb == "cancel" and submitted:
            bench.loop.cancel(submitted[number % len(submitted)], "client")
        elif verb == "turn":
            bench.turn()
    bench.finish()

    assert bench.outcomes.keys() == set(submitted)
    assert sum(outcome.usage.gpu_us for outcome in bench.outcomes.values()) == bench.loop.busy_us
    for request_id, outcome in bench.outcomes.items():
        spent = outcome.timings
        assert outcome.usage.gpu_us == (
            spent.preprocess_us + spent.transfer_us + spent.forward_us + spent.postprocess_us
        )
        assert outcome.worker == "w1"
        said = [event for event in bench.events.get(request_id, []) if isinstance(event, Tokens)]
        assert sum(event.count for event in said) in (0, spent.tokens)
        if isinstance(outcome, Cancelled):
            assert outcome.delivered == bool(said)
    for engine in engines:
        assert len(engine.released) == len(set(engine.released))
        assert not engine.held
    assert small.room.free == 10


@given(engine_pairs(), st.integers(0, 5))
def test_a_cancelled_request_leaves_within_one_step_of_its_engine(
    engines: tuple[FakeEngine, FakeEngine], turns: int
) -> None:
    small, large = engines
    small.fails_to_load = large.fails_to_load = False
    bench = Bench(small.clock, small.room, {"small": small, "large": large}).load()
    for _ in range(3):
        bench.submit("large", steps=1000, room=2)
    request_id = bench.submit("small", steps=1000, room=2)
    for _ in range(turns):
        bench.turn()

    bench.loop.cancel(request_id, "client")
    steps_before = small.steps_done
    while request_id not in bench.outcomes:
        bench.turn()

    assert small.steps_done <= steps_before + 1


@given(st.integers(1, 4), st.integers(1, 30_000), st.integers(1, 30_000))
def test_engines_share_the_device_by_weight(
    weight: int, small_step_us: int, large_step_us: int
) -> None:
    clock, room = Clock(), Room(10)
    small = FakeEngine(clock, room, step_us=small_step_us)
    large = FakeEngine(clock, room, step_us=large_step_us)
    bench = Bench(
        clock, room, {"small": small, "large": large}, weights={"large": float(weight)}
    ).load()
    for model in MODELS:
        bench.submit(model, steps=100_000)

    for _ in range(2_000):
        bench.turn()

    small_us = small.steps_done * small.whole_step_us
    large_us = large.steps_done * large.whole_step_us / weight
    slack_us = 1_000 + max(small.whole_step_us, large.whole_step_us) + small.admit_us
    assert abs(small_us - large_us) <= 2 * slack_us


def test_engine_is_told_whether_others_have_running_requests() -> None:
    bench = Bench().load()
    told: dict[str, list[bool]] = {model: [] for model in MODELS}
    for model, engine in bench.engines.items():

        def step(clock: PhaseClock, model: str = model, engine: FakeEngine = engine) -> StepReport:
            told[model].append(clock.alone)
            return FakeEngine.step(engine, clock)

        engine.step = step  # type: ignore[method-assign]

    bench.submit("small", steps=2)
    bench.turn()
    bench.submit("large", steps=1)
    bench.finish()

    # The small one has used its turn, so the large one steps beside it, and ends.
    assert told == {"small": [True, True], "large": [False]}


def test_waiting_request_is_admitted_when_another_has_ended() -> None:
    bench = Bench().load()
    first = bench.submit(steps=3, room=10)
    second = bench.submit(steps=1, room=10)

    bench.finish()

    assert list(bench.outcomes) == [first, second]
    assert all(isinstance(outcome, Completed) for outcome in bench.outcomes.values())


def test_engine_without_room_is_not_starved_by_admissions_to_others() -> None:
    bench = Bench().load()
    bench.submit("small", steps=5, room=6)
    bench.turn()
    large = bench.submit("large", steps=1, room=10)

    for _ in range(30):
        bench.submit("small", steps=5, room=1)
        bench.turn()

    assert isinstance(bench.outcomes[large], Completed)


def test_request_that_can_never_fit_fails() -> None:
    bench = Bench().load()
    request_id = bench.submit(room=11)

    bench.finish()

    outcome = bench.outcomes[request_id]
    assert isinstance(outcome, Failed)
    assert outcome.code == "out_of_memory"


def test_waiting_request_that_is_cancelled_is_free_and_unblocks_the_next() -> None:
    bench = Bench().load()
    bench.submit("small", steps=5, room=6)
    bench.turn()
    starved = bench.submit("large", room=10)
    bench.turn()

    bench.loop.cancel(starved, "client")
    bench.turn()

    outcome = bench.outcomes[starved]
    assert isinstance(outcome, Cancelled)
    assert not outcome.delivered
    other = bench.submit("large", steps=1, room=1)
    bench.finish()
    assert isinstance(bench.outcomes[other], Completed)


def test_deadline_ends_running_and_waiting_requests() -> None:
    bench = Bench().load()
    soon_ms = bench.clock.unix_ms() + 4
    running = bench.submit(steps=1000, room=10, deadline_ms=soon_ms)
    waiting = bench.submit(steps=1000, room=10, deadline_ms=soon_ms)

    bench.finish()

    for request_id in (running, waiting):
        outcome = bench.outcomes[request_id]
        assert isinstance(outcome, Cancelled)
        assert outcome.reason == "deadline"
    assert bench.engines["small"].steps_done <= 6


def test_a_failed_step_fails_its_engine_only() -> None:
    bench = Bench()
    bench.engines["small"].failing_steps = frozenset({2})
    bench.load()
    failed = [bench.submit("small", steps=5) for _ in range(2)]
    unharmed = bench.submit("large", steps=5)
    bench.finish()
    later = bench.submit("small", steps=5)

    bench.finish()

    for request_id in failed:
        outcome = bench.outcomes[request_id]
        assert isinstance(outcome, Failed)
        assert outcome.code == "engine_error"
    assert isinstance(bench.outcomes[unharmed], Completed)
    assert isinstance(bench.outcomes[later], Completed)


def test_out_of_memory_ends_only_the_youngest_request() -> None:
    bench = Bench()
    bench.engines["small"].starving_steps = frozenset({2})
    bench.load()
    older, youngest = bench.submit(steps=5), bench.submit(steps=5)

    bench.finish()

    outcome = bench.outcomes[youngest]
    assert isinstance(outcome, Failed)
    assert outcome.code == "out_of_memory"
    assert isinstance(bench.outcomes[older], Completed)


def test_lost_device_is_raised_to_the_owner_of_the_process() -> None:
    class AcceleratorError(Exception):
        """Named as torch names its own."""

    bench = Bench()
    bench.engines["small"].failing_steps = frozenset({1})
    bench.engines["small"].failure = AcceleratorError("device-side assert triggered")
    bench.load()
    bench.submit()

    with pytest.raises(DeviceLostError, match="device-side assert"):
        bench.turn()


def test_time_of_preparing_a_request_is_charged_to_it_alone() -> None:
    bench = Bench().load()
    engine = bench.engines["small"]
    first, second = bench.submit(steps=2), bench.submit(steps=2)
    engine.prepared = {second: 1.0}

    engine.prepare_us = 700
    bench.finish()

    spent = {name: bench.outcomes[name].usage.gpu_us for name in (first, second)}
    # Both take an equal part of everything else, but for a microsecond that cannot be halved.
    assert abs(spent[second] - spent[first] - 2 * 700) <= 4
    assert sum(spent.values()) == bench.loop.busy_us


def test_load_time_is_reported_for_waiting_requests_but_not_charged() -> None:
    bench = Bench()
    bench.engines["small"].load_us = 5_000_000
    early = bench.submit()
    bench.clock.us += 250

    bench.finish()
    late = bench.submit()
    bench.finish()

    assert bench.outcomes[early].timings.load_us == 5_000_000
    assert bench.outcomes[early].usage.gpu_us < 5_000
    assert bench.outcomes[early].timings.first_token_us > 5_000_750
    assert bench.outcomes[late].timings.load_us == 0


def test_a_model_that_cannot_be_loaded_fails_its_requests_now_and_later() -> None:
    bench = Bench()
    bench.engines["small"].fails_to_load = True
    early = bench.submit()

    bench.finish()
    late = bench.submit()
    bench.finish()

    for request_id in (early, late):
        outcome = bench.outcomes[request_id]
        assert isinstance(outcome, Failed)
        assert outcome.code == "model_load_failed"
        assert "weights" not in outcome.message


def test_events_of_streamed_requests_only_are_forwarded() -> None:
    bench = Bench().load()
    quiet = bench.submit(steps=3, stream=False)
    read = bench.submit(steps=3, stream=True)

    bench.finish()

    assert quiet not in bench.events
    assert len(bench.events[read]) == 3
    assert bench.outcomes[quiet].timings.tokens == 3
    assert bench.outcomes[quiet].timings.first_token_us > 500


def test_deadlines_of_jobs_that_have_ended_are_not_kept() -> None:
    bench = Bench().load()
    for _ in range(1000):
        bench.submit(deadline_ms=10**15)
        bench.finish()

    assert len(bench.loop._deadlines) < 200
    late = bench.submit(steps=10**6, deadline_ms=bench.clock.us // 1000 + 50)
    bench.finish()
    assert isinstance(bench.outcomes[late], Cancelled)

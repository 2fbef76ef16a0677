"""Cooperative batching: which calls are batched, and which runs wait, fail or are stopped."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any

import pytest
import torch

from tests.workers.driving import PhaseNames
from workers import pulse
from workers.engines.batch_order import MEASURED_MIN, SHAPES_MAX, BatchSizes
from workers.engines.cooperative_batching import (
    CooperativeBatcher,
    PipelineRun,
    Stopped,
    TurnResult,
)
from workers.engines.devices import DeviceProgress


class Model:
    """Doubles its input and records the rows of each call."""

    def __init__(self, *, rows_max: int = 100) -> None:
        self.batches: list[int] = []
        self.rows_max = rows_max

    def __call__(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        if len(x) > self.rows_max:
            raise torch.OutOfMemoryError("too many")
        if x.isnan().any():
            raise RuntimeError("not a number")
        self.batches.append(len(x))
        return x * 2 + time.reshape(-1, 1)


def _steps(call: Any, value: float, count: int, *, rows: int = 1) -> Any:
    def work() -> torch.Tensor:
        x = torch.full((rows, 3), value)
        for turn in range(count):
            x = call(x, torch.tensor(float(turn)))
        return x

    return work


def _run_all(batcher: CooperativeBatcher, most: int = 100) -> list[TurnResult]:
    turns = []
    for _ in range(most):
        turn = batcher.turn(PhaseNames().phase)
        turns.append(turn)
        if turn.point is None:
            return turns
    raise AssertionError("the runs did not end")


def test_runs_of_different_lengths_share_calls() -> None:
    model, batcher = Model(), CooperativeBatcher(rows_max=16)
    call = batcher.batch_point("model", model, "forward")
    runs = [PipelineRun(_steps(call, float(i), count)) for i, count in enumerate((2, 5, 3))]
    for run in runs:
        batcher.start(run)
    turns = _run_all(batcher)
    assert model.batches == [3, 3, 2, 1, 1]
    assert [len(turn.rows) for turn in turns] == [3, 3, 2, 1, 1, 0]
    for run, count in zip(runs, (2, 5, 3), strict=True):
        alone = _steps(Model(), float(runs.index(run)), count)()
        assert torch.equal(run.result, alone)


def test_late_run_joins_at_the_next_call() -> None:
    model, batcher = Model(), CooperativeBatcher(rows_max=16)
    call = batcher.batch_point("model", model, "forward")
    batcher.start(PipelineRun(_steps(call, 1.0, 4)))
    batcher.turn(PhaseNames().phase)
    batcher.start(PipelineRun(_steps(call, 2.0, 4)))
    _run_all(batcher)
    assert model.batches == [1, 2, 2, 2, 1]


def test_rows_are_limited_and_the_longest_waiting_call_is_first() -> None:
    model, batcher = Model(), CooperativeBatcher(rows_max=4)
    call = batcher.batch_point("model", model, "forward")
    runs = [PipelineRun(_steps(call, 1.0, 2, rows=2)) for _ in range(3)]
    for run in runs:
        batcher.start(run)
    turns = _run_all(batcher)
    assert model.batches == [4, 4, 4]
    assert all(sum(turn.rows.values()) <= 4 for turn in turns)


def test_urgent_run_is_first_while_the_other_stays_suspended() -> None:
    model, batcher = Model(), CooperativeBatcher(rows_max=1)
    call = batcher.batch_point("model", model, "forward")
    slow, urgent = PipelineRun(_steps(call, 1.0, 5)), PipelineRun(_steps(call, 2.0, 3), priority=1)
    batcher.start(slow)
    batcher.turn(PhaseNames().phase)
    batcher.start(urgent)
    for _ in range(3):
        turn = batcher.turn(PhaseNames().phase)
        assert set(turn.rows) == {id(urgent)}
    assert turn.ended == (urgent,)
    _run_all(batcher)
    assert torch.equal(slow.result, _steps(Model(), 1.0, 5)())


def test_lack_of_memory_splits_the_batch_and_fails_only_the_cause() -> None:
    model, batcher = Model(rows_max=2), CooperativeBatcher(rows_max=16)
    call = batcher.batch_point("model", model, "forward")
    fit = [PipelineRun(_steps(call, float(i), 2)) for i in range(4)]
    large = PipelineRun(_steps(call, 9.0, 2, rows=3))
    for run in (*fit, large):
        batcher.start(run)
    _run_all(batcher)
    assert isinstance(large.error, torch.OutOfMemoryError)
    assert all(run.error is None and run.result is not None for run in fit)


def test_error_fails_only_the_run_that_caused_it() -> None:
    model, batcher = Model(), CooperativeBatcher(rows_max=16)
    call = batcher.batch_point("model", model, "forward")
    good, bad = PipelineRun(_steps(call, 1.0, 3)), PipelineRun(_steps(call, float("nan"), 3))
    batcher.start(good)
    batcher.start(bad)
    _run_all(batcher)
    assert good.error is None
    assert isinstance(bad.error, RuntimeError)


def test_lost_device_fails_the_turn() -> None:
    class AcceleratorError(RuntimeError):
        pass

    def lost(x: torch.Tensor) -> torch.Tensor:
        raise AcceleratorError("gone")

    batcher = CooperativeBatcher(rows_max=4)
    call = batcher.batch_point("model", lost, "forward")
    run = PipelineRun(lambda: call(torch.zeros(1, 1)))
    batcher.start(run)
    with pytest.raises(AcceleratorError):
        batcher.turn(PhaseNames().phase)

    assert run.greenlet is not None
    run.greenlet.throw()  # the process would end here; in this one, other tests look for greenlets


def test_stopped_run_ends_where_it_is_suspended() -> None:
    model, batcher = Model(), CooperativeBatcher(rows_max=16)
    call = batcher.batch_point("model", model, "forward")
    cleaned = []

    def work() -> Any:
        try:
            return _steps(call, 1.0, 100)()
        except Exception:  # libraries cannot catch it
            return None
        finally:
            cleaned.append(True)

    stopped, other = PipelineRun(work), PipelineRun(_steps(call, 2.0, 3))
    batcher.start(stopped)
    batcher.start(other)
    batcher.turn(PhaseNames().phase)
    batcher.stop(stopped)
    assert stopped.ended
    turn = batcher.turn(PhaseNames().phase)
    assert isinstance(stopped.error, Stopped)
    assert cleaned == [True]
    assert set(turn.rows) == {id(other)}
    _run_all(batcher)
    assert model.batches == [2, 1, 1]


def test_calls_that_differ_in_shared_arguments_are_not_batched() -> None:
    seen = []

    def model(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x + table.sum()

    batcher = CooperativeBatcher(rows_max=16)
    call = batcher.batch_point("model", model, "forward")
    for table in (torch.ones(5), torch.ones(5), torch.zeros(5)):
        batcher.start(PipelineRun(lambda table=table: call(torch.zeros(1, 2), table)))
    _run_all(batcher)
    assert sorted(seen) == [1, 2]


def test_calls_from_outside_a_run_pass_through() -> None:
    call = CooperativeBatcher(rows_max=4).batch_point("model", Model(), "forward")
    assert call(torch.ones(1, 3), torch.tensor(0.0)).tolist() == [[2.0, 2.0, 2.0]]


def test_runs_execute_one_at_a_time_and_only_in_turns() -> None:
    model, batcher = Model(), CooperativeBatcher(rows_max=16)
    call = batcher.batch_point("model", model, "forward")
    executing: list[int] = []
    counts: list[int] = []

    def work() -> None:
        for turn in range(3):
            executing.append(turn)
            counts.append(len(executing))
            executing.pop()
            call(torch.zeros(1, 3), torch.tensor(0.0))

    for _ in range(5):
        batcher.start(PipelineRun(work))
    assert not counts
    _run_all(batcher)
    assert counts == [1] * 15
    assert model.batches == [5, 5, 5]


def test_time_of_preparing_a_run_is_told_apart_from_its_batch() -> None:
    now = [0.0]
    batcher = CooperativeBatcher(rows_max=4, slice_s=1000.0, now_s=lambda: now[0])

    def spend(x: torch.Tensor) -> torch.Tensor:
        now[0] += 2.0 * len(x)
        return x

    encode = batcher.batch_point("encode", spend, "preprocess")
    denoise = batcher.batch_point("denoise", spend, "forward")

    def run_of(seconds: float) -> PipelineRun:
        def work() -> None:
            now[0] += seconds
            encode(torch.zeros(1, 3))
            denoise(torch.zeros(1, 3))

        return PipelineRun(work)

    first, second, third = run_of(5.0), run_of(7.0), run_of(11.0)
    batcher.start(first)
    batcher.start(second)
    turn = batcher.turn(PhaseNames().phase)
    assert turn.prepared_s == {id(first): 5.0, id(second): 7.0}
    assert turn.preprocess_s == {id(first): 7.0, id(second): 9.0}

    batcher.start(third)
    turn = batcher.turn(PhaseNames().phase)
    assert set(turn.rows) == {id(first), id(second)}
    assert turn.point is not None
    assert turn.point.phase == "forward"
    assert turn.preprocess_s == {id(third): 11.0}
    assert batcher.turn(PhaseNames().phase).preprocess_s == {}
    _run_all(batcher)


def test_run_stopped_before_its_first_turn_never_starts() -> None:
    batcher, began = CooperativeBatcher(rows_max=4), []
    run = PipelineRun(lambda: began.append(True))
    batcher.start(run)
    batcher.stop(run)
    assert run.ended
    assert not began
    assert batcher.turn(PhaseNames().phase) == TurnResult()


def test_failed_and_stopped_runs_keep_no_tensors() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in seen))
        activations = x * 2
        seen.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("too many")

    batcher = CooperativeBatcher(rows_max=4)
    failing = batcher.batch_point("model", model, "forward")
    waiting = batcher.batch_point("other", Model(), "forward")

    def work(call: Any) -> None:
        latents = torch.zeros(1, 3)
        seen.append(weakref.ref(latents))
        call(latents, *([torch.tensor(0.0)] if call is waiting else []))

    failed = [PipelineRun(lambda: work(failing)) for _ in range(2)]
    stopped = PipelineRun(lambda: work(waiting), priority=-1)
    gc.disable()
    try:
        for run in (*failed, stopped):
            batcher.start(run)
        batcher.turn(PhaseNames().phase)
        batcher.stop(stopped)
        left = sum(one() is not None for one in seen)
    finally:
        gc.enable()
    assert alive == [3, 3, 3], "the latents of all three, and no tensor of a failed forward"
    assert left == 0
    for run in failed:
        assert isinstance(run.error, torch.OutOfMemoryError)
        assert "in model" in "".join(traceback.format_exception(run.error))


def test_gradient_mode_of_a_suspended_run_does_not_affect_others() -> None:
    seen: list[bool] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return x

    batcher = CooperativeBatcher(rows_max=1)
    call = batcher.batch_point("model", model, "forward")

    @torch.no_grad()
    def decorated(times: int) -> None:
        for _ in range(times):
            call(torch.zeros(1, 1))
        seen.append(torch.is_grad_enabled())

    for times in (3, 1, 2):
        batcher.start(PipelineRun(lambda times=times: decorated(times)))
    _run_all(batcher)
    assert seen == [False] * 9
    assert torch.is_grad_enabled()


class _Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_module_cast_after_loading_is_an_error() -> None:
    batcher, module = CooperativeBatcher(rows_max=4), _Layers()
    call = batcher.batch_point("m", module.forward, "forward", module=module)
    run = PipelineRun(lambda: call(torch.ones(1, 2)))
    batcher.start(run)
    module.to(torch.bfloat16)

    turn = batcher.turn(PhaseNames().phase)

    assert turn.ended == (run,)
    assert "m is torch.bfloat16 on cpu; it was torch.float32 on cpu" in str(run.error)


def test_layers_of_a_long_call_report_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []
    monkeypatch.setattr(pulse, "EVERY_S", 0.0)
    monkeypatch.setattr(pulse.PULSE, "send", lambda: beats.append(1))
    batcher, module = CooperativeBatcher(rows_max=4), _Layers()
    call = batcher.batch_point("vae", module.forward, "postprocess", module=module)
    batcher.start(PipelineRun(lambda: call(torch.ones(1, 2))))

    batcher.turn(PhaseNames().phase)

    assert len(beats) >= len(module.layers)


class _Event:
    """Stands in for a CUDA event: completed when the device has reached it."""

    device_is_at = 0
    recorded = 0

    def record(self) -> None:
        type(self).recorded += 1
        self.number = self.recorded

    def query(self) -> bool:
        return self.number <= self.device_is_at

    def synchronize(self) -> None:
        type(self).device_is_at = max(self.device_is_at, self.number)


def test_layers_on_a_gpu_report_progress_when_the_device_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beats: list[int] = []
    monkeypatch.setattr(pulse, "EVERY_S", 0.0)
    monkeypatch.setattr(pulse.PULSE, "send", lambda: beats.append(1))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    progress = DeviceProgress()

    for _ in range(4):
        progress.mark()
    enqueued = len(beats)
    _Event.device_is_at = 3
    progress.mark()
    reached = len(beats)
    progress.wait()

    assert (enqueued, reached, len(beats)) == (0, 3, 5)


class TimedModel(Model):
    """A model whose batches take ``fixed_s``, and ``row_s`` for each row, on a clock of its own."""

    def __init__(self, *, fixed_s: float, row_s: float) -> None:
        super().__init__()
        self.fixed_s, self.row_s, self.clock_s = fixed_s, row_s, 0.0

    def __call__(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        self.clock_s += self.fixed_s + self.row_s * len(x)
        return super().__call__(x, time)


def _complete(model: TimedModel, lengths: list[int]) -> dict[int, float]:
    """Run pipelines of so many calls; return by index when each of them ended."""
    batcher = CooperativeBatcher(rows_max=16, now_s=lambda: model.clock_s)
    call = batcher.batch_point("m", model, "forward")
    runs = [PipelineRun(_steps(call, 0.0, length), calls_left=length) for length in lengths]
    _warm(batcher, call)
    model.clock_s = 0.0
    for run in runs:
        batcher.start(run)
    ends: dict[int, float] = {}
    while len(ends) < len(runs):
        for run in batcher.turn(PhaseNames().phase).ended:
            ends[runs.index(run)] = model.clock_s
    return ends


def _warm(batcher: CooperativeBatcher, call: Any) -> None:
    """Measure a row alone, and several."""
    for rows in (1, 4):
        batcher.start(PipelineRun(_steps(call, 0.0, MEASURED_MIN, rows=rows)))
        _run_all(batcher)


def test_saturated_device_ends_the_shortest_first_and_the_last_no_later() -> None:
    lengths = [8, 2, 8, 4, 3]
    ends = _complete(TimedModel(fixed_s=0.0, row_s=1.0), lengths)

    assert [index for index, _ in sorted(ends.items(), key=lambda end: end[1])][:3] == [1, 4, 3]
    shared = sum(sum(min(other, own) for other in lengths) for own in lengths) / len(lengths)
    assert sum(ends.values()) / len(ends) < 0.8 * shared
    assert max(ends.values()) == sum(lengths)


def test_device_with_room_still_batches_everything() -> None:
    ends = _complete(TimedModel(fixed_s=1.0, row_s=0.01), [4, 4, 4, 4])

    assert max(ends.values()) == pytest.approx(4 * 1.04)


def test_long_run_is_not_starved_by_short_ones_that_keep_coming() -> None:
    model = TimedModel(fixed_s=0.0, row_s=1.0)
    batcher = CooperativeBatcher(rows_max=16, now_s=lambda: model.clock_s)
    call = batcher.batch_point("m", model, "forward")
    _warm(batcher, call)
    long = PipelineRun(_steps(call, 0.0, 10), calls_left=10)
    batcher.start(long)

    turns = 0
    while not long.ended:
        batcher.start(PipelineRun(_steps(call, 0.0, 1), calls_left=1))
        batcher.turn(PhaseNames().phase)
        turns += 1
        assert turns < 100

    assert turns >= 20, "short ones came first for a while"
    _run_all(batcher)


def test_times_of_shapes_that_never_come_again_are_forgotten() -> None:
    sizes = BatchSizes()
    for shape in range(3 * SHAPES_MAX):
        for _ in range(MEASURED_MIN):
            sizes.record(shape, 1, 1.0)
            sizes.record(shape, 4, 4.0)

    assert sizes.rows_max(0, 16) == 16
    assert sizes.rows_max(3 * SHAPES_MAX - 1, 16) == 1

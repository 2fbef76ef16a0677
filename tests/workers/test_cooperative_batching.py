"""Meeting at a function: who is called together, who waits, who fails, who is stopped."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any

import pytest
import torch

from tests.workers.driving import PhaseNames
from workers import pulse
from workers.engines.cooperative_batching import (
    CooperativeBatcher,
    PipelineRun,
    Stopped,
    TurnResult,
)


class Model:
    """Doubles its input and remembers how many rows each call had."""

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


def _play(rendezvous: CooperativeBatcher, most: int = 100) -> list[TurnResult]:
    turns = []
    for _ in range(most):
        turn = rendezvous.turn(PhaseNames().phase)
        turns.append(turn)
        if turn.point is None:
            return turns
    raise AssertionError("it does not end")


def test_runs_of_different_lengths_share_calls() -> None:
    model, rendezvous = Model(), CooperativeBatcher(rows_max=16)
    call = rendezvous.batch_point("model", model, "forward")
    runs = [PipelineRun(_steps(call, float(i), count)) for i, count in enumerate((2, 5, 3))]
    for run in runs:
        rendezvous.start(run)
    turns = _play(rendezvous)
    assert model.batches == [3, 3, 2, 1, 1]
    assert [len(turn.rows) for turn in turns] == [3, 3, 2, 1, 1, 0]
    for run, count in zip(runs, (2, 5, 3), strict=True):
        alone = _steps(Model(), float(runs.index(run)), count)()
        assert torch.equal(run.result, alone)


def test_who_comes_late_joins_at_the_next_call() -> None:
    model, rendezvous = Model(), CooperativeBatcher(rows_max=16)
    call = rendezvous.batch_point("model", model, "forward")
    rendezvous.start(PipelineRun(_steps(call, 1.0, 4)))
    rendezvous.turn(PhaseNames().phase)
    rendezvous.start(PipelineRun(_steps(call, 2.0, 4)))
    _play(rendezvous)
    assert model.batches == [1, 2, 2, 2, 1]


def test_no_more_rows_than_allowed_and_the_longest_waiting_first() -> None:
    model, rendezvous = Model(), CooperativeBatcher(rows_max=4)
    call = rendezvous.batch_point("model", model, "forward")
    runs = [PipelineRun(_steps(call, 1.0, 2, rows=2)) for _ in range(3)]
    for run in runs:
        rendezvous.start(run)
    turns = _play(rendezvous)
    assert model.batches == [4, 4, 4]
    assert all(sum(turn.rows.values()) <= 4 for turn in turns)


def test_the_urgent_goes_first_and_the_other_waits_where_it_is() -> None:
    model, rendezvous = Model(), CooperativeBatcher(rows_max=1)
    call = rendezvous.batch_point("model", model, "forward")
    slow, urgent = PipelineRun(_steps(call, 1.0, 5)), PipelineRun(_steps(call, 2.0, 3), priority=1)
    rendezvous.start(slow)
    rendezvous.turn(PhaseNames().phase)
    rendezvous.start(urgent)
    for _ in range(3):
        turn = rendezvous.turn(PhaseNames().phase)
        assert set(turn.rows) == {id(urgent)}
    assert turn.ended == (urgent,)
    _play(rendezvous)
    assert torch.equal(slow.result, _steps(Model(), 1.0, 5)())


def test_too_little_memory_splits_a_batch_and_only_the_offender_fails() -> None:
    model, rendezvous = Model(rows_max=2), CooperativeBatcher(rows_max=16)
    call = rendezvous.batch_point("model", model, "forward")
    fit = [PipelineRun(_steps(call, float(i), 2)) for i in range(4)]
    large = PipelineRun(_steps(call, 9.0, 2, rows=3))
    for run in (*fit, large):
        rendezvous.start(run)
    _play(rendezvous)
    assert isinstance(large.error, torch.OutOfMemoryError)
    assert all(run.error is None and run.result is not None for run in fit)


def test_an_error_costs_only_the_run_that_caused_it() -> None:
    model, rendezvous = Model(), CooperativeBatcher(rows_max=16)
    call = rendezvous.batch_point("model", model, "forward")
    good, bad = PipelineRun(_steps(call, 1.0, 3)), PipelineRun(_steps(call, float("nan"), 3))
    rendezvous.start(good)
    rendezvous.start(bad)
    _play(rendezvous)
    assert good.error is None
    assert isinstance(bad.error, RuntimeError)


def test_a_lost_device_is_everybodys() -> None:
    class AcceleratorError(RuntimeError):
        pass

    def lost(x: torch.Tensor) -> torch.Tensor:
        raise AcceleratorError("gone")

    rendezvous = CooperativeBatcher(rows_max=4)
    call = rendezvous.batch_point("model", lost, "forward")
    rendezvous.start(PipelineRun(lambda: call(torch.zeros(1, 1))))
    with pytest.raises(AcceleratorError):
        rendezvous.turn(PhaseNames().phase)


def test_a_stopped_run_ends_where_it_is() -> None:
    model, rendezvous = Model(), CooperativeBatcher(rows_max=16)
    call = rendezvous.batch_point("model", model, "forward")
    cleaned = []

    def work() -> Any:
        try:
            return _steps(call, 1.0, 100)()
        except Exception:  # no library keeps it
            return None
        finally:
            cleaned.append(True)

    stopped, other = PipelineRun(work), PipelineRun(_steps(call, 2.0, 3))
    rendezvous.start(stopped)
    rendezvous.start(other)
    rendezvous.turn(PhaseNames().phase)
    rendezvous.stop(stopped)
    assert stopped.ended
    turn = rendezvous.turn(PhaseNames().phase)
    assert isinstance(stopped.error, Stopped)
    assert cleaned == [True]
    assert set(turn.rows) == {id(other)}
    _play(rendezvous)
    assert model.batches == [2, 1, 1]


def test_calls_that_differ_in_what_has_no_rows_are_made_apart() -> None:
    seen = []

    def model(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x + table.sum()

    rendezvous = CooperativeBatcher(rows_max=16)
    call = rendezvous.batch_point("model", model, "forward")
    for table in (torch.ones(5), torch.ones(5), torch.zeros(5)):
        rendezvous.start(PipelineRun(lambda table=table: call(torch.zeros(1, 2), table)))
    _play(rendezvous)
    assert sorted(seen) == [1, 2]


def test_others_call_as_if_nothing_were_wrapped() -> None:
    call = CooperativeBatcher(rows_max=4).batch_point("model", Model(), "forward")
    assert call(torch.ones(1, 3), torch.tensor(0.0)).tolist() == [[2.0, 2.0, 2.0]]


def test_one_run_goes_on_at_a_time_and_none_before_the_turn() -> None:
    model, rendezvous = Model(), CooperativeBatcher(rows_max=16)
    call = rendezvous.batch_point("model", model, "forward")
    going: list[int] = []
    most: list[int] = []

    def work() -> None:
        for turn in range(3):
            going.append(turn)
            most.append(len(going))
            going.pop()
            call(torch.zeros(1, 3), torch.tensor(0.0))

    for _ in range(5):
        rendezvous.start(PipelineRun(work))
    assert not most
    _play(rendezvous)
    assert most == [1] * 15
    assert model.batches == [5, 5, 5]


def test_who_is_stopped_before_the_first_turn_never_begins() -> None:
    rendezvous, began = CooperativeBatcher(rows_max=4), []
    run = PipelineRun(lambda: began.append(True))
    rendezvous.start(run)
    rendezvous.stop(run)
    assert run.ended
    assert not began
    assert rendezvous.turn(PhaseNames().phase) == TurnResult()


def test_what_fails_or_is_stopped_keeps_no_tensor() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in seen))
        activations = x * 2
        seen.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("too many")

    rendezvous = CooperativeBatcher(rows_max=4)
    failing = rendezvous.batch_point("model", model, "forward")
    waiting = rendezvous.batch_point("other", Model(), "forward")

    def work(site: Any) -> None:
        latents = torch.zeros(1, 3)
        seen.append(weakref.ref(latents))
        site(latents, *([torch.tensor(0.0)] if site is waiting else []))

    failed = [PipelineRun(lambda: work(failing)) for _ in range(2)]
    stopped = PipelineRun(lambda: work(waiting), priority=-1)
    gc.disable()
    try:
        for run in (*failed, stopped):
            rendezvous.start(run)
        rendezvous.turn(PhaseNames().phase)
        rendezvous.stop(stopped)
        left = sum(one() is not None for one in seen)
    finally:
        gc.enable()
    assert alive == [3, 3, 3], "the latents of all three, and nothing of a forward that failed"
    assert left == 0
    for run in failed:
        assert isinstance(run.error, torch.OutOfMemoryError)
        assert "in model" in "".join(traceback.format_exception(run.error))


def test_who_switches_gradients_off_and_parks_changes_nothing_for_the_rest() -> None:
    seen: list[bool] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return x

    rendezvous = CooperativeBatcher(rows_max=1)
    call = rendezvous.batch_point("model", model, "forward")

    @torch.no_grad()
    def decorated(times: int) -> None:
        for _ in range(times):
            call(torch.zeros(1, 1))
        seen.append(torch.is_grad_enabled())

    for times in (3, 1, 2):
        rendezvous.start(PipelineRun(lambda times=times: decorated(times)))
    _play(rendezvous)
    assert seen == [False] * 9
    assert torch.is_grad_enabled()


class _Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_module_that_was_cast_under_a_site_is_not_computed_with() -> None:
    rendezvous, module = CooperativeBatcher(rows_max=4), _Layers()
    meet = rendezvous.batch_point("m", module.forward, "forward", module=module)
    run = PipelineRun(lambda: meet(torch.ones(1, 2)))
    rendezvous.start(run)
    module.to(torch.bfloat16)

    turn = rendezvous.turn(PhaseNames().phase)

    assert turn.ended == (run,)
    assert "m is torch.bfloat16 on cpu; it was torch.float32 on cpu" in str(run.error)


def test_the_layers_of_a_long_call_show_that_it_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []
    monkeypatch.setattr(pulse, "EVERY_S", 0.0)
    monkeypatch.setattr(pulse.PULSE, "send", lambda: beats.append(1))
    rendezvous, module = CooperativeBatcher(rows_max=4), _Layers()
    meet = rendezvous.batch_point("vae", module.forward, "postprocess", module=module)
    rendezvous.start(PipelineRun(lambda: meet(torch.ones(1, 2))))

    rendezvous.turn(PhaseNames().phase)

    assert len(beats) >= len(module.layers)

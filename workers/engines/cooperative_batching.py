"""Runs unmodified pipelines side by side, and what they ask of the same model at once as one batch.

Each run is a greenlet that executes ordinary library code. Where that calls a model, at a ``site``,
the run parks; when every run has parked or ended, one ``turn`` takes parked calls that fit
together, makes one call of them, and hands each its rows. All of this happens in the one thread
that calls ``turn``, so exactly one run goes on at any time: libraries keep state in places that
they share, tokenizers for one. A run can be stopped wherever it parks. What a site computes must
treat the rows of a batch separately; that is proven for each pipeline by a test before it may run
here.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from greenlet import getcurrent, greenlet

from workers.engines.batching import can_batch, concatenate, rows_of, signature, split
from workers.pulse import PULSE

Phase: TypeAlias = Literal["preprocess", "forward", "postprocess"]


class Stopped(BaseException):
    """Raised in a run that is to end. No ``Exception``, so that no library keeps it."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPoint:
    """A function that runs call: a model's forward, an autoencoder's encode or decode."""

    name: str
    function: Callable[..., Any]
    phase: Phase
    batched: bool = True


@dataclass(slots=True, eq=False)
class PipelineRun:
    """One execution of a pipeline. ``priority``: of those parked the higher goes first."""

    work: Callable[[], Any]
    priority: int = 0
    result: Any = None
    error: BaseException | None = None
    ended: bool = False
    stopping: bool = False
    greenlet: _RunGreenlet | None = None
    """Where it is, until it has ended."""


class _RunGreenlet(greenlet):
    def __init__(self, pipeline_run: PipelineRun) -> None:
        super().__init__(_execute)
        self.pipeline_run = pipeline_run


@dataclass(slots=True, eq=False)
class _Call:
    """A parked call; ``answer`` is its rows of the result, ``error`` what was raised instead."""

    run: PipelineRun
    point: BatchPoint
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    signature: object
    order: int
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What one turn did: in which phase, for whom with how many rows, and who has ended."""

    point: BatchPoint | None = None
    rows: dict[int, int] = field(default_factory=dict)
    """By ``id`` of the run."""
    ended: tuple[PipelineRun, ...] = ()


class CooperativeBatcher:
    """``rows_max``: of one batch. All of it is for one thread."""

    def __init__(self, *, rows_max: int) -> None:
        self._rows_max = rows_max
        self._new: list[PipelineRun] = []
        self._suspended: list[_Call] = []
        self._ended: list[PipelineRun] = []
        self._order = 0
        self._turn = getcurrent()

    def batch_point(
        self,
        name: str,
        function: Callable[..., Any],
        phase: Phase,
        *,
        batched: bool = True,
        module: torch.nn.Module | None = None,
    ) -> Callable[..., Any]:
        """Wrap a function so that runs meet there; called by anybody else it is as before.

        A ``module`` is what the function computes with. All runs share it, so it must stay in the
        precision and on the device that it has now, and its layers show that they get on.
        """
        if module is not None:
            function = _check_placement(name, function, module)
            for layer in _layers(module, deep=phase != "forward"):
                layer.register_forward_pre_hook(_beat)
        point = BatchPoint(name, function, phase, batched)

        def call(*args: Any, **kwargs: Any) -> Any:
            here = getcurrent()
            if not isinstance(here, _RunGreenlet):
                return function(*args, **kwargs)
            return self._suspend(here, point, args, kwargs)

        return call

    def start(self, run: PipelineRun) -> None:
        """Let a run begin with the next turn."""
        self._new.append(run)

    def stop(self, *runs: PipelineRun) -> None:
        """End runs where they are, between two turns; no turn reports them."""
        for run in runs:
            run.stopping = True
        taken = [run for run in runs if self._withdraw(run)]
        self._resume(taken)
        self._ended = [run for run in self._ended if run not in taken]

    def turn(self, phase: Callable[[Phase], Any]) -> TurnResult:
        """Make one call for as many runs as fit together, and let them go on until they park again.

        ``phase`` is entered while the call and what follows it take their time.
        """
        new, self._new = self._new, []
        if new:
            with phase("preprocess"):
                self._resume(new)
        group = self._select()
        if not group:
            return TurnResult(ended=self._take_ended())
        point = group[0].point
        with phase(point.phase):
            with torch.no_grad():
                self._compute(point, group)
            self._resume([call.run for call in group])
        rows: dict[int, int] = {}
        for call in group:
            rows[id(call.run)] = call.rows
        return TurnResult(point, rows, self._take_ended())

    def _suspend(
        self, here: _RunGreenlet, point: BatchPoint, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if here.pipeline_run.stopping:
            raise Stopped
        rows = rows_of(args, kwargs)
        self._order += 1
        call = _Call(
            here.pipeline_run,
            point,
            args,
            kwargs,
            rows,
            (point, *signature(args, kwargs, rows)),
            self._order,
        )
        self._suspended.append(call)
        self._turn.switch()
        if here.pipeline_run.stopping:
            raise Stopped
        if call.error is not None:
            raise call.error
        return call.result

    def _resume(self, runs: Sequence[PipelineRun]) -> None:
        """Let runs go on, one after the other, until each has parked or ended."""
        # What libraries switch about gradients is a thread's: all see it as it is here, and put
        # it back to that, in whichever order they go on.
        self._turn = getcurrent()
        with torch.no_grad():
            for run in runs:
                PULSE.beat()
                if run.greenlet is None:
                    run.greenlet = _RunGreenlet(run)
                run.greenlet.parent = self._turn
                run.greenlet.switch(run)
                if run.ended:
                    run.greenlet = None
                    self._ended.append(run)

    def _withdraw(self, run: PipelineRun) -> bool:
        """Whether a run was to begin or was parked; it is so no longer."""
        if run in self._new:
            self._new.remove(run)
            return True
        others = [call for call in self._suspended if call.run is not run]
        was_suspended = len(others) < len(self._suspended)
        self._suspended = others
        return was_suspended

    def _take_ended(self) -> tuple[PipelineRun, ...]:
        ended, self._ended = tuple(self._ended), []
        return ended

    def _select(self) -> list[_Call]:
        """The call that has waited longest among the most urgent, and those that fit to it."""
        if not self._suspended:
            return []
        first = min(self._suspended, key=lambda call: (-call.run.priority, call.order))
        group, rows = [first], first.rows
        if first.point.batched:
            others = sorted(
                (call for call in self._suspended if call is not first),
                key=lambda call: (-call.run.priority, call.order),
            )
            for call in others:
                if call.signature != first.signature or rows + call.rows > self._rows_max:
                    continue
                if can_batch(
                    (first.args, first.kwargs), (call.args, call.kwargs), first.rows, call.rows
                ):
                    group.append(call)
                    rows += call.rows
        chosen = set(map(id, group))
        self._suspended = [call for call in self._suspended if id(call) not in chosen]
        return group

    def _compute(self, point: BatchPoint, group: Sequence[_Call]) -> None:
        """Compute a group as one; if that fails, in halves, until only the offender fails."""
        try:
            if len(group) == 1:
                call = group[0]
                call.result = point.function(*call.args, **call.kwargs)
                return
            rows = [call.rows for call in group]
            args, kwargs = concatenate([(call.args, call.kwargs) for call in group], rows)
            for call, part in zip(group, split(point.function(*args, **kwargs), rows), strict=True):
                call.result = part
        except Exception as error:
            if type(error).__name__ == "AcceleratorError":  # sticky: the device is gone
                raise
            if len(group) == 1:
                group[0].error = error
                _drop_frames(error)
                return
        else:
            return
        # Outside the handler, whose traceback would keep the failed batch's memory.
        half = len(group) // 2
        self._compute(point, group[:half])
        self._compute(point, group[half:])


def _check_placement(
    name: str, function: Callable[..., Any], module: torch.nn.Module
) -> Callable[..., Any]:
    """Refuse to compute with a module that was cast or moved since it was put under a site."""
    expected = _placement(module)

    def compute(*args: Any, **kwargs: Any) -> Any:
        if (found := _placement(module)) != expected:
            raise RuntimeError(f"{name} is {found}; it was {expected} when it was loaded")
        return function(*args, **kwargs)

    return compute


def _placement(module: torch.nn.Module) -> str:
    first = next(module.parameters(), None)
    return "without weights" if first is None else f"{first.dtype} on {first.device}"


def _layers(module: torch.nn.Module, *, deep: bool) -> Iterator[torch.nn.Module]:
    """The layers of a network: few for what runs in every step, all for what runs once."""
    for part in module.modules() if deep else module.children():
        if isinstance(part, torch.nn.ModuleList):
            yield from part


def _beat(*_: Any) -> None:
    PULSE.beat()


def _execute(run: PipelineRun) -> None:
    try:
        if run.stopping:
            raise Stopped
        run.result = run.work()
    except BaseException as error:  # the turn reports it
        run.error = error
        _drop_frames(error)
    run.ended = True


def _drop_frames(error: BaseException) -> None:
    """Keep of where an exception comes from the words only: frames keep a forward's tensors."""
    said = "" if isinstance(error, Stopped) else "".join(traceback.format_exception(error))
    error.__traceback__ = error.__context__ = error.__cause__ = None
    error.__notes__ = [said]

"""Cooperative batching: runs unmodified pipelines side by side and joins their calls of a model.

Each run is a greenlet that executes ordinary library code. When it calls a function wrapped as a
batch point, the run is suspended. When all runs are suspended or have ended, ``turn`` selects
suspended calls that can be batched, executes them as one call, and resumes each run with its rows
of the result. Everything happens in the thread that calls ``turn``, and only one run executes at
any time: libraries, tokenizers for one, keep shared state. A run can be stopped wherever it is
suspended. The function of a batch point must treat the rows of a batch independently; a test proves
that for each pipeline before it is supported.

A batch that takes long is interrupted between layers and continued by the next turn; until it has
ended, no other batch runs. Its runs can be stopped meanwhile.
"""

from __future__ import annotations

import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from greenlet import getcurrent, greenlet

from workers.engines.batch_memory import BatchMemory
from workers.engines.batch_order import BatchSizes, urgency
from workers.engines.batching import can_batch, concatenate, rows_of, signature, split
from workers.engines.interrupting import SLICE_S, Interruptible, add_hooks
from workers.pulse import PULSE

Phase: TypeAlias = Literal["preprocess", "transfer", "forward", "postprocess"]


class Stopped(BaseException):
    """Raised in a run to stop it. Not an ``Exception``, so that no library catches it."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPoint:
    """A function whose calls are batched: a model's forward, an autoencoder's encode or decode."""

    name: str
    function: Callable[..., Any]
    phase: Phase
    batched: bool = True
    switch: Callable[[Any], None] | None = None
    """Prepares the function for the ``variant`` of the runs of a batch, if it depends on that."""
    bring: Callable[[], None] | None = None
    """Brings the weights to the device, if they may be elsewhere between two batches."""


@dataclass(slots=True, eq=False)
class PipelineRun:
    """One execution of a pipeline. Suspended runs of higher ``priority`` are resumed first."""

    work: Callable[[], Any]
    priority: int = 0
    variant: Any = None
    """What a network is switched to for this run, such as its adapters; hashable."""
    calls_left: int = 0
    """Expected calls of the phase ``forward``. Of equal priority, the run with fewest comes first;
    0: unknown, and calls come in their order."""
    passed_over: int = 0
    """Number of batches that ran while it was suspended."""
    result: Any = None
    error: BaseException | None = None
    ended: bool = False
    stopping: bool = False
    greenlet: _RunGreenlet | None = None
    """The greenlet that executes the run, from its first turn until it has ended."""


class _RunGreenlet(greenlet):
    def __init__(self, pipeline_run: PipelineRun) -> None:
        super().__init__(_execute)
        self.pipeline_run = pipeline_run


@dataclass(slots=True, eq=False)
class _Call:
    """A suspended call; ``result`` is its rows of the batch, ``error`` the exception instead."""

    run: PipelineRun
    point: BatchPoint
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    signature: object
    order: int
    result: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    """Calls that are executed as one; ``undelivered`` are those whose runs are still suspended."""

    group: list[_Call]
    undelivered: list[_Call]
    computation: Interruptible
    spent_s: float = 0.0

    @property
    def point(self) -> BatchPoint:
        return self.group[0].point


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Result of one turn: the batch point that ran (its ``phase`` is where the time went), the rows
    of each run, the runs that ended, and the time in which new runs were prepared."""

    point: BatchPoint | None = None
    rows: dict[int, int] = field(default_factory=dict)
    """Number of rows of each run, by ``id(run)``."""
    ended: tuple[PipelineRun, ...] = ()
    prepared_s: dict[int, float] = field(default_factory=dict)
    """Time in ``preprocess`` until a new run was suspended for the first time, by ``id(run)``."""
    batch_s: float = 0.0
    """Duration of this turn's part of the batch, and of what its runs did after it."""

    @property
    def preprocess_s(self) -> dict[int, float]:
        """Each run's time in the phase ``preprocess``, by ``id(run)``; empty without new runs."""
        spent = dict(self.prepared_s)
        if spent and self.point is not None and self.point.phase == "preprocess":
            total = sum(self.rows.values())
            for key, rows in self.rows.items():
                spent[key] = spent.get(key, 0.0) + self.batch_s * rows / total
        return spent


class CooperativeBatcher:
    """``rows_max``: maximum rows of a batch. ``slice_s``: time after which one is interrupted,
    ``SLICE_S`` by default. Not thread-safe."""

    def __init__(
        self,
        *,
        rows_max: int,
        slice_s: float | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows_max = rows_max
        self._slice_s = SLICE_S if slice_s is None else slice_s
        self._now_s = now_s
        self._sizes = BatchSizes()
        self._new: list[PipelineRun] = []
        self._suspended: list[_Call] = []
        self._ended: list[PipelineRun] = []
        self.memory: BatchMemory | None = None
        """What bounds batches by memory; None: only their rows are bounded."""
        self._batch: _Batch | None = None
        """The batch that has begun and not ended."""
        self._hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
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
        switch: Callable[[Any], None] | None = None,
        bring: Callable[[], None] | None = None,
    ) -> Callable[..., Any]:
        """Wrap a function so that calls from runs are batched; other calls pass through.

        ``module``: what the function computes with. All runs share it, so its precision and device
        must not change. Between its layers a batch is interrupted. ``switch``: only runs of the
        same ``variant`` share a batch, and it is called with theirs first. ``bring``: called before
        each batch, in the phase ``transfer``.
        """
        if bring is not None:
            bring()  # the weights are examined where they will be
        if module is not None:
            function = _check_placement(name, function, module)
            if module not in self._hooked:
                self._hooked.add(module)
                add_hooks(module)
        point = BatchPoint(name, function, phase, batched, switch, bring)

        def call(*args: Any, **kwargs: Any) -> Any:
            here = getcurrent()
            if not isinstance(here, _RunGreenlet):
                if bring is not None:
                    bring()
                return function(*args, **kwargs)
            return self._suspend(here, point, args, kwargs)

        return call

    def start(self, run: PipelineRun) -> None:
        """Start a run in the next turn."""
        self._new.append(run)

    def stop(self, *runs: PipelineRun) -> None:
        """Stop runs where they are, between two turns; no ``TurnResult`` contains them."""
        for run in runs:
            run.stopping = True
        withdrawn = [run for run in runs if self._withdraw(run)]
        self._resume(withdrawn)
        self._ended = [run for run in self._ended if run not in withdrawn]
        if self._batch is not None and not self._batch.undelivered:
            self._batch.computation.abandon()
            self._batch = None

    def forget(self) -> None:
        """Forget the durations of batches: their shapes refer to batch points, which refer to the
        weights. For an engine that is unloaded."""
        self._sizes = BatchSizes()
        self.memory = None

    def turn(self, phase: Callable[[Phase], Any]) -> TurnResult:
        """Execute one batch of calls, or a slice of it, then resume its runs until they are
        suspended again.

        ``phase`` is entered around the call and the code that runs after it.
        """
        prepared_s: dict[int, float] = {}
        if self._batch is None:
            prepared_s = self._prepare(phase)
            self._batch = self._begin(phase)
        batch = self._batch
        if batch is None:
            return TurnResult(ended=self._take_ended(), prepared_s=prepared_s)
        rows = {id(call.run): call.rows for call in batch.group if not call.run.stopping}
        started_s = self._now_s()
        try:
            with phase(batch.point.phase):
                if self._run_slice(batch):
                    self._deliver(batch)
        except BaseException:
            self._batch = None
            raise
        batch_s = self._now_s() - started_s
        batch.spent_s += batch_s
        if batch.computation.dead and not batch.undelivered:
            self._batch = None
            if all(call.error is None for call in batch.group):
                total = sum(call.rows for call in batch.group)
                self._sizes.record(batch.group[0].signature, total, batch.spent_s)
        return TurnResult(batch.point, rows, self._take_ended(), prepared_s, batch_s)

    def _prepare(self, phase: Callable[[Phase], Any]) -> dict[int, float]:
        """Start new runs until the slice is over. Return the time of each, by ``id(run)``."""
        spent_s: dict[int, float] = {}
        if self._new:
            with phase("preprocess"):
                while self._new and sum(spent_s.values()) <= self._slice_s:
                    run, began_s = self._new.pop(0), self._now_s()
                    self._resume([run])
                    spent_s[id(run)] = self._now_s() - began_s
        return spent_s

    def _begin(self, phase: Callable[[Phase], Any]) -> _Batch | None:
        group = self._select()
        if not group:
            return None
        point = group[0].point
        with phase("transfer") if point.bring is not None else nullcontext():
            is_here = _bring(point, group)
        if self.memory is not None:
            self.memory.begin()
        computation = Interruptible(
            (lambda: self._compute(point, group)) if is_here else (lambda: None),
            slice_s=self._slice_s,
            now_s=self._now_s,
        )
        return _Batch(group, list(group), computation)

    def _run_slice(self, batch: _Batch) -> bool:
        """Compute a slice of a batch. Return whether it is computed."""
        if self.memory is None or batch.computation.dead:
            return batch.computation.run_slice()
        self.memory.start_slice()
        ended = batch.computation.run_slice()
        self.memory.stop_slice()
        if ended and all(call.error is None for call in batch.group):
            rows = sum(call.rows for call in batch.group)
            self.memory.end(batch.group[0].signature, rows)
        return ended

    def _deliver(self, batch: _Batch) -> None:
        """Resume the runs of a computed batch, at least one, until the slice is over."""
        started_s = self._now_s()
        while batch.undelivered:
            self._resume([batch.undelivered.pop(0).run])
            if self._now_s() - started_s > self._slice_s:
                return

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
            (
                point,
                None if point.switch is None else here.pipeline_run.variant,
                *signature(args, kwargs, rows),
            ),
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
        """Resume runs one by one, each until it is suspended or has ended."""
        # The gradient mode belongs to the thread. Libraries switch it and restore what they found,
        # so every run must find the same mode, in whichever order runs are resumed.
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
        """Remove a run from the new or suspended ones. Return whether it was among them."""
        if run in self._new:
            self._new.remove(run)
            return True
        for calls in (self._suspended, self._batch.undelivered if self._batch is not None else []):
            for call in calls:
                if call.run is run:
                    calls.remove(call)
                    return True
        return False

    def _take_ended(self) -> tuple[PipelineRun, ...]:
        ended, self._ended = tuple(self._ended), []
        return ended

    def _select(self) -> list[_Call]:
        """Select calls to batch: of the highest priority, then in their order.

        So runs stay in step, and meet in large batches. Where larger batches gain nothing, the runs
        with the least work left come first instead, and only as many as gain.
        """
        if not self._suspended:
            return []
        calls = sorted(self._suspended, key=lambda call: (-call.run.priority, call.order))
        if self._is_saturated(calls[0]):
            calls.sort(key=self._place)
        first, *others = calls
        group, rows = [first], first.rows
        if first.point.batched:
            rows_max = self._sizes.rows_max(first.signature, self._rows_max)
            if self.memory is not None:
                rows_max = self.memory.rows_max(first.signature, rows_max)
            for call in others:
                if call.signature != first.signature or rows + call.rows > rows_max:
                    continue
                if can_batch(
                    (first.args, first.kwargs), (call.args, call.kwargs), first.rows, call.rows
                ):
                    group.append(call)
                    rows += call.rows
        chosen = set(map(id, group))
        self._suspended = [call for call in self._suspended if id(call) not in chosen]
        for call in self._suspended:
            call.run.passed_over += self._is_saturated(call)
        if first.point.phase == "forward":
            for call in group:
                call.run.calls_left = max(call.run.calls_left - 1, 0)
        return group

    def _is_saturated(self, call: _Call) -> bool:
        """Whether batches of a call's shape are known to gain nothing beyond some rows."""
        rows_max = self._sizes.rows_max(call.signature, self._rows_max)
        return call.point.batched and rows_max < self._rows_max

    def _place(self, call: _Call) -> tuple[float, bool, float, int]:
        """Order calls of a saturated device: by priority, then by the work left of their runs."""
        run, waits = call.run, not self._is_saturated(call)
        return -run.priority, waits, urgency(run.calls_left, run.passed_over), call.order

    def _compute(self, point: BatchPoint, group: Sequence[_Call]) -> None:
        """Execute calls as one batch; if that fails, halve it until only the cause fails."""
        try:
            if point.switch is not None:
                point.switch(group[0].run.variant)
            if len(group) == 1:
                call = group[0]
                call.result = point.function(*call.args, **call.kwargs)
                return
            rows = [call.rows for call in group]
            args, kwargs = concatenate([(call.args, call.kwargs) for call in group], rows)
            for call, part in zip(group, split(point.function(*args, **kwargs), rows), strict=True):
                call.result = part
        except Exception as error:
            if type(error).__name__ == "AcceleratorError":  # sticky: the device is lost
                raise
            if len(group) == 1:
                group[0].error = error
                _drop_frames(error)
                return
        else:
            return
        # Outside the handler: its traceback would keep the failed batch in memory.
        half = len(group) // 2
        self._compute(point, group[:half])
        self._compute(point, group[half:])


def _bring(point: BatchPoint, group: Sequence[_Call]) -> bool:
    """Bring the weights of a batch point. If that fails, fail the calls and return False."""
    try:
        if point.bring is not None:
            point.bring()
    except Exception as error:
        if type(error).__name__ == "AcceleratorError":  # sticky: the device is lost
            raise
        for call in group:
            call.error = error
        _drop_frames(error)
        return False
    return True


def is_in_run() -> bool:
    """Whether the calling code is part of a run, so that a batch point would suspend it."""
    return isinstance(getcurrent(), _RunGreenlet)


def _check_placement(
    name: str, function: Callable[..., Any], module: torch.nn.Module
) -> Callable[..., Any]:
    """Wrap a function to raise if its module was cast or moved since it was loaded."""
    expected = _placement(module)

    def compute(*args: Any, **kwargs: Any) -> Any:
        if (found := _placement(module)) != expected:
            raise RuntimeError(f"{name} is {found}; it was {expected} when it was loaded")
        return function(*args, **kwargs)

    return compute


def _placement(module: torch.nn.Module) -> str:
    first = next(module.parameters(), None)
    return "without weights" if first is None else f"{first.dtype} on {first.device}"


def _execute(run: PipelineRun) -> None:
    try:
        if run.stopping:
            raise Stopped
        run.result = run.work()
    except BaseException as error:  # reported by the turn
        run.error = error
        _drop_frames(error)
    run.ended = True


def _drop_frames(error: BaseException) -> None:
    """Replace an exception's traceback by its text: frames would keep a forward's tensors alive."""
    text = "" if isinstance(error, Stopped) else "".join(traceback.format_exception(error))
    error.__traceback__ = error.__context__ = error.__cause__ = None
    error.__notes__ = [text]

"""Splits the time of a diffusion step into forward pass, pipeline code and loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from benchmarks.diffusion_runners import Arrival, Ours, Pipeline, Setting, wait_for_device
from workers.engines import cooperative_batching
from workers.engines.batching import Call, concatenate, rows_of
from workers.engines.cooperative_batching import CooperativeBatcher, Phase, PipelineRun
from workers.engines.diffusion.families import DENOISERS


def concatenated_and_plain_s(
    alone: Pipeline, setting: Setting, *, rounds: int
) -> tuple[list[float], list[float], int]:
    """Measure the same rows as several concatenated calls and as one call, in seconds. Return the
    number of rows too."""
    denoiser = _denoiser(alone)
    calls = _calls(alone, denoiser, setting.together)
    rows = [rows_of(*call) for call in calls]
    batcher = CooperativeBatcher(rows_max=sum(rows))
    point = batcher.batch_point("denoiser", denoiser.forward, "forward")
    for args, kwargs in calls:
        batcher.start(PipelineRun(functools.partial(_repeat, point, args, kwargs, rounds + 1)))
    args, kwargs = concatenate(calls, rows)
    concatenated: list[float] = []
    plain: list[float] = []
    for _ in range(rounds + 1):
        concatenated.append(_timed(setting, lambda: batcher.turn(_no_phase)))
        with torch.no_grad():
            plain.append(_timed(setting, lambda: denoiser.forward(*args, **kwargs)))
    return concatenated[1:], plain[1:], sum(rows)


def step_parts(
    alone: Pipeline, setting: Setting, *, requests: int, steps: int
) -> list[tuple[float, float, float]]:
    """Measure each step shared by all requests: total, forward pass and pipeline code, in seconds.
    None is interrupted.

    Pipeline code is what a pipeline runs between two of its calls of the denoiser.
    """
    watch = _Watch(setting.now_s)
    whole = mock.patch.object(cooperative_batching, "SLICE_S", math.inf)
    with whole, _replaced(type(_denoiser(alone)), watch.inner):
        runner = Ours(setting)
    denoiser = runner.engine.denoiser
    denoiser.forward = watch.outer(denoiser.forward)
    for number in range(requests):
        runner.admit(Arrival(number, "a red circle", steps, 0.0))
    batches = runner.engine.result.batches
    parts: list[tuple[float, float, float]] = []
    while not runner.loop.idle:
        before, forward_s, own_s = len(batches), watch.forward_s, watch.own_s
        took_s = _timed(setting, runner.loop.turn)
        if len(batches) > before and batches[-1] == requests:
            parts.append((took_s, watch.forward_s - forward_s, watch.own_s - own_s))
    return parts[1:-1] or parts


class _Watch:
    """Times the denoiser's forward pass inside the batcher, and the pipelines outside.

    Only one pipeline runs at a time, so the next call comes from the one that was resumed last.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.forward_s = 0.0
        self.own_s = 0.0
        self._left_s: float | None = None

    def inner(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            started = self._now_s()
            answer = function(*args, **kwargs)
            wait_for_device()
            self.forward_s += self._now_s() - started
            return answer

        return forward

    def outer(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._left_s is not None:
                self.own_s += self._now_s() - self._left_s
            answer = function(*args, **kwargs)
            self._left_s = self._now_s()
            return answer

        return forward


def _calls(alone: Pipeline, denoiser: Any, count: int) -> list[Call]:
    """Record the arguments of the denoiser's first call for ``count`` requests."""
    calls: list[Call] = []

    def record(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return function(self, *args, **kwargs)

        return forward

    with _replaced(type(denoiser), record):
        for number in range(count):
            alone.generate([Arrival(number, "a red circle", 1, 0.0)])
    return calls


def _denoiser(alone: Pipeline) -> Any:
    return next(
        part for name in DENOISERS if (part := getattr(alone.pipeline, name, None)) is not None
    )


@contextmanager
def _replaced(
    kind: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Temporarily wrap ``forward`` of a class of models."""
    own = kind.forward
    kind.forward = wrap(own)
    try:
        yield
    finally:
        kind.forward = own


def _repeat(point: Callable[..., Any], args: Any, kwargs: Any, times: int) -> None:
    for _ in range(times):
        point(*args, **kwargs)


def _no_phase(_: Phase) -> AbstractContextManager[None]:
    return nullcontext()


def _timed(setting: Setting, call: Callable[[], Any]) -> float:
    started_s = setting.now_s()
    call()
    wait_for_device()
    return setting.now_s() - started_s

"""Takes a step of the diffusion engine apart: forward, the pipelines' own code, and the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from benchmarks.diffusion_players import Ask, Ours, Pipeline, Setting, wait_for_device
from workers.engines.batching import Call, concatenate, rows_of
from workers.engines.cooperative_batching import CooperativeBatcher, Phase, PipelineRun
from workers.engines.diffusion.families import DENOISERS


def fused_and_plain_s(
    alone: Pipeline, setting: Setting, *, rounds: int
) -> tuple[list[float], list[float], int]:
    """Seconds of the same rows as several calls made one and as one call, and how many rows."""
    denoiser = _denoiser(alone)
    calls = _calls(alone, denoiser, setting.together)
    rows = [rows_of(*call) for call in calls]
    rendezvous = CooperativeBatcher(rows_max=sum(rows))
    site = rendezvous.batch_point("denoiser", denoiser.forward, "forward")
    for args, kwargs in calls:
        rendezvous.start(PipelineRun(functools.partial(_repeat, site, args, kwargs, rounds + 1)))
    args, kwargs = concatenate(calls, rows)
    fused: list[float] = []
    plain: list[float] = []
    for _ in range(rounds + 1):
        fused.append(_timed(setting, lambda: rendezvous.turn(_no_phase)))
        with torch.no_grad():
            plain.append(_timed(setting, lambda: denoiser.forward(*args, **kwargs)))
    return fused[1:], plain[1:], sum(rows)


def step_parts(
    alone: Pipeline, setting: Setting, *, requests: int, steps: int
) -> list[tuple[float, float, float]]:
    """Of each step that all share: its seconds, those of the forward and of the pipelines' code.

    The code of a pipeline is what runs between two of its calls of the denoiser.
    """
    watch = _Watch(setting.now_s)
    with _replaced(type(_denoiser(alone)), watch.inner):
        player = Ours(setting)
    denoiser = player.engine.denoiser
    denoiser.forward = watch.outer(denoiser.forward)
    for number in range(requests):
        player.admit(Ask(number, "a red circle", steps, 0.0))
    batches = player.engine.played.batches
    parts: list[tuple[float, float, float]] = []
    while not player.loop.idle:
        before, forward_s, own_s = len(batches), watch.forward_s, watch.own_s
        took_s = _timed(setting, player.loop.turn)
        if len(batches) > before and batches[-1] == requests:
            parts.append((took_s, watch.forward_s - forward_s, watch.own_s - own_s))
    return parts[1:-1] or parts


class _Watch:
    """Times the denoiser's forward from within the meeting, and the pipelines from without.

    One run goes on at a time, so whoever comes next is who left last.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.forward_s = 0.0
        self.own_s = 0.0
        self._left_s: float | None = None

    def inner(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            began = self._now_s()
            answer = function(*args, **kwargs)
            wait_for_device()
            self.forward_s += self._now_s() - began
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
    """What the pipeline calls its denoiser with at the first step, for so many requests."""
    calls: list[Call] = []

    def record(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return function(self, *args, **kwargs)

        return forward

    with _replaced(type(denoiser), record):
        for number in range(count):
            alone.draw([Ask(number, "a red circle", 1, 0.0)])
    return calls


def _denoiser(alone: Pipeline) -> Any:
    return next(
        part for name in DENOISERS if (part := getattr(alone.pipeline, name, None)) is not None
    )


@contextmanager
def _replaced(
    kind: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Another forward for a class of models, for a while."""
    own = kind.forward
    kind.forward = wrap(own)
    try:
        yield
    finally:
        kind.forward = own


def _repeat(site: Callable[..., Any], args: Any, kwargs: Any, times: int) -> None:
    for _ in range(times):
        site(*args, **kwargs)


def _no_phase(_: Phase) -> AbstractContextManager[None]:
    return nullcontext()


def _timed(setting: Setting, call: Callable[[], Any]) -> float:
    began_s = setting.now_s()
    call()
    wait_for_device()
    return setting.now_s() - began_s

"""CUDA graphs: a forward of constant shape is recorded once and replayed with new inputs.

Launching the kernels of a small step one by one takes longer than running them. On CUDA a decode
step always has the same shape (``decoder``), so one recording serves every step: its inputs are
copied into the recorded tensors. A new recording is compared with an ordinary run; if recording
fails or the results differ, kernels continue to be launched one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch

log = logging.getLogger(__name__)

Run: TypeAlias = Callable[[], torch.Tensor]
Recorder: TypeAlias = Callable[[Run], Run]
"""Runs a function and returns one that repeats it on the same tensors."""

_WARM_UPS = 3


def record_cuda(run: Run) -> Run:
    """Record a function as a CUDA graph, after a few runs on a side stream that select kernels."""
    make_stream: Any = torch.cuda.Stream
    stream = make_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Inputs of a forward of constant shape; ``layout`` is the cache's."""

    ids: torch.Tensor
    positions: torch.Tensor
    layout: Any


class Graph:
    """One recorded forward. ``run`` computes it from a ``StaticInputs``."""

    def __init__(
        self, run: Callable[[StaticInputs], torch.Tensor], first: StaticInputs, recorder: Recorder
    ) -> None:
        """Raise ``RuntimeError`` if recording fails or the replay gives another result."""
        self._inputs = _cloned(first)
        expected = run(first).clone()
        self._replay = recorder(lambda: run(self._inputs))
        if not torch.allclose(self(first), expected, rtol=1e-2, atol=1e-2):
            raise RuntimeError("the recorded step gives another result than the launched one")

    def __call__(self, inputs: StaticInputs) -> torch.Tensor:
        _copy(inputs, self._inputs)
        return self._replay()


def make_graph(
    run: Callable[[StaticInputs], torch.Tensor], first: StaticInputs, recorder: Recorder
) -> Graph | None:
    try:
        return Graph(run, first, recorder)
    except RuntimeError as error:
        log.warning("CUDA graphs are disabled: %s", error)
        return None


def _cloned(value: Any) -> Any:
    """Copy a dataclass, with all tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return type(value)(*(_cloned(getattr(value, field.name)) for field in fields(value)))


def _copy(source: Any, target: Any) -> None:
    if isinstance(source, torch.Tensor):
        target.copy_(source)
    elif hasattr(source, "__dataclass_fields__"):
        for field in fields(source):
            _copy(getattr(source, field.name), getattr(target, field.name))

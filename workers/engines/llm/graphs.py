"""CUDA graphs: a forward of one shape is recorded once, and replayed with new numbers.

Launching the kernels of a small step one by one takes longer than the step. What is written always
has the same shape on CUDA (``decoder``), so one recording serves for every step: the numbers of a
step are copied to where the recorded ones were. When it is made, a recording is compared with an
ordinary run; where that fails, or the two differ, steps go on being launched one by one.
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
"""Runs a function and returns another that does the same again, on the same tensors."""

_WARM_UPS = 3


def record_cuda(run: Run) -> Run:
    """Record a function as a CUDA graph, after a few runs on the side to choose kernels by."""
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
    """The numbers of a forward that always has the same shape; ``layout`` is the cache's."""

    ids: torch.Tensor
    positions: torch.Tensor
    layout: Any


class Graph:
    """One recorded forward. ``run`` computes it from a ``StaticInputs``."""

    def __init__(
        self, run: Callable[[StaticInputs], torch.Tensor], first: StaticInputs, recorder: Recorder
    ) -> None:
        """Raise ``RuntimeError`` if it cannot be recorded, or gives other numbers than before."""
        self._kept = _cloned(first)
        expected = run(first).clone()
        self._replay = recorder(lambda: run(self._kept))
        if not torch.allclose(self(first), expected, rtol=1e-2, atol=1e-2):
            raise RuntimeError("a recorded step gives other numbers than one that is launched")

    def __call__(self, steady: StaticInputs) -> torch.Tensor:
        _copy(steady, self._kept)
        return self._replay()


def make_graph(
    run: Callable[[StaticInputs], torch.Tensor], first: StaticInputs, recorder: Recorder
) -> Graph | None:
    try:
        return Graph(run, first, recorder)
    except RuntimeError as error:
        log.warning("steps are not recorded: %s", error)
        return None


def _cloned(value: Any) -> Any:
    """The same dataclass with tensors of its own."""
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

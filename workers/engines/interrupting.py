"""Interrupts a long computation between the layers of its networks, so that others run in between.

The computation is a greenlet, as pipelines are (``cooperative_batching``): the library's forward
passes stay as they are, hooks before their layers suspend it once its slice of time is over, and
the next slice continues behind the same hook. The order of operations is unchanged, so results are
equal bit by bit. A single layer is never interrupted.

The modes of torch belong to the thread, not to the greenlet. A computation is therefore suspended
only where they are those that it was started with: without gradients, and not in a region of
autocast or inference mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from greenlet import getcurrent, greenlet

from workers.engines.devices import PROGRESS
from workers.pulse import PULSE

SLICE_S: Final = 0.02
"""Time after which a computation is interrupted. With the layer that is running then, a decode step
of a stream waits less than 50 ms."""


RowsT = TypeVar("RowsT")
ResultT = TypeVar("ResultT")
_CONVOLUTIONS: Final = (torch.nn.Conv2d, torch.nn.Conv3d)


class Interruptible(greenlet):
    """A computation without arguments that is executed in slices by the thread that calls ``run``.

    An exception of the computation is raised by the slice in which it occurs.
    """

    def __init__(
        self,
        compute: Callable[[], None],
        *,
        slice_s: float,
        now_s: Callable[[], float],
    ) -> None:
        super().__init__(compute)
        self._slice_s = slice_s
        self._now_s = now_s
        self._ends_s = 0.0

    def run_slice(self, slice_s: float | None = None) -> bool:
        """Compute until the slice is over. Return whether the computation has ended."""
        self.parent = getcurrent()
        self._ends_s = self._now_s() + (self._slice_s if slice_s is None else slice_s)
        with torch.no_grad():
            self.switch()
        return self.dead

    def abandon(self) -> None:
        """End the computation where it is suspended, if it is, and free what it holds."""
        if not self.dead:
            self.parent = getcurrent()
            with torch.no_grad():
                self.throw()

    def pause(self) -> None:
        """Suspend the computation, which is executing, if its slice is over."""
        if self._now_s() >= self._ends_s and _has_plain_modes():
            assert self.parent is not None
            self.parent.switch()


class SlicedCall(Generic[RowsT, ResultT]):
    """A call for ``rows`` that each step continues until its slice is over.

    An exception is raised by the slice in which it occurs, and ends the call.
    """

    def __init__(self, rows: RowsT, function: Callable[[], ResultT]) -> None:
        self.rows = rows
        self.spent_s = 0.0
        self._results: list[ResultT] = []
        self._computation = Interruptible(
            lambda: self._results.append(function()), slice_s=SLICE_S, now_s=time.monotonic
        )

    def run_slice(self) -> ResultT | None:
        """Return the result, or None if the call has not returned."""
        started_s = time.monotonic()
        self._computation.run_slice()
        self.spent_s += time.monotonic() - started_s
        return self._results[0] if self._results else None

    def abandon(self) -> None:
        self._computation.abandon()


def add_hooks(module: torch.nn.Module, *, also: Sequence[torch.nn.Module] = ()) -> None:
    """Let a network's layers, and ``also`` parts of it, report progress (``pulse``) and be
    interrupted.

    On CUDA, where layers are only enqueued, they wait until the device is at most a few behind. So
    time is that of the device, and no pause has a long queue before it.
    """
    on_cuda = any(weight.is_cuda for weight in module.parameters())
    hook = _pause_on_cuda if on_cuda else _pause
    for layer in dict.fromkeys([*_layers(module, convolutions=not on_cuda), *also]):
        layer.register_forward_pre_hook(hook)


def _layers(module: torch.nn.Module, *, convolutions: bool) -> Iterator[torch.nn.Module]:
    """Yield a network's layers at all depths, except for single operations within a layer.

    Of these, only convolutions take long enough on a CPU: those of a large picture are most of the
    time of their layer, and decoders have them without layers.
    """
    for part in module.modules():
        if isinstance(part, torch.nn.ModuleList):
            yield from (layer for layer in part if layer is not None and any(layer.children()))
        elif convolutions and isinstance(part, _CONVOLUTIONS):
            yield part


def _pause(*_: Any) -> None:
    PULSE.beat()
    if isinstance(here := getcurrent(), Interruptible):
        here.pause()


def _pause_on_cuda(*_: Any) -> None:
    PROGRESS.mark()
    if isinstance(here := getcurrent(), Interruptible):
        PROGRESS.catch_up()
        here.pause()


def _has_plain_modes() -> bool:
    return not (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    )

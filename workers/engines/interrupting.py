"""Interrupts a long computation between the layers of its networks, so that others run in between.

The computation is a greenlet, as pipelines are (``cooperative_batching``): the library's forward
passes stay as they are, hooks before their layers suspend it once its slice of time is over, and
the next slice continues behind the same hook. The order of operations is unchanged, so results are
equal bit by bit. A single operation is never interrupted; on a CPU, large attention and large
convolutions become several.

The modes of torch belong to the thread, not to the greenlet. A computation is therefore suspended
only where they are those that it was started with: without gradients, and not in a region of
autocast or inference mode.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
import torch.nn.functional as F
from greenlet import getcurrent, greenlet

from workers.engines.devices import PROGRESS
from workers.pulse import PULSE

SLICE_S: Final = 0.01
"""Time after which a computation is interrupted. With the layer that is running then, a decode step
of a stream waits less than 50 ms. An interruption costs 0.1 ms."""

RowsT = TypeVar("RowsT")
ResultT = TypeVar("ResultT")
_OF_PICTURES: Final = (
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.GroupNorm,
    torch.nn.SiLU,
)
_PART_QUERIES: Final = 768
"""Queries of a part of attention, for each thread. From this many on, torch's kernel for CPUs takes
blocks of the same size however many there are, so parts are equal to the whole bit by bit."""
_PRODUCTS_MIN: Final = 2**28
"""Products of queries and keys, some 10 ms of a core, from which attention is computed in parts."""
_PART_PRODUCTS: Final = 2**29
"""Products of a part of a convolution for each thread, some 10 ms."""
_PRODUCTS_PER_NUMBER: Final = 128
"""Products that take as long as to read or write a number."""
_PART_NUMBERS_MIN: Final = 2**16
"""Numbers that a part of a convolution reads at least. Of fewer, torch chooses another kernel."""
_TESTED: Final = ("AVX2", "AVX512")
"""Instruction sets with which parts of a convolution were found equal to the whole bit by bit."""
_ONCE: Final = (1, (1, 1))


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
    if not on_cuda:
        _divide_operations()
    for layer in dict.fromkeys([*_layers(module, of_pictures=not on_cuda), *also]):
        layer.register_forward_pre_hook(hook)


def _layers(module: torch.nn.Module, *, of_pictures: bool) -> Iterator[torch.nn.Module]:
    """Yield a network's layers at all depths, except for single operations within a layer.

    Of these, only those ``of_pictures`` take long enough on a CPU: of a large one they are all the
    time of their layer, and decoders have them without layers.
    """
    for part in module.modules():
        if isinstance(part, torch.nn.ModuleList):
            yield from (layer for layer in part if layer is not None and any(layer.children()))
        elif of_pictures and isinstance(part, _OF_PICTURES):
            yield part


@functools.cache
def _divide_operations() -> None:
    """Let the longest operations on a CPU be interrupted. Libraries look the functions up for each
    call.
    """
    F.scaled_dot_product_attention = functools.partial(_attend, F.scaled_dot_product_attention)
    if torch.backends.cpu.get_cpu_capability() in _TESTED:
        F.conv2d = functools.partial(_convolve, F.conv2d)


def _attend(
    whole: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Compute attention, in parts with pauses between them if it takes long."""
    if (
        not isinstance(getcurrent(), Interruptible)
        or query.numel() * key.shape[-2] < _PRODUCTS_MIN
        or not query.is_cpu
        or query.dtype != torch.float32  # of others, the kernel chooses by the number of heads
        or query.ndim != 4
        or query.shape[:2] != key.shape[:2]
        or query.shape[-1] != value.shape[-1]
        or dropout_p
        or is_causal
    ):
        return whole(query, key, value, attn_mask, dropout_p, is_causal, **options)
    batch, heads, length, width = query.shape
    attended = query.new_empty(batch, length, heads, width).transpose(1, 2)  # as the kernel's
    for part in _parts(batch, heads, length):
        rows, of_heads, _ = part
        mask = None if attn_mask is None else _mask_of(attn_mask, part)
        attended[part] = whole(
            query[part], key[rows, of_heads], value[rows, of_heads], mask, **options
        )
        _pause()
    return attended


def _mask_of(mask: torch.Tensor, part: Sequence[slice]) -> torch.Tensor:
    mask = mask[(None,) * (4 - mask.ndim)]
    sizes = mask.shape[:3]
    return mask[
        tuple(one if size > 1 else slice(None) for one, size in zip(part, sizes, strict=True))
    ]


def _parts(batch: int, heads: int, length: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield rows, heads and queries of the parts of attention, each enough for all threads."""
    queries = _PART_QUERIES * torch.get_num_threads()
    heads_each = max(queries // length, 1)
    for row in range(batch):
        for head in range(0, heads, heads_each):
            for start, end in _spans(length, queries):
                yield slice(row, row + 1), slice(head, head + heads_each), slice(start, end)


def _spans(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each part, of ``size``; the last one has the rest as well."""
    starts = range(0, max(length - size, 0) + 1, size)
    for start in starts:
        yield start, length if start == starts[-1] else start + size


def _convolve(
    whole: Callable[..., torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Compute a convolution, in parts of whole rows with pauses between them if it takes long.

    Only what decoders consist of is divided: for other sizes of kernels, the library chooses how it
    multiplies by the size of the picture.
    """
    if (
        not isinstance(getcurrent(), Interruptible)
        or not input.is_cpu
        or input.dtype != torch.float32
        or input.ndim != 4
        or weight.shape[2:] != (3, 3)
        or stride not in _ONCE
        or padding not in _ONCE
        or dilation not in _ONCE
        or groups != 1
    ):
        return whole(input, weight, bias, stride, padding, dilation, groups)
    batch, channels, height, width = input.shape
    made = weight.shape[0]
    products = batch * width * (9 * channels * made + (channels + made) * _PRODUCTS_PER_NUMBER)
    rows = max(
        _PART_PRODUCTS * torch.get_num_threads() // products,
        math.ceil(_PART_NUMBERS_MIN / (batch * channels * width)),
    )
    if height < 2 * rows:
        return whole(input, weight, bias, stride, padding, dilation, groups)
    convolved: torch.Tensor | None = None
    for start, end in _spans(height, rows):
        above, below = start == 0, end == height
        read = input[:, :, start - (not above) : end + (not below)]
        if above or below:
            read = F.pad(read, (0, 0, above, below))
        part = whole(read, weight, bias, 1, (0, 1))
        if convolved is None:
            order = torch.contiguous_format if part.is_contiguous() else torch.channels_last
            convolved = torch.empty((batch, made, height, width), memory_format=order)
        convolved[:, :, start:end] = part
        _pause()
    assert convolved is not None
    return convolved


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

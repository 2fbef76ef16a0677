"""Linear layers whose weights stay as a checkpoint stores them.

``Int4Linear`` and ``BlockFp8Linear`` multiply by torch's kernels. A kernel is compared with plain
products the first time it is used on a device; if it fails or differs, weights are widened for each
product. Per-channel int8 and fp8 weights are layers of ``precision``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from workers.engines.precision import FP8, FP8_MAX, TINY, Fp8Linear, Int8Linear, QuantizedLinear
from workers.engines.quantized.matrices import Matrix, spread

log = logging.getLogger(__name__)

_GROUPS: Final = (256, 128, 64, 32)
"""Inputs with one scale that the four-bit kernels support."""
_INT4_OUTPUTS: Final = 16
_INNER_TILES: Final = (8, 4, 2)
"""CUDA's kernel reads as many tiles of 16 inputs at a time."""
_FP8_BLOCK: Final = 128
_TOLERANCE: Final = 0.05
"""Relative difference between a kernel and plain products that is explained by rounding."""


def keep(matrix: Matrix, bias: nn.Parameter | None, dtype: str) -> nn.Module | None:
    """Return a layer that keeps a matrix as it is, or None if its shape does not allow it.

    ``dtype`` is that of the format: int4, int8 or fp8.
    """
    outputs, inputs = matrix.values.shape
    if dtype == "int4":
        size = next((size for size in _GROUPS if matrix.block[1] % size == 0), None)
        if size is None or outputs % _INT4_OUTPUTS:
            return None
        return Int4Linear(matrix, size, bias)
    if matrix.zeros is not None:
        return None
    if matrix.block[0] not in (1, outputs) or matrix.block[1] != inputs:
        return BlockFp8Linear(matrix, bias) if dtype == "fp8" else None
    scale = matrix.scale.flatten().expand(outputs).clone()
    kind = Int8Linear if dtype == "int8" else Fp8Linear
    return kind.of(matrix.values, scale, bias)


class Int4Linear(QuantizedLinear):
    """``weight`` ``(outputs, inputs / 2)`` uint8, the first of two inputs in the upper bits, until
    the first product; afterwards in the order of the device's kernel. ``scale`` ``(groups, outputs,
    2)`` bfloat16: scale, and the weight that the value 8 stands for."""

    order: torch.Tensor | None

    def __init__(self, matrix: Matrix, group: int, bias: nn.Parameter | None) -> None:
        assert matrix.zeros is not None
        values = matrix.values
        repeats = matrix.block[1] // group
        scale = matrix.scale.repeat_interleave(repeats, 1)
        middle = (8 - matrix.zeros).repeat_interleave(repeats, 1) * scale
        pairs = torch.stack((scale, middle), -1).transpose(0, 1).contiguous()
        super().__init__(values[:, ::2] << 4 | values[:, 1::2], pairs.to(torch.bfloat16), bias)
        self.register_buffer("order", None if matrix.order is None else matrix.order.int())
        self._group = group
        self._laid_out: torch.device | None = None
        self._has_kernel = False

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = self.weight.device
        super()._apply(fn, recurse)
        if self._has_kernel and self.weight.device != before:
            raise RuntimeError("weights that were packed for a device cannot be moved")
        return self

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if self._laid_out != rows.device:
            self._lay_out(rows.device)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        if not self._has_kernel:
            return _multiply_unpacked(rows, self.weight, self._group, self.scale)
        multiply = _multiply_int4_cpu if _on_cpu(rows) else _multiply_int4
        return multiply(rows.bfloat16(), self.weight, self._group, self.scale).to(rows.dtype)

    def _lay_out(self, device: torch.device) -> None:
        self._laid_out = device
        if _multiplies_int4(device) and (packed := _pack_int4(self.weight)) is not None:
            self.weight, self._has_kernel = packed, True


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _unpack(weight: torch.Tensor) -> torch.Tensor:
    return torch.stack((weight >> 4, weight & 15), dim=-1).flatten(1)


def _pack_int4(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weights in the order of the device's kernel; None if it does not support them."""
    if _on_cpu(weight):
        packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            _unpack(weight).int(), 1
        )
        return packed
    inputs = 2 * weight.shape[1]
    tiles = next((tiles for tiles in _INNER_TILES if inputs % (16 * tiles) == 0), None)
    return None if tiles is None else torch._convert_weight_to_int4pack(weight, tiles)


def _multiply_int4_cpu(
    rows: torch.Tensor, packed: torch.Tensor, group: int, scale: torch.Tensor
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group, scale)
    return out


def _multiply_int4(
    rows: torch.Tensor, packed: torch.Tensor, group: int, scale: torch.Tensor
) -> torch.Tensor:
    return torch._weight_int4pack_mm(rows, packed, group, scale)


def _multiply_unpacked(
    rows: torch.Tensor, weight: torch.Tensor, group: int, scale: torch.Tensor
) -> torch.Tensor:
    factor, middle = scale.to(rows.dtype).repeat_interleave(group, 0).transpose(0, 1).unbind(-1)
    return F.linear(rows, (_unpack(weight).to(rows.dtype) - 8) * factor + middle)


@functools.cache
def _multiplies_int4(device: torch.device) -> bool:
    """Whether the device has a kernel for four-bit weights that gives the right result."""
    if device.type not in ("cpu", "cuda"):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 256, (64, 64), dtype=torch.uint8, generator=generator).to(device)
    scale = torch.rand(4, 64, 2, generator=generator).bfloat16().to(device)
    rows = torch.randn(5, 128, generator=generator).bfloat16().to(device)
    expected = _multiply_unpacked(rows.float(), weight, 32, scale)
    multiply = _multiply_int4_cpu if _on_cpu(rows) else _multiply_int4

    def run() -> torch.Tensor:
        packed = _pack_int4(weight)
        assert packed is not None
        return multiply(rows, packed, 32, scale)

    return _agrees("four-bit weights", run, expected)


def _agrees(what: str, run: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    """Errors of a kernel are of any type."""
    try:
        with torch.inference_mode():
            difference = float((run().float() - expected).norm() / expected.norm())
    except Exception as error:
        log.warning("the kernel for %s cannot be used: %s", what, error)
        return False
    if not difference < _TOLERANCE:
        log.warning("the kernel for %s differs by %.3g and is not used", what, difference)
        return False
    return True


class BlockFp8Linear(QuantizedLinear):
    """``weight`` E4M3 ``(outputs, inputs)``; ``scale`` float32, one for each block of it."""

    def __init__(self, matrix: Matrix, bias: nn.Parameter | None) -> None:
        super().__init__(matrix.values, matrix.scale, bias)
        self._block = matrix.block
        self._whole = self._block == (_FP8_BLOCK, _FP8_BLOCK) and not any(
            size % _FP8_BLOCK for size in matrix.values.shape
        )

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if self._whole and _multiplies_blocks(rows.device):
            return _multiply_blocks(rows, self.weight, self.scale).to(rows.dtype)
        scale = spread(self.scale, self.weight.shape, self._block)
        return F.linear(rows, (self.weight.float() * scale).to(rows.dtype))


def _multiply_blocks(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply by blocks of 128 by 128, after rounding each 128 inputs of a row with one scale."""
    parts = rows.float().view(len(rows), -1, _FP8_BLOCK)
    largest = (parts.abs().amax(dim=2) / FP8_MAX).clamp_min(TINY)
    kinds: Any = F.ScalingType
    out: torch.Tensor = F.scaled_mm(
        (parts / largest[..., None]).to(FP8).flatten(1),
        weight.t(),
        largest.t().contiguous().t(),  # by columns, as the kernel reads it
        kinds.BlockWise1x128,
        scale.t(),
        kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return out


@functools.cache
def _multiplies_blocks(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(32, 256, generator=generator).to(device)
    weight = torch.randn(384, 256, generator=generator).to(FP8).to(device)
    scale = torch.rand(3, 2, generator=generator).to(device)
    wide = weight.float() * spread(scale, weight.shape, (_FP8_BLOCK, _FP8_BLOCK))
    return _agrees(
        "blocks of fp8", lambda: _multiply_blocks(rows, weight, scale), F.linear(rows, wide)
    )

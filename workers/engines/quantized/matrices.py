"""Reads the parts of a quantised matrix from safetensors files and unpacks them.

A weight is ``(value - zero) * scale``, computed in float32. The parts of a matrix have the name of
its layer and:

- GPTQ: ``qweight`` int32 ``(inputs · bits / 32, outputs)``, the lowest bits first; ``qzeros`` int32
  ``(groups, outputs · bits / 32)``; ``scales`` ``(groups, outputs)``; ``g_idx`` ``(inputs,)``, the
  group of each input.
- AWQ: ``qweight`` int32 ``(inputs, outputs / 8)``, in whose numbers outputs 0 2 4 6 1 3 5 7 follow
  each other; ``qzeros`` ``(groups, outputs / 8)`` likewise; ``scales`` ``(groups, outputs)``.
- plain: ``weight`` E4M3 or int8 ``(outputs, inputs)``, with ``weight_scale_inv`` for each block or
  ``weight_scale`` for the matrix, each output, group or block; ``weight_zero_point``.
- packed: ``weight_packed`` int32 ``(outputs, inputs · bits / 32)`` of values from which
  ``2 ** (bits - 1)`` is subtracted; ``weight_scale`` ``(outputs, groups)``; ``weight_zero_point``
  int32 ``(outputs · bits / 32, groups)``; ``weight_shape``; ``weight_g_idx``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from workers.engines.quantized.formats import Layout, StoredFormat

Parts = Mapping[str, Callable[[], torch.Tensor]]
"""Reads a part of a matrix, by the end of its name."""

MAIN: Final[Mapping[Layout, str]] = {
    "gptq": "qweight",
    "awq": "qweight",
    "plain": "weight",
    "packed": "weight_packed",
}
"""The part that has the values."""
NEEDED: Final[Mapping[Layout, tuple[str, ...]]] = {
    "gptq": ("qweight", "qzeros", "scales"),
    "awq": ("qweight", "qzeros", "scales"),
    "plain": ("weight",),
    "packed": ("weight_packed", "weight_scale", "weight_shape"),
}
PARTS: Final = frozenset(
    (
        *("qweight", "qzeros", "scales", "g_idx"),
        *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
        *("weight_scale", "weight_scale_inv", "input_scale", "activation_scale"),
        *("input_zero_point", "input_global_scale", "k_scale", "v_scale"),
    )
)
"""Names that belong to a quantised matrix, beside ``weight``. Those of inputs and caches are not
used: these stay in the type of the computation."""
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Matrix:
    """``values`` ``(outputs, inputs)`` uint8, int8 or E4M3. ``scale`` and ``zeros`` are float32,
    with a row and a column for each ``block`` of outputs and inputs."""

    values: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    """Inputs in the order of their groups, if that is not their own; ``values`` are in this one."""

    def widen(self) -> torch.Tensor:
        """Return the weights ``(outputs, inputs)`` in float32, inputs in their own order."""
        wide = self.values.float()
        if self.zeros is not None:
            wide = wide - self._spread(self.zeros)
        wide = wide * self._spread(self.scale)
        if self.order is None:
            return wide
        return torch.empty_like(wide).index_copy_(1, self.order, wide)

    def _spread(self, small: torch.Tensor) -> torch.Tensor:
        return spread(small, self.values.shape, self.block)


def spread(small: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Repeat numbers for all weights of their block; the last blocks may be cut off."""
    for dim, (size, length) in enumerate(zip(shape, block, strict=True)):
        if small.shape[dim] != size:
            if length > 1:
                small = small.repeat_interleave(length, dim)
            small = small.narrow(dim, 0, size)
    return small


def read_matrix(parts: Parts, stored: StoredFormat) -> Matrix:
    """Raise ``ValueError``, or ``RuntimeError`` of torch, if shapes do not fit each other."""
    match stored.layout:
        case "gptq":
            return _read_gptq(parts, stored)
        case "awq":
            return _read_awq(parts)
        case "packed":
            return _read_packed(parts, stored)
    return _read_plain(parts, stored)


def _read_gptq(parts: Parts, stored: StoredFormat) -> Matrix:
    bits = stored.bits
    values = _unpack_rows(parts["qweight"](), bits).t()
    zeros = _unpack_rows(parts["qzeros"]().t(), bits)
    if stored.zeros_are_less_one:
        zeros = (zeros + 1) & (2**bits - 1)
    groups = parts["g_idx"]() if "g_idx" in parts else None
    return _grouped(values, parts["scales"]().t(), zeros, groups)


def _read_awq(parts: Parts) -> Matrix:
    values, zeros = (_unpack_awq(parts[name]()).t() for name in ("qweight", "qzeros"))
    return _grouped(values, parts["scales"]().t(), zeros, None)


def _read_packed(parts: Parts, stored: StoredFormat) -> Matrix:
    outputs, inputs = parts["weight_shape"]().tolist()
    bits = stored.bits
    values = _unpack_rows(parts["weight_packed"]().t(), bits).t()[:, :inputs]
    scale = parts["weight_scale"]()
    if "weight_zero_point" in parts:
        zeros = _unpack_rows(parts["weight_zero_point"](), bits)[:outputs]
    else:
        zeros = torch.full(scale.shape, 2 ** (bits - 1), dtype=torch.uint8)
    groups = parts["weight_g_idx"]() if "weight_g_idx" in parts else None
    return _grouped(values, scale, zeros, groups)


def _read_plain(parts: Parts, stored: StoredFormat) -> Matrix:
    values = parts["weight"]()
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    scale = parts[name]().float()
    outputs, inputs = values.shape
    if stored.block is not None:
        block = stored.block
    elif scale.numel() == 1:
        scale, block = scale.reshape(1, 1), (outputs, inputs)
    else:
        scale = scale.reshape(outputs, -1)
        block = (1, inputs // scale.shape[1])
    blocks = tuple(-(-size // length) for size, length in zip(values.shape, block, strict=True))
    if scale.shape != blocks:
        raise ValueError(f"{name} is {tuple(scale.shape)}, but the weights have {blocks} blocks")
    zeros = None
    if "weight_zero_point" in parts:
        zeros = parts["weight_zero_point"]().float().reshape(scale.shape)
    return Matrix(values, scale, block, zeros)


def _grouped(
    values: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor | None
) -> Matrix:
    """``scale`` and ``zeros`` are ``(outputs, groups)``; ``groups`` ``(inputs,)``."""
    inputs, count = values.shape[1], scale.shape[1]
    if scale.shape != zeros.shape or scale.shape[0] != values.shape[0] or inputs % count:
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} and zero points of shape {tuple(zeros.shape)} "
            f"do not fit weights of shape {tuple(values.shape)}"
        )
    size, order = inputs // count, None
    if groups is not None:
        own = torch.arange(inputs) // size
        if not torch.equal(groups.long(), own):
            order = groups.long().argsort(stable=True)
            if not torch.equal(groups.long()[order], own):
                raise ValueError("its groups of inputs have different sizes")
            values = values[:, order]
    return Matrix(values.contiguous(), scale.float(), (1, size), zeros.float(), order)


def _unpack_rows(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack ``(rows, columns)`` int32 to ``(rows · 32 / bits, columns)`` uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)[None, :, None]
    values: torch.Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return values.to(torch.uint8).flatten(0, 1)


def _unpack_awq(packed: torch.Tensor) -> torch.Tensor:
    """Unpack ``(rows, columns)`` int32 to ``(rows, columns · 8)`` uint8."""
    values = _unpack_rows(packed.t(), 4).t().reshape(len(packed), -1, 8)
    places = torch.tensor(_AWQ_ORDER).argsort()
    return values.index_select(2, places).flatten(1)

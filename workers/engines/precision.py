"""Quantises the weights of large matrices to eight bits, with one scale per output channel.

``int8`` also quantises the input, with one scale per token, and multiplies integers. That is exact,
so no row depends on another, and on a CPU several times faster than float32, above all if oneDNN
has the weights prepacked in its own layout. ``fp8`` (E4M3) takes half the bytes of bfloat16. The
input is quantised too if the device multiplies such numbers (CUDA from compute capability 8.9 on).
Elsewhere the weights are widened for each product, which costs more time than it saves: there
``fp8`` is for checking, not for serving. Embeddings and the language model's head stay as they are.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

QUANTIZED: Final = ("int8", "fp8")
FP8: Final = torch.float8_e4m3fn
_FP8_MAX: Final = 448.0
_TINY: Final = 1e-12
_PACKED_FROM: Final = 1 << 20
"""Minimum weights of a layer to prepack; for smaller ones the call costs more than it saves."""
_CUDA_ROWS: Final = 32
"""Rows to which CUDA's integer product is padded: it requires more than 16."""


def quantize(model: Any, dtype: str) -> None:
    """Replace the linear layers of a model in place, all but a language model's head."""
    if dtype not in QUANTIZED:
        return
    linear_class = Int8Linear if dtype == "int8" else Fp8Linear
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head else None
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not head:
                setattr(module, name, linear_class(child))


class Int8Linear(nn.Module):
    """``weight`` ``(in, out)`` int8, as the product requires, or ``(out, in)`` in oneDNN's layout;
    ``scale`` ``(out,)`` float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / 127).clamp_min(_TINY)
        rounded = (weight / scale[:, None]).round().to(torch.int8)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self._packed: Any = None
        self.packed_bytes = 0
        if _packs(linear):
            self._packed = torch.ops.onednn.qlinear_prepack(rounded, [4, linear.in_features])
            self.packed_bytes = rounded.numel()
            self.register_buffer("zeros", torch.zeros(len(scale), dtype=torch.int32))
        else:
            self.register_buffer("weight", rounded.t().contiguous())

    weight: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        scale = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp_min(_TINY)
        rounded = (rows / scale).round()
        # An integer cannot be NaN; NaN survives because the scale of its row is NaN as well.
        if self._packed is not None:
            product = _multiply_packed(rounded, self._packed, self.scale, self.zeros)
            out = (product * scale).to(x.dtype)
        else:
            out = (self._multiply(rounded.to(torch.int8)) * scale * self.scale).to(x.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)

    def _multiply(self, rounded: torch.Tensor) -> torch.Tensor:
        count = len(rounded)
        if rounded.is_cuda and count < _CUDA_ROWS:
            rounded = F.pad(rounded, (0, 0, 0, _CUDA_ROWS - count))
        return torch._int_mm(rounded, self.weight)[:count]


def _multiply_packed(
    rounded: torch.Tensor, packed: Any, scale: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    # Unsigned with zero point 128: the signed path is a thousand times slower.
    shifted = (rounded + 128).to(torch.uint8)
    product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        *(shifted, 1.0, 128, packed, scale, zeros, None),
        *(1.0, 0, torch.float32, "none", [], ""),
    )
    return product


def _packs(linear: nn.Linear) -> bool:
    return (
        linear.weight.device.type == "cpu"
        and linear.weight.numel() >= _PACKED_FROM
        and _packed_products_are_exact()
    )


@functools.cache
def _packed_products_are_exact() -> bool:
    """Whether oneDNN adds packed products without saturation.

    Processors without VNNI add pairs of them in 16 bits, in which large ones do not fit.
    """
    if not hasattr(torch.ops.onednn, "qlinear_prepack"):
        return False
    size, most = 1024, 127
    weight = torch.full((size, size), most, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, [4, size])
    scale, zeros = torch.ones(size), torch.zeros(size, dtype=torch.int32)
    product = _multiply_packed(torch.full((4, size), float(most)), packed, scale, zeros)
    return bool((product == size * most * most).all())


class Fp8Linear(nn.Module):
    """``weight`` ``(out, in)`` E4M3, ``scale`` ``(out,)`` float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / _FP8_MAX).clamp_min(_TINY)
        self.register_buffer("weight", (weight / scale[:, None]).to(FP8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        device = linear.weight.device
        self._multiplies = device.type == "cuda" and (
            torch.cuda.get_device_capability(device) >= (8, 9)
        )

    weight: torch.Tensor
    scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self._multiplies:
            out = self._multiply(rows)
        else:
            out = F.linear(rows, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        largest = rows.float().abs().amax(dim=1, keepdim=True)
        scale = (largest / _FP8_MAX).clamp_min(_TINY)
        out: torch.Tensor = torch._scaled_mm(
            (rows.float() / scale).to(FP8),
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale[None],
            out_dtype=torch.bfloat16,
        )
        return out.to(rows.dtype)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, counting tied weights once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    packed = sum(getattr(module, "packed_bytes", 0) for module in model.modules())
    return packed + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

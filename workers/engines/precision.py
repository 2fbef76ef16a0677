"""Quantises the weights of large matrices to eight bits, with one scale per output channel.

``int8`` also quantises the input, with one scale per token, and multiplies integers. That is exact,
so no row depends on another, and on a CPU several times faster than float32, above all if oneDNN
has the weights prepacked in its own layout. ``fp8`` (E4M3) takes half the bytes of bfloat16. The
input is quantised too if the device multiplies such numbers (CUDA from compute capability 8.9 on).
Elsewhere the weights are widened for each product, which costs more time than it saves: there
``fp8`` is for checking, not for serving. Embeddings and the language model's head stay as they are.

The layout of weights and the kernel depend on the device, so each layer chooses them in its first
forward pass there, not when it is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Self

import torch
import torch.nn.functional as F
from torch import nn

QUANTIZED: Final = ("int8", "fp8")
FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
TINY: Final = 1e-12
_PACKED_FROM: Final = 1 << 20
"""Minimum weights of a layer to prepack; for smaller ones the call costs more than it saves."""
_CUDA_ROWS: Final = 32
"""Rows to which CUDA's integer product is padded: it requires more than 16."""
_INT8_MULTIPLE: Final = 8
_FP8_MULTIPLE: Final = 16
"""CUDA's products require sizes of a matrix that are multiples of these; others are widened."""


def quantize(model: nn.Module, dtype: str, device: torch.device) -> None:
    """Replace the linear layers of a model in place, all but a language model's head.

    Each layer is moved to ``device``, quantised there and replaced before the next one, so that the
    device needs room for the quantised model and one layer. The rest of the model is not moved.
    """
    if dtype not in QUANTIZED:
        return
    linear_class = Int8Linear if dtype == "int8" else Fp8Linear
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head else None
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not head:
                setattr(module, name, linear_class(child.to(device)))


class QuantizedLinear(nn.Module):
    """``weight`` ``(out, in)`` of eight bits, ``scale`` ``(out,)`` float32."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: nn.Parameter | None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = bias

    @classmethod
    def of(cls, weight: torch.Tensor, scale: torch.Tensor, bias: nn.Parameter | None) -> Self:
        """Return a layer of weights that are quantised already."""
        made = cls.__new__(cls)
        QuantizedLinear.__init__(made, weight, scale, bias)
        return made

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the buffers with the module, but never cast them."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._product(x.reshape(-1, x.shape[-1]))
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _widened(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight.to(rows.dtype)) * self.scale.to(rows.dtype)

    def _divides(self, multiple: int) -> bool:
        return all(size % multiple == 0 for size in self.weight.shape)


class Int8Linear(QuantizedLinear):
    """On a CPU, large weights are in oneDNN's layout after the first product, and no buffer."""

    zeros: torch.Tensor
    packed_bytes = 0
    _packed: Any = None
    _laid_out: torch.device | None = None

    def __init__(self, linear: nn.Linear) -> None:
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / 127).clamp_min(TINY)
        super().__init__((weight / scale[:, None]).round().to(torch.int8), scale, linear.bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self._packed is not None and self.scale.device.type != "cpu":
            raise RuntimeError("weights that were prepacked for the CPU cannot be moved")
        self._laid_out = None
        return self

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if self._laid_out != self.scale.device:
            self._lay_out()
        if self._packed is None and not _on_cpu(rows) and not self._divides(_INT8_MULTIPLE):
            return self._widened(rows)
        numbers = rows.float()
        scale = (numbers.abs().amax(dim=1, keepdim=True) / 127).clamp_min(TINY)
        rounded = (numbers / scale).round()
        # An integer cannot be NaN; NaN survives because the scale of its row is NaN as well.
        if self._packed is not None:
            product = _multiply_packed(rounded, self._packed, self.scale, self.zeros)
            return (product * scale).to(rows.dtype)
        return (self._multiply(rounded.to(torch.int8)) * scale * self.scale).to(rows.dtype)

    def _lay_out(self) -> None:
        """Store the weights as the product of their device reads them fastest."""
        self._laid_out = self.scale.device
        if self._packed is not None:
            return
        if not _on_cpu(self.weight):
            self.weight = self.weight.contiguous()  # its transpose is read by columns, as required
        elif self.weight.numel() >= _PACKED_FROM and _packed_products_are_exact():
            self._packed = torch.ops.onednn.qlinear_prepack(self.weight, [4, self.weight.shape[1]])
            self.packed_bytes = self.weight.numel()
            self.register_buffer("zeros", torch.zeros(len(self.scale), dtype=torch.int32))
            del self.weight
        else:
            self.weight = self.weight.t().contiguous().t()

    def _multiply(self, rounded: torch.Tensor) -> torch.Tensor:
        count = len(rounded)
        if not _on_cpu(rounded) and count < _CUDA_ROWS:
            rounded = F.pad(rounded, (0, 0, 0, _CUDA_ROWS - count))
        return torch._int_mm(rounded, self.weight.t())[:count]


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


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


class Fp8Linear(QuantizedLinear):
    """``weight`` is E4M3."""

    def __init__(self, linear: nn.Linear) -> None:
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / FP8_MAX).clamp_min(TINY)
        super().__init__((weight / scale[:, None]).to(FP8), scale, linear.bias)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if not (self._divides(_FP8_MULTIPLE) and _multiplies_fp8(rows.device)):
            return self._widened(rows)
        largest = rows.float().abs().amax(dim=1, keepdim=True)
        scale = (largest / FP8_MAX).clamp_min(TINY)
        out: torch.Tensor = torch._scaled_mm(
            (rows.float() / scale).to(FP8),
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale[None],
            out_dtype=torch.bfloat16,
        )
        return out.to(rows.dtype)


@functools.cache
def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, counting tied weights once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    packed = sum(getattr(module, "packed_bytes", 0) for module in model.modules())
    return packed + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

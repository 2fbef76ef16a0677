"""Layers that keep stored weights, on the devices whose kernels they use.

Stand-ins with the published interfaces of CUDA's kernels run on a CPU, and refuse what the kernels
refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workers.engines.precision import FP8
from workers.engines.quantized import layers
from workers.engines.quantized.layers import BlockFp8Linear, Int4Linear, keep
from workers.engines.quantized.matrices import Matrix

META = torch.device("meta")


def int4_matrix(
    outputs: int = 64, inputs: int = 256, group: int = 64, *, order: bool = False
) -> Matrix:
    generator = torch.Generator().manual_seed(0)
    shape = (outputs, inputs // group)
    return Matrix(
        torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator),
        torch.rand(shape, generator=generator) / 100,
        (1, group),
        torch.randint(0, 16, shape, generator=generator).float(),
        torch.randperm(inputs, generator=generator) if order else None,
    )


def fp8_matrix(outputs: int = 256, inputs: int = 384, block: int = 128) -> Matrix:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(outputs, inputs, generator=generator).to(FP8)
    scale = torch.rand(-(-outputs // block), -(-inputs // block), generator=generator)
    return Matrix(values, scale, (block, block))


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def _pack(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    outputs, pairs = weight.shape
    assert weight.dtype == torch.uint8
    assert outputs % 8 == 0
    assert 2 * pairs % (16 * tiles) == 0
    shape = (outputs // 8, 2 * pairs // (16 * tiles), 32, tiles // 2)
    return weight.contiguous().view(torch.int32).view(shape)


def _multiply(
    rows: torch.Tensor, packed: torch.Tensor, group: int, scale: torch.Tensor
) -> torch.Tensor:
    assert rows.dtype == scale.dtype == torch.bfloat16
    assert group in (32, 64, 128, 256)
    outputs = packed.shape[0] * 8
    weight = packed.flatten().view(torch.uint8).view(outputs, -1)
    assert scale.shape == (2 * weight.shape[1] // group, outputs, 2)
    values = torch.stack((weight >> 4, weight & 15), -1).flatten(1).float() - 8
    factor, middle = scale.float().repeat_interleave(group, 0).unbind(-1)
    return (rows.float() @ (values.t() * factor + middle)).bfloat16()


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    layers._multiplies_int4.cache_clear()
    monkeypatch.setattr(layers, "_on_cpu", lambda tensor: False)
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", _pack)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", _multiply)
    yield
    layers._multiplies_int4.cache_clear()


def _check_int4(matrix: Matrix) -> Int4Linear:
    layer = keep(matrix, nn.Parameter(torch.ones(len(matrix.values)), False), "int4")
    assert isinstance(layer, Int4Linear)
    x = torch.randn(3, 5, matrix.values.shape[1])
    assert _error(layer(x), F.linear(x, matrix.widen()) + 1) < 0.01
    return layer


@pytest.mark.parametrize("group", [32, 64, 256])
@pytest.mark.parametrize("order", [False, True])
def test_four_bit_product_of_a_cpu(group: int, order: bool) -> None:
    assert _check_int4(int4_matrix(group=group, order=order))._has_kernel


@pytest.mark.parametrize(("inputs", "tiles"), [(256, 8), (192, 4), (96, 2)])
def test_four_bit_product_of_a_cuda_device(inputs: int, tiles: int, as_on_cuda: None) -> None:
    layer = _check_int4(int4_matrix(inputs=inputs, group=32, order=True))

    assert layer._has_kernel
    assert layer.weight.shape == (8, inputs // (16 * tiles), 32, tiles // 2)


def test_kernel_that_differs_is_not_used(
    as_on_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "_weight_int4pack_mm", lambda *given: 2 * _multiply(*given))

    assert not _check_int4(int4_matrix())._has_kernel
    assert "the kernel for four-bit weights differs by 1" in caplog.text


def test_kernel_that_fails_is_not_used(
    as_on_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("no sm_80")

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", fail)

    assert not _check_int4(int4_matrix())._has_kernel
    assert "cannot be used: no sm_80" in caplog.text


@pytest.mark.parametrize("made", ["int4", "fp8"])
def test_layer_computes_on_a_device_without_a_kernel(made: str) -> None:
    layer = keep(int4_matrix(order=True) if made == "int4" else fp8_matrix(), None, made)
    assert layer is not None
    inputs = 256 if made == "int4" else 384

    out = layer.to(META)(torch.empty(2, 3, inputs, dtype=torch.bfloat16, device=META))

    assert (out.shape, out.dtype) == ((2, 3, 64 if made == "int4" else 256), torch.bfloat16)


def test_layer_that_was_packed_says_why_it_cannot_be_moved() -> None:
    layer = _check_int4(int4_matrix())

    with pytest.raises(RuntimeError, match="packed for a device cannot be moved"):
        layer.to(META)


def test_casting_keeps_stored_weights() -> None:
    layer = keep(fp8_matrix(), None, "fp8")
    assert isinstance(layer, BlockFp8Linear)
    layer.to(torch.bfloat16)

    assert (layer.weight.dtype, layer.scale.dtype) == (FP8, torch.float32)


@pytest.mark.parametrize("shape", [(60, 256, 64), (64, 240, 48)])
def test_shapes_without_a_kernel_are_not_kept(shape: tuple[int, int, int]) -> None:
    assert keep(int4_matrix(*shape), None, "int4") is None


def test_blocks_of_fp8_of_any_shape() -> None:
    x = torch.randn(7, 200)
    matrix = fp8_matrix(100, 200)
    layer = keep(matrix, None, "fp8")
    assert layer is not None

    assert _error(layer(x), F.linear(x, matrix.widen())) < 1e-5


def test_blocks_of_fp8_on_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: Any = F.ScalingType

    def multiply(
        rows: torch.Tensor,
        weight: torch.Tensor,
        row_scale: torch.Tensor,
        row_kind: Any,
        scale: torch.Tensor,
        kind: Any,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        assert (row_kind, kind) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
        assert rows.dtype == weight.dtype == FP8
        assert (rows.is_contiguous(), weight.t().is_contiguous()) == (True, True)
        assert row_scale.t().is_contiguous()
        left = rows.float() * row_scale.repeat_interleave(128, 1)
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (left @ (weight.float() * wide)).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", multiply)
    monkeypatch.setattr(layers, "_multiplies_blocks", lambda device: True)
    matrix, x = fp8_matrix(), torch.randn(9, 384)
    layer = keep(matrix, None, "fp8")
    assert layer is not None

    assert 1e-5 < _error(layer(x), F.linear(x, matrix.widen())) < 0.05

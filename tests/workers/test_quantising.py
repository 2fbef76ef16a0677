"""Quantised layers and the devices that they are made on, moved to and computed on.

A CPU stands in for a CUDA device where only the choice of the kernel differs; ``meta`` stands in
where something is moved. ``tests/workers/gpu`` repeats this on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workers.engines import precision
from workers.engines.precision import QUANTIZED, Fp8Linear, Int8Linear, quantize

CPU, META = torch.device("cpu"), torch.device("meta")


def _linear(inputs: int = 96, outputs: int = 48) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs).requires_grad_(False)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_device_never_holds_two_layers_in_full_precision(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.LayerNorm(32))
    name = "Int8Linear" if dtype == "int8" else "Fp8Linear"
    made = getattr(precision, name)
    moved: list[int] = []

    def make(linear: nn.Linear) -> nn.Module:
        layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
        moved.append(sum(layer.weight.device == META for layer in layers))
        quantized: nn.Module = made(linear)
        return quantized

    monkeypatch.setattr(precision, name, make)
    quantize(model, dtype, META)

    assert moved == [1, 1, 1, 1]
    assert {buffer.device for buffer in model.buffers()} == {META}
    assert model[4].weight.device == CPU


@pytest.mark.parametrize("kind", [Int8Linear, Fp8Linear])
def test_layer_that_is_quantised_and_then_moved_computes_on_the_other_device(
    kind: type[nn.Module],
) -> None:
    layer = kind(nn.Linear(1024, 1024, dtype=torch.bfloat16).requires_grad_(False)).to(META)

    out = layer(torch.empty(3, 5, 1024, dtype=torch.bfloat16, device=META))

    assert (out.shape, out.dtype, out.device) == ((3, 5, 1024), torch.bfloat16, META)


def test_layer_that_was_prepacked_for_a_cpu_says_why_it_cannot_be_moved() -> None:
    layer = Int8Linear(_linear(1024, 1024))
    layer(torch.zeros(1, 1024))
    if not layer.packed_bytes:
        pytest.skip("this processor prepacks nothing")

    with pytest.raises(RuntimeError, match="prepacked for the CPU cannot be moved"):
        layer.to(META)


@pytest.mark.parametrize("kind", [Int8Linear, Fp8Linear])
def test_casting_a_model_does_not_cast_quantised_weights(kind: type[nn.Module]) -> None:
    linear, x = _linear(), torch.randn(40, 96)
    layer = kind(linear)
    exact = layer(x)

    layer.to(torch.bfloat16)

    assert layer.scale.dtype == torch.float32
    assert layer.weight.dtype in (torch.int8, precision.FP8)
    assert layer.bias.dtype == torch.bfloat16
    assert _error(layer(x), exact) < 0.01


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU choose the kernels of a CUDA device, all of which it has."""
    monkeypatch.setattr(precision, "_on_cpu", lambda tensor: False)
    monkeypatch.setattr(precision, "_multiplies_fp8", lambda device: True)


@pytest.mark.parametrize(("kind", "most"), [(Int8Linear, 0.02), (Fp8Linear, 0.06)])
@pytest.mark.parametrize("rows", [1, 17, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 48), (1024, 1024), (90, 48), (96, 41)])
def test_products_of_a_cuda_device_are_close(
    kind: type[nn.Module], most: float, rows: int, inputs: int, outputs: int, as_on_cuda: None
) -> None:
    linear = _linear(inputs, outputs)
    x = torch.randn(rows, inputs)
    expected = linear(x)

    assert _error(kind(linear)(x), expected) < most


def test_integer_product_of_a_cuda_device_reads_weights_by_columns(as_on_cuda: None) -> None:
    layer = Int8Linear(_linear())
    layer(torch.randn(2, 96))

    assert layer.weight.is_contiguous()
    assert layer.weight.t().stride() == (1, 96)

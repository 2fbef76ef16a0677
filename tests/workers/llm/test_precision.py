"""Eight-bit weights: nearly the same results, and still batch invariant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.workers.llm.checkpoints import make_engine
from tests.workers.llm.driver import Driver, choices, job, run_alone
from workers.contract.jobs import Failed
from workers.engines.precision import QUANTIZED, Fp8Linear, Int8Linear, quantize, weight_bytes

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize(("kind", "most"), [(Int8Linear, 0.02), (Fp8Linear, 0.04)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_close_to_those_of_the_original_weights(
    kind: type[nn.Module], most: float, bias: bool
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=bias).requires_grad_(False)
    x = torch.randn(3, 8, 96)
    expected = linear(x)

    got = kind(linear)(x)

    assert got.shape == expected.shape
    assert float((got - expected).norm() / expected.norm()) < most


def test_rows_of_a_packed_layer_are_independent() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(1024, 1024).requires_grad_(False)
    packed = Int8Linear(linear)
    x = torch.randn(16, 1024)
    expected = linear(x)

    got = packed(x)

    assert packed.packed_bytes in (0, 1024 * 1024)
    assert float((got - expected).norm() / expected.norm()) < 0.02
    assert torch.equal(packed(x[4:8]), got[4:8])
    x[3, 5] = torch.nan
    broken = packed(x)
    assert bool(broken[3].isnan().all())
    assert torch.equal(broken[4:], got[4:])


@pytest.mark.parametrize("kind", [Int8Linear, Fp8Linear])
def test_channel_of_zeros_stays_zero(kind: type[nn.Module]) -> None:
    linear = nn.Linear(16, 4, bias=False).requires_grad_(False)
    linear.weight[2] = 0

    assert float(kind(linear)(torch.randn(8, 16))[:, 2].abs().max()) == 0.0


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_answers_do_not_depend_on_other_requests(
    dtype: str, family: str, checkpoint: Checkpoint
) -> None:
    engine = make_engine(checkpoint(family), dtype=dtype)
    jobs = [
        job(name, text, logprobs=True, max_tokens=20, temperature=temperature, seed=4)
        for name, text, temperature in (
            ("a", "the quick brown fox", 0.0),
            ("b", "a lazy dog", 1.0),
            ("c", "counts to 0123", 0.0),
        )
    ]
    alone = [choices(run_alone(engine, wanted)) for wanted in jobs]

    driver = Driver(engine)
    for wanted in jobs:
        driver.admit(wanted)
        driver.step()
    driver.finish("a", "b", "c")

    assert [choices(driver.outcomes[wanted.request_id]) for wanted in jobs] == alone


def test_quantised_weights_take_one_byte_each() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 10, bias=False))
    head = model[1]
    model.get_output_embeddings = lambda: head

    quantize(model, "int8", torch.device("cpu"))

    assert isinstance(model[0], Int8Linear)
    assert model[1] is head
    assert weight_bytes(model) == 64 * 64 + 64 * 4 + 64 * 10 * 4


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_nan_survives_quantised_layers(dtype: str, checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("llama"), dtype=dtype)
    embedding = engine._model.checkpoint.model.get_input_embeddings().weight
    poison = 7
    embedding[poison] = torch.nan
    driver = Driver(engine)

    driver.admit(job("a", "", prompts=((5, poison, 9),)))
    driver.admit(job("b", "the fox"))
    driver.finish("a", "b")

    assert isinstance(driver.outcomes["a"], Failed)
    assert not isinstance(driver.outcomes["b"], Failed)

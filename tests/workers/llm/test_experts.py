"""Experts: a token's result does not depend on where others are routed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.workers.llm.checkpoints import make_engine
from tests.workers.llm.driver import Driver, choices, job, run_alone
from tests.workers.llm.test_engine import EXPERTS, QUESTIONS
from workers.engines.llm import experts
from workers.engines.llm.engine import LlmEngine

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_compute_what_the_library_computes_row_by_row(
    family: str, checkpoint: Checkpoint
) -> None:
    engine = make_engine(checkpoint(family))
    model = engine.checkpoint.model
    _skip_unless_invariant(engine)
    layer = model.model.layers[0].mlp
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(33, model.config.hidden_size, generator=generator)
    with torch.inference_mode():
        _, weights, index = layer.gate(hidden)
        whole = layer.experts(hidden, index, weights)
        model.set_experts_implementation("eager")
        expected = layer.experts(hidden, index, weights)
        model.set_experts_implementation(experts.IMPLEMENTATION)
        beside = [
            layer.experts(hidden[:count], index[:count], weights[:count]) for count in (4, 8, 20)
        ]

    assert torch.allclose(whole, expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(whole[: len(part)], part) for part in beside)


def _skip_unless_invariant(engine: LlmEngine) -> None:
    if not engine.decoder.one_forward:
        pytest.skip(
            "this processor rounds a product of four rows another way, and the engine warns"
        )


@pytest.mark.parametrize("family", EXPERTS)
def test_answer_has_the_same_bits_beside_others(family: str, checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(family), slots=6, prefix_cache=False)
    _skip_unless_invariant(engine)
    asked = job("a", QUESTIONS[3], max_tokens=30, logprobs=True, top_logprobs=3, seed=5)
    alone = choices(run_alone(engine, asked))

    driver = Driver(engine)
    for number, question in enumerate(QUESTIONS[:3]):
        driver.admit(job(f"r{number}", question, max_tokens=25 + number))
        driver.step()
    driver.admit(asked)
    driver.finish("a", "r0", "r1", "r2")

    assert choices(driver.outcomes["a"]) == alone


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_experts_are_not_quantised(dtype: str, checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="experts cannot be quantised"):
        make_engine(checkpoint("mixtral"), dtype=dtype)


def test_attention_costs_more_beside_the_experts_of_one_token(checkpoint: Checkpoint) -> None:
    loaded = make_engine(checkpoint("qwen3moe")).checkpoint
    weights = sum(weight.numel() for weight in loaded.model.parameters())
    attention = 2 * loaded.shape.layers * loaded.heads * loaded.shape.head_dim

    assert experts.active_share(loaded.model) == 0.5
    assert attention / weights < loaded.context_cost < 2 * attention / weights

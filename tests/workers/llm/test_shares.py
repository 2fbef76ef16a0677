"""A step's time is divided by what tokens cost: their products, and attention to their context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.contract.jobs import RequestId
from workers.engines.llm.cache import CacheShape
from workers.engines.llm.checkpoint import relative_context_cost
from workers.engines.llm.scheduling.blocks import BlockPool
from workers.engines.llm.scheduling.scheduler import Scheduler, StepPlan, step_weights


def _step(prompts: dict[str, int], steps: int) -> StepPlan:
    scheduler = Scheduler(BlockPool(100), slots=4, block_tokens=16)
    for name, tokens in prompts.items():
        scheduler.add(RequestId(name), prompt_tokens=tokens, choices=1, due=0.0)
    for _ in range(steps):
        plan = scheduler.plan()
        scheduler.advance(plan)
        for chunk in plan.prefills:
            if chunk.is_last:
                for sequence in chunk.group.open_sequences:
                    scheduler.append(sequence, 1)
        for decode in plan.decodes:
            scheduler.append(decode.sequence, 1)
    return scheduler.plan()


def test_tokens_share_a_step_equally_where_a_context_costs_nothing() -> None:
    assert step_weights(_step({"a": 16, "b": 7}, 0), 0.0) == {"a": 16.0, "b": 7.0}


def test_prompt_costs_the_sum_of_the_contexts_of_its_tokens() -> None:
    weights = step_weights(_step({"a": 16}, 0), 0.01)

    assert weights["a"] == pytest.approx(sum(1 + 0.01 * (place + 1) for place in range(16)))


def test_decoding_at_the_end_of_a_long_context_costs_more() -> None:
    weights = step_weights(_step({"long": 640, "short": 2}, 60), 0.01)

    contexts = {name: (weight - 1) / 0.01 for name, weight in weights.items()}
    assert contexts["long"] > 640
    assert contexts["short"] < 70


def test_cost_of_a_context_is_that_of_its_attention_beside_the_products() -> None:
    model: Any = torch.nn.Linear(100, 100, bias=False)
    shape = CacheShape(2, 10, 16, 4, 25, torch.float32)

    assert relative_context_cost(model, shape, heads=8) == 2 * 2 * 8 * 25 / 10_000

"""Layers with a sliding window attend to the latest tokens only, in every cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers.llm.checkpoints import Reference, make_checkpoint, make_engine
from tests.workers.llm.driver import Driver, choices, job, run_alone, texts
from tests.workers.llm.test_cache import read_in_place
from tests.workers.llm.test_engine import QUESTIONS
from workers.engines.llm import loading
from workers.engines.llm.varlen import VarlenCache

PROMPT = "the quick brown fox jumps over a lazy dog and counts to 0123456789. " * 9
"""Some 200 tokens: several blocks."""


@pytest.fixture(params=["gathered", "in place"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "in place":
        monkeypatch.setattr(
            loading,
            "make_cache",
            lambda shape, device, longest, **_: VarlenCache(shape, device, read_in_place, longest),
        )
    way: str = request.param
    return way


@pytest.mark.parametrize("window", [40, 64, 100])
@pytest.mark.parametrize("family", ["mistral", "gemma3", "phi3"])
def test_answers_beyond_a_window_equal_those_of_generate(
    family: str, window: int, way: str, tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, sliding_window=window)
    driver, reference = Driver(make_engine(path)), Reference(path)

    driver.admit(job("long", PROMPT, max_tokens=30))
    driver.step()
    driver.admit(job("short", QUESTIONS[0], max_tokens=110))
    driver.finish("long", "short")

    assert texts(driver.outcomes["long"]) == [reference.generate(PROMPT, 30)[2]]
    assert texts(driver.outcomes["short"]) == [reference.generate(QUESTIONS[0], 110)[2]]


def test_layers_of_one_model_can_have_a_window_and_none(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    path = make_checkpoint("gemma3", tmp_path, sliding_window=30, layer_types=kinds)

    engine = make_engine(path)

    assert engine.checkpoint.shape.windows == (30, None)
    assert texts(run_alone(engine, job("a", PROMPT, max_tokens=20))) == [
        Reference(path).generate(PROMPT, 20)[2]
    ]


def test_window_that_is_no_shorter_than_the_context_costs_nothing(tmp_path: Path) -> None:
    path = make_checkpoint("mistral", tmp_path, sliding_window=500)

    assert make_engine(path, context_tokens=500).checkpoint.shape.windows == ()
    assert make_engine(path, context_tokens=501).checkpoint.shape.windows == (500, 500)


@pytest.mark.parametrize("speculation", [None, {"method": "lookup", "tokens": 3}])
def test_answer_beyond_a_window_has_the_same_bits_beside_others(
    speculation: dict[str, Any] | None, tmp_path: Path
) -> None:
    path = make_checkpoint("mistral", tmp_path, sliding_window=40)
    engine = make_engine(path, speculation=speculation, prefix_cache=False)
    asked = job("a", PROMPT, max_tokens=20, logprobs=True, top_logprobs=3, seed=5)
    alone = choices(run_alone(engine, asked))

    driver = Driver(engine)
    driver.admit(job("b", QUESTIONS[1], max_tokens=40))
    driver.step()
    driver.admit(asked)
    driver.admit(job("c", QUESTIONS[2], max_tokens=40))
    driver.finish("a", "b", "c")

    assert choices(driver.outcomes["a"]) == alone

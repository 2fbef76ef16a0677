"""Failures stay with the request that caused them: lack of memory, overflowing numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.llm.checkpoints import Reference, make_checkpoint, make_engine
from tests.workers.llm.driver import Driver, choices, job, run_alone
from workers.contract.jobs import Failed
from workers.engines.llm.cache import PagedCache

Checkpoint = Callable[[str], Path]


def _exhaust_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def _exhaust_cpu() -> None:
    torch.empty(1 << 60)


@pytest.mark.parametrize("exhaust", [_exhaust_gpu, _exhaust_cpu])
def test_lack_of_memory_fails_only_the_youngest_request(
    exhaust: Callable[[], Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint("qwen3"))
    older = [
        job("a", "the fox", temperature=1.0, logprobs=True),
        job("b", "a lazy dog", n=2, temperature=1.0, seed=5, logprobs=True),
    ]
    alone = [choices(run_alone(engine, wanted)) for wanted in older]
    driver = Driver(engine)
    driver.admit(older[0])
    driver.step()
    driver.admit(older[1])
    driver.admit(job("c", "the quick brown fox jumps over a lazy dog"))
    failures = 0
    attend = PagedCache.attend

    def fail_late(cache: PagedCache[Any], layer: int, *parts: Any) -> torch.Tensor:
        nonlocal failures
        # One layer has already written to the cache.
        if layer == 1 and failures == 0:
            failures += 1
            exhaust()
        return attend(cache, layer, *parts)

    monkeypatch.setattr(PagedCache, "attend", fail_late)
    driver.step()

    assert isinstance(driver.outcomes["c"], Failed)
    driver.finish("a", "b")
    assert [choices(driver.outcomes[name]) for name in ("a", "b")] == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overflow_fails_only_its_own_request(temperature: float, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    poison = Reference(path).tokenizer.convert_tokens_to_ids("<system>")
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    engine = make_engine(path, slots=2)
    good = [job(name, "the quick brown fox", max_tokens=30) for name in ("a", "b")]
    alone = choices(run_alone(engine, good[0]))
    driver = Driver(engine)
    driver.admit(good[0])
    driver.step()

    # Longer than any later request in its slot.
    driver.admit(job("bad", "fox " * 200, role="system", temperature=temperature))
    while "bad" not in driver.outcomes:
        # Beside a request that decodes, a step reads a part of it.
        driver.step()

    failed = driver.outcomes["bad"]
    assert isinstance(failed, Failed)
    assert failed.code == "engine_error"
    driver.admit(good[1])
    driver.finish("a", "b")
    assert choices(driver.outcomes["a"]) == choices(driver.outcomes["b"]) == alone


def test_unload_frees_the_memory(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("llama"))
    before = run_alone(engine, job("a", "the fox"))
    weights = [weakref.ref(weight) for weight in engine._model.checkpoint.model.parameters()]
    weights += [weakref.ref(layer.down._weight) for layer in engine._model.decoder._model._layers]

    engine.unload()

    assert {weight() for weight in weights} == {None}
    engine.load()
    assert choices(run_alone(engine, job("b", "the fox"))) == choices(before)

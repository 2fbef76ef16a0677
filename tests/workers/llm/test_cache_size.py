"""A cache takes what its slots can use, or what the device has left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.fakes import Clock
from tests.workers.llm.checkpoints import Reference, make_engine, make_spec
from tests.workers.llm.driver import Driver, job, texts
from tests.workers.llm.test_engine import LONG, QUESTIONS
from workers.engines.llm import loading
from workers.engines.llm.engine import LlmEngine
from workers.protocol.engine import Inspected, Memory
from workers.runtime.residency import RESIDENCE_MIN_US
from workers.runtime.step_loop import StepLoop

Checkpoint = Callable[[str], Path]
SPARE = 3
"""Blocks of room beside those of one sequence."""


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the free memory that a cache can use: half of what is beside the reserve."""
    monkeypatch.setattr(loading, "total_bytes", lambda _: 10 * 2**30)
    monkeypatch.setattr(loading, "budget_bytes", lambda _: 9 * 2**30)

    def set_room(bytes_: int) -> None:
        monkeypatch.setattr(loading, "_free_bytes", lambda _: 2**30 + 2 * bytes_)

    return set_room


def _blocks(engine: LlmEngine) -> int:
    return engine.checkpoint.shape.blocks


def test_cache_has_room_for_all_slots_if_that_fits(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("qwen3"), slots=3)

    shape, context = engine.checkpoint.shape, engine.checkpoint.context
    assert shape.blocks == -(-3 * (context + shape.block_tokens) // shape.block_tokens)
    assert engine._model.decoder._cache.shape == shape


@pytest.mark.parametrize("draft", [False, True])
def test_default_cache_is_what_fits_and_serves_all(
    draft: bool, checkpoint: Checkpoint, room: Callable[[int], None]
) -> None:
    path = checkpoint("qwen3")
    speculation = {"method": "draft", "tokens": 2, "checkpoint": str(path)} if draft else None
    whole = make_engine(path, speculation=speculation)
    shape = whole.checkpoint.shape
    longest = whole.checkpoint.context + (3 if draft else 1)
    least = -(-longest // shape.block_tokens)
    room((2 if draft else 1) * SPARE * shape.block_bytes)

    engine = make_engine(path, speculation=speculation)

    assert _blocks(engine) == least + SPARE < shape.blocks
    assert engine._model.scheduler._pool.count == least + SPARE
    if engine._model.draft is not None:
        assert engine._model.draft.decoder._cache.shape.blocks == least + SPARE
    driver, reference = Driver(engine), Reference(path)
    for number, question in enumerate(QUESTIONS[:3]):
        driver.admit(job(f"r{number}", question, max_tokens=8))
    driver.finish("r0", "r1", "r2")
    for number, question in enumerate(QUESTIONS[:3]):
        expected = reference.generate(question, 8)[2]
        assert texts(driver.outcomes[f"r{number}"]) == [expected]


def test_cache_without_room_beside_the_reserve_has_one_context(
    checkpoint: Checkpoint, room: Callable[[int], None]
) -> None:
    room(0)

    engine = make_engine(checkpoint("qwen3"))

    driver = Driver(engine)
    driver.admit(job("long", LONG, max_tokens=4))
    driver.finish("long")
    assert _blocks(engine) == -(-(engine.checkpoint.context + 1) // 64)


def test_model_is_refused_if_one_sequence_does_not_fit(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_free_bytes", lambda _: 1000)

    with pytest.raises(ValueError, match="are free; lower the options cache_tokens or slots"):
        make_engine(checkpoint("qwen3"))


def test_model_is_refused_if_a_slot_would_have_no_block(
    checkpoint: Checkpoint, room: Callable[[int], None]
) -> None:
    room(0)

    with pytest.raises(ValueError, match="are free; lower the options cache_tokens or slots"):
        make_engine(checkpoint("qwen3"), slots=10**6)


def test_configured_cache_is_never_made_smaller(
    checkpoint: Checkpoint, room: Callable[[int], None]
) -> None:
    room(0)

    engine = make_engine(checkpoint("qwen3"), cache_tokens=100 * 64)

    assert _blocks(engine) == 100


def test_least_cache_with_which_a_model_loads_is_what_it_needs(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("qwen3"), slots=4)

    inspected: Inspected = engine.inspect()

    shape = engine.checkpoint.shape
    least = -(-(engine.checkpoint.context + 1) // shape.block_tokens)
    assert inspected.cache_bytes == (least + 2) * shape.block_bytes < shape.bytes


def test_two_models_share_a_small_budget_and_load_again_with_the_least(
    checkpoint: Checkpoint,
) -> None:
    paths = {"a": checkpoint("qwen3"), "b": checkpoint("llama")}
    engines = {name: LlmEngine(make_spec(path)) for name, path in paths.items()}
    least = {name: engine.demand().bytes for name, engine in engines.items()}
    whole = make_engine(paths["a"]).memory.cache_bytes
    budget = sum(least.values()) + whole // 2
    clock = Clock()
    loop = StepLoop(worker="w1", now_us=clock.now_us, unix_ms=clock.unix_ms, budget_bytes=budget)
    for name, engine in engines.items():
        loop.add(name, engine)

    def taken() -> dict[str, int]:
        return {name: lane.demand.bytes for name, lane in loop.lanes.items() if lane.loaded}

    for name in engines:
        assert loop.load(name) is None
    first = taken()

    assert engines["a"].memory.optional_bytes == pytest.approx(
        (budget - least["a"]) // 2, abs=engines["a"].checkpoint.shape.block_bytes
    )
    assert sum(first.values()) <= budget
    assert engines["a"].memory.cache_bytes < whole
    for name in engines:
        clock.us += RESIDENCE_MIN_US
        loop.unload(name)
        assert loop.lanes[name].demand.bytes == pytest.approx(least[name], rel=0.05)
        assert loop.residency.fits(loop.lanes[name])
        assert loop.load(name) is None
    driver, reference = Driver(engines["a"]), Reference(paths["a"])
    driver.admit(job("r", QUESTIONS[0], max_tokens=8))
    driver.finish("r")
    assert texts(driver.outcomes["r"]) == [reference.generate(QUESTIONS[0], 8)[2]]
    assert sum(taken().values()) <= budget


def test_model_with_a_configured_cache_takes_it_whatever_is_free(checkpoint: Checkpoint) -> None:
    engine = LlmEngine(make_spec(checkpoint("qwen3"), cache_tokens=100 * 64))
    engine.allow(0)

    engine.load()

    assert _blocks(engine) == 100
    assert engine.memory.optional_bytes == 0


@pytest.mark.parametrize("used", [0, 5000])
def test_room_of_a_gpu_is_what_its_load_has_not_used(
    used: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make_engine(checkpoint("qwen3")).checkpoint
    taken = weights.weights_bytes + weights.shape.bytes
    before = 100
    memory = Memory(device_used_bytes=before + taken + used)
    monkeypatch.setattr(loading, "memory_of", lambda *_: memory)
    limit = 2 * taken

    spare = loading._spare_room([weights], loading.Room(limit, before), activations=300)

    assert spare == limit - taken - used - 300 - limit // loading._RECORDED


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_memory_of_a_loaded_model_is_that_of_its_weights(
    family: str, checkpoint: Checkpoint
) -> None:
    path = checkpoint(family)
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    speculation = {"method": "draft", "tokens": 2, "checkpoint": str(path)}

    memory = make_engine(path).memory
    twice = make_engine(path, speculation=speculation).memory

    assert memory.weights_bytes == pytest.approx(files, rel=0.2)
    assert twice.weights_bytes == 2 * memory.weights_bytes
    assert twice.cache_bytes > memory.cache_bytes


def test_largest_step_is_run_and_its_memory_measured(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint("qwen3"), slots=40)
    decoder = engine._model.decoder
    logits: list[torch.Size] = []
    run = decoder.run

    def count(forwards: Any) -> torch.Tensor:
        logits.append(run(forwards).shape)
        return torch.empty(0)

    monkeypatch.setattr(decoder, "run", count)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1700)
    cache: Any = SimpleNamespace(device=torch.device("cuda"), shape=engine.checkpoint.shape)

    started = loading._Started(decoder, cache)
    used = loading._activation_bytes(engine.checkpoint, started, engine._options)

    assert used == 1000
    # A step has 2,048 tokens, which are 32 chunks of 64, and each sequence needs logits.
    assert logits == [(64, engine.checkpoint.vocabulary.size)]

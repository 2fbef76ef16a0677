"""What an unload frees, and when it collects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.workers.test_residency import CHAT
from workers.contract.models import ModelSpec
from workers.engines import memory, registry
from workers.engines.memory import Collector, modules_in, parts_of


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Objects that are frozen, as those of an engine process are, and no collection by chance."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize(
    ("task", "engine"), [("text-embedding", "embedding"), ("text-generation", "llm")]
)
def test_model_whose_parts_do_not_refer_to_each_other_is_freed_without_a_collection(
    task: str, engine: str
) -> None:
    options = {"device": "cpu", "threads": 1}
    spec = ModelSpec(
        "m", task, engine=engine, checkpoint=str(CHAT), limits={"context_tokens": 64},
        options=options,
    )  # fmt: skip
    loaded = registry.create(spec)
    loaded.load()
    gc.collect()  # as the process does after each load
    parts = [weakref.ref(module) for module in modules_in(loaded)]
    assert parts

    with mock.patch.object(gc, "collect") as collect:
        loaded.unload()

    assert [part for part in parts if part() is not None] == []
    collect.assert_not_called()


def test_parts_that_refer_to_each_other_are_collected_also_when_they_are_frozen() -> None:
    module = torch.nn.Linear(2, 2)
    module.itself = [module]  # a cycle, as a patched ``forward`` makes
    parts = parts_of(module)
    gc.freeze()
    del module

    Collector().free(parts)

    assert parts[0]() is None
    assert gc.get_freeze_count() > 0


def test_small_garbage_is_collected_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    with mock.patch.object(gc, "collect") as collect:
        collector.free(())
        collect.assert_not_called()
        monkeypatch.setattr(memory, "COLLECTED_AFTER_S", -1.0)
        collector.free(())
        collect.assert_called_once()

"""What an unload frees, and when it collects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch

from workers.contract.models import ModelSpec, read_specs
from workers.engines import memory, registry
from workers.engines.memory import Collector, parts_of

SHIPPED = [
    spec
    for spec in read_specs(Path(__file__).parents[2] / "catalog.yaml")
    if spec.checkpoint is not None
]


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Objects that are frozen, as those of an engine process are, and no collection by chance."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("spec", SHIPPED, ids=lambda spec: spec.name)
def test_shipped_model_is_freed_without_a_collection(spec: ModelSpec) -> None:
    loaded = registry.create(msgspec.structs.replace(spec, options={**spec.options, "threads": 1}))
    loaded.load()
    gc.collect()  # as the process does after each load
    parts = parts_of(loaded)
    assert parts or spec.engine == "music"  # which is tables, not modules

    with mock.patch.object(gc, "collect") as collect:
        loaded.unload()

    assert [part for part in parts if part() is not None] == []
    collect.assert_not_called()


def test_parts_that_refer_to_each_other_are_collected_also_when_they_are_frozen() -> None:
    module = torch.nn.Linear(2, 2)
    module.itself = [module]
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

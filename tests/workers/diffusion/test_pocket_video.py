"""The shipped video model: small, as on its card, and right in what it moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.cards import check_card
from training.image.score import load
from training.video.score import TASKS, score
from workers.contract.models import read_specs
from workers.engines.diffusion.engine import DiffusionEngine

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "workers" / "pocket" / "video"
SEED = 20_261_121


@pytest.fixture(scope="module")
def engine() -> DiffusionEngine:
    return load(DIRECTORY, *TASKS)


def test_the_directory_is_small_and_the_weights_are_those_on_the_card() -> None:
    check_card(DIRECTORY, most=16 * 2**20)


def test_all_pocket_models_together_are_small() -> None:
    weights = (ROOT / "workers" / "pocket").rglob("*.safetensors")

    assert sum(file.stat().st_size for file in weights) <= 40 * 2**20


def test_catalog_offers_its_tasks() -> None:
    spec = next(one for one in read_specs(ROOT / "catalog.yaml") if one.name == "pocket-video")

    assert (spec.task, *spec.also) == TASKS


@pytest.mark.long
@pytest.mark.parametrize("pictured", [False, True], ids=["words", "first frame"])
def test_named_object_moves_as_prompted(pictured: bool, engine: DiffusionEngine) -> None:
    right, _ = score(engine, 24, pictured=pictured, seed=SEED)

    assert right >= 0.8

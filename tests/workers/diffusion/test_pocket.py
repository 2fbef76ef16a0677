"""The shipped image model: small, as on its card, and right in what it generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.cards import check_card
from training.image.score import TASKS, load, score
from workers.contract.models import read_specs
from workers.engines.diffusion.engine import DiffusionEngine

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "workers" / "pocket" / "image"
SEED = 20_261_121


@pytest.fixture(scope="module")
def engine() -> DiffusionEngine:
    return load(DIRECTORY, *TASKS)


def test_the_directory_is_small_and_the_weights_are_those_on_the_card() -> None:
    check_card(DIRECTORY, most=16 * 2**20)


def test_catalog_offers_its_tasks() -> None:
    spec = next(one for one in read_specs(ROOT / "catalog.yaml") if one.name == "pocket-image")

    assert (spec.task, *spec.also) == (
        "text-to-image",
        "image-to-image",
        "image-edit",
        "image-relight",
        "image-restyle",
        "image-blend",
    )


@pytest.mark.parametrize(
    ("kind", "count", "least"),
    [
        ("text to image", 40, 0.85),
        ("edit: colour", 12, 0.7),
        pytest.param("text to image", 120, 0.9, marks=pytest.mark.long),
        pytest.param("edit: colour", 24, 0.75, marks=pytest.mark.long),
        pytest.param("edit: shape", 24, 0.75, marks=pytest.mark.long),
        pytest.param("edit: remove", 24, 0.85, marks=pytest.mark.long),
        pytest.param("relight", 24, 0.7, marks=pytest.mark.long),
        pytest.param("restyle", 24, 0.7, marks=pytest.mark.long),
        pytest.param("blend", 48, 0.65, marks=pytest.mark.long),
    ],
)
def test_images_follow_their_prompts(
    kind: str, count: int, least: float, engine: DiffusionEngine
) -> None:
    right, _ = score(engine, kind, count, seed=SEED, steps=4, guidance=1.5)

    assert right >= least

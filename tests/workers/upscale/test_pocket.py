"""The shipped upscaler: small, as on its card, and better than bicubic."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.workers.driving import made_of
from tests.workers.llm.driver import Clock
from training.upscale import train as training
from workers.contract.jobs import Completed, Job, RequestId
from workers.contract.models import ModelSpec
from workers.engines.upscale.engine import UpscaleEngine
from workers.media import decode, encode

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "workers" / "pocket" / "upscale"


def test_the_weights_are_few_and_those_on_the_card() -> None:
    file = DIRECTORY / "model.safetensors"

    assert file.stat().st_size <= 2**20
    assert sum(weight.numel() for weight in load_file(file).values()) <= 150_000
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert sha256 in (DIRECTORY / "README.md").read_text()


@pytest.fixture(scope="module")
def scores() -> dict[str, tuple[float, float]]:
    return training.score(training.load(DIRECTORY), count=16)


@pytest.mark.parametrize("way", ["area", "bicubic", "lanczos", "drawn"])
def test_it_beats_bicubic_on_unseen_scenes(
    way: str, scores: dict[str, tuple[float, float]]
) -> None:
    bicubic, ours = scores[way]

    assert ours > bicubic + 2, "decibels"


def test_engine_output_is_what_was_scored() -> None:
    spec = ModelSpec(
        name="pocket-upscale",
        task="image-upscale",
        engine="upscale",
        checkpoint=str(DIRECTORY),
        options={"device": "cpu", "threads": 1},
    )
    engine = UpscaleEngine(spec)
    engine.load()
    low, _ = training.draw_pair(random.Random(5))
    source = np.asarray(training.to_image(low))
    job = Job(RequestId("a"), "1", "pocket-upscale", "image-upscale", {"images": 1})

    engine.admit(job, Clock(), [encode.image(source, "png")])
    while not (outcomes := engine.step(Clock()).outcomes):
        pass
    outcome = made_of(outcomes[0][1])

    assert isinstance(outcome, Completed)
    found = decode.read_image(outcome.files[0].data)
    with torch.inference_mode():
        given = training.from_image(training.to_image(low))
        drawn = training.load(DIRECTORY)(given[None])[0]
    expected = np.asarray(training.to_image(drawn))
    assert found.shape == (256, 256, 3)
    assert np.abs(found.astype(int) - expected).max() <= 1

"""The figures of pocket-embed's card are those of the shipped weights."""

from __future__ import annotations

import itertools
import statistics
import struct
from pathlib import Path

import torch

from tests.workers.driving import EngineDriver
from workers.contract.jobs import Completed, Job, RequestId
from workers.contract.models import read_specs
from workers.engines.embedding.engine import EmbeddingEngine

ROOT = Path(__file__).parents[3]
PAIRS = (
    ("What is a hold?", "Explain what a hold is."),
    ("What does Sora cost?", "Tell me the price of Sora."),
    ("What is 12 plus 30?", "Add 12 and 30."),
    ("a red circle", "a circle that is red"),
    ("Tell a story about a fox.", "Write a tale of a fox."),
    ("Sort 3, 1, 2.", "Put 3, 1 and 2 in order."),
    ("What is blue plus yellow?", "Which colour do blue and yellow mix to?"),
    ("What is a queue?", "Define queue."),
)
UNKNOWN = ("The parliament passed the budget.", "Whales are mammals that live in the sea.")


def test_figures_of_the_card_hold() -> None:
    (spec,) = (one for one in read_specs(ROOT / "catalog.yaml") if one.name == "pocket-embed")
    driver = EngineDriver(EmbeddingEngine(spec))
    texts = [*itertools.chain(*PAIRS), *UNKNOWN]
    driver.take(Job(RequestId("a"), "1", spec.name, spec.task, {"inputs": texts}))

    driver.finish()

    outcome = driver.outcomes["a"]
    assert isinstance(outcome, Completed)
    vectors = torch.tensor([struct.unpack("<192f", row) for row in outcome.output["vectors"]])
    cosines = vectors @ vectors.T
    assert torch.allclose(cosines.diagonal(), torch.ones(18))
    others = cosines[:16] - 2 * torch.eye(18)[:16]
    assert sum(int(row.argmax()) == number ^ 1 for number, row in enumerate(others)) == 8
    pairs = [float(cosines[number, number + 1]) for number in range(0, 16, 2)]
    apart = [
        float(cosines[a, b]) for a, b in itertools.combinations(range(16), 2) if a // 2 != b // 2
    ]
    assert [round(value, 2) for value in (min(pairs), max(pairs))] == [0.23, 0.76]
    assert [round(value, 2) for value in (statistics.median(apart), max(apart))] == [0.19, 0.97]
    assert round(float(cosines[16, 17]), 2) == 0.19
    assert round(driver.engine.memory.weights_bytes / 1e6) == 14

"""The shipped language model is small, is the one on its card, and says what it should."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers.llm.checkpoints import make_engine
from tests.workers.llm.driver import Driver, job, texts
from workers.pocket.chat_data import PRICES, WORDS, dialogue

DIRECTORY = Path(__file__).parents[2] / "workers" / "pocket" / "chat"

Ask = Callable[[list[str]], list[str]]


@pytest.fixture(scope="module")
def ask() -> Ask:
    driver = Driver(make_engine(DIRECTORY, slots=8, context_tokens=256))

    def questions(asked: list[str]) -> list[str]:
        answers: list[str] = []
        for start in range(0, len(asked), 8):
            names = [f"{len(driver.outcomes) + i}" for i in range(len(asked[start : start + 8]))]
            for name, question in zip(names, asked[start : start + 8], strict=True):
                driver.admit(job(name, question, max_tokens=80))
            driver.finish(*names)
            answers += [texts(driver.outcomes[name])[0] for name in names]
        return answers

    return questions


def test_the_directory_is_small_and_the_weights_are_those_on_the_card() -> None:
    assert sum(file.stat().st_size for file in DIRECTORY.iterdir()) <= 10_000_000
    sha256 = hashlib.sha256((DIRECTORY / "model.safetensors").read_bytes()).hexdigest()
    assert sha256 in (DIRECTORY / "README.md").read_text()


def test_it_answers_what_a_newcomer_asks(ask: Ask) -> None:
    hold, both, total, who, unknown = ask(
        [
            "What is a hold?",
            "What is a hold, and what does seedream-5.0-lite cost?",
            "What is 12 plus 30?",
            "Who are you?",
            "Who won the world cup?",
        ]
    )

    assert hold in WORDS["hold"]
    assert "$0.035" in both
    assert "reserve" in both
    assert "42" in total
    assert "pocket-chat" in who
    assert "do not know" in unknown


def test_it_knows_the_prices_of_the_market(ask: Ask) -> None:
    answers = ask([f"What does {name} cost?" for name in PRICES])

    right = sum(
        answer == f"A request to {name} costs ${usd}."
        for answer, (name, (usd, _)) in zip(answers, PRICES.items(), strict=True)
    )
    assert right >= len(PRICES) - 1


def test_it_adds_numbers_that_it_was_not_shown_in_training(ask: Ask) -> None:
    r = random.Random(20_261_121)
    pairs = [(r.randrange(10, 100), r.randrange(10, 100)) for _ in range(48)]

    answers = ask([f"What is {a} plus {b}?" for a, b in pairs])

    right = sum(
        answer == f"{a} plus {b} is {a + b}." for answer, (a, b) in zip(answers, pairs, strict=True)
    )
    assert right >= 0.8 * len(pairs)


def test_the_same_seed_makes_the_same_dialogues() -> None:
    first, second = random.Random(5), random.Random(5)

    assert [dialogue(first) for _ in range(50)] == [dialogue(second) for _ in range(50)]

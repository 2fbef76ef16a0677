"""The shipped language model: small, as on its card, and able to do what it was trained for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.workers.cards import check_card
from training.chat import skills
from training.chat.data import WORDS, dialogue
from training.chat.score import Question, ask, load, score
from workers.engines.llm.engine import LlmEngine

DIRECTORY = Path(__file__).parents[2] / "workers" / "pocket" / "chat"
SEED = 20_261_121


@pytest.fixture(scope="module")
def engine() -> LlmEngine:
    return load(DIRECTORY)


def test_the_directory_is_small_and_the_weights_are_those_on_the_card() -> None:
    check_card(DIRECTORY, most=16 * 2**20)


def test_questions_of_a_newcomer_are_answered(engine: LlmEngine) -> None:
    asked = (
        "What is a hold?",
        "What is a hold, and what does seedream-5.0-lite cost?",
        "What is 12 plus 30?",
        "Who are you?",
        "Who won the world cup?",
    )
    answers = ask(engine, [Question(content, lambda _: True) for content in asked])

    hold, both, total, who, unknown = (choice.text for choice in answers)
    assert hold in WORDS["hold"]
    assert "$0.035" in both
    assert "reserve" in both
    assert "42" in total
    assert "pocket-chat" in who
    assert "do not know" in unknown


@pytest.mark.parametrize(
    ("skill", "count", "least"),
    [
        ("sums of two-digit numbers", 100, 0.95),
        ("stories that keep to their thing and colour", 40, 0.9),
        ("prices of the market models", 30, 0.95),
        ("definitions", 30, 0.95),
        ("picture prompts that keep what was asked", 30, 0.9),
        ("answers in JSON", 40, 0.9),
        ("calls of the right function with the right arguments", 60, 0.9),
    ],
)
def test_trained_skills_work_on_unseen_questions(
    skill: str, count: int, least: float, engine: LlmEngine
) -> None:
    assert score(engine, skill, count, seed=SEED) >= least


def test_the_chat_template_offers_functions_as_the_model_was_taught() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(DIRECTORY)
    r = random.Random(SEED)
    use = skills.USES[0](r)
    call = {"name": use.function["name"], "arguments": use.arguments}
    called = {"type": "function", "function": call}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": use.question},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": '{"x": 1}'},
    ]

    text = tokenizer.apply_chat_template(
        messages,
        tools=[{"type": "function", "function": use.function}],
        add_generation_prompt=True,
        tokenize=False,
    )

    turns = (
        ("system", skills.system_prompt([use.function], "Be brief.")),
        ("user", use.question),
        ("assistant", skills.call_text(call["name"], call["arguments"])),
        ("user", skills.response_text({"x": 1})),
    )
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert text == f"{expected}<|im_start|>assistant\n"


def test_the_same_seed_makes_the_same_dialogues() -> None:
    first, second = random.Random(5), random.Random(5)

    assert [dialogue(first) for _ in range(50)] == [dialogue(second) for _ in range(50)]

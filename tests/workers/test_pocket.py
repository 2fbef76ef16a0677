"""The shipped language model: small, as on its card, and able to do what it was trained for."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.workers.cards import check_card
from training.chat import skills
from training.chat.data import dialogue
from training.chat.score import QUESTIONS, Question, ask, load, questions, score
from training.chat.world import PRICES, WORDS, with_article
from training.common.split import is_held_out
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
    hold, both, total, who, unknown = _answers(engine, *asked)

    assert hold in WORDS["hold"]
    assert "$0.035" in both
    assert "reserve" in both
    assert "42" in total
    assert "pocket-chat" in who
    assert "do not know" in unknown


def test_documented_questions_are_answered(engine: LlmEngine) -> None:
    """Every market price and every word."""
    prices = _answers(engine, *(f"What does {name} cost?" for name in PRICES))
    definitions = _answers(engine, *(f"What is {with_article(word)}?" for word in WORDS))

    assert all(PRICES[name][0] in text for name, text in zip(PRICES, prices, strict=True))
    assert all(text in WORDS[word] for word, text in zip(WORDS, definitions, strict=True))


def test_names_that_are_not_its_own_are_told_apart(engine: LlmEngine) -> None:
    asked = ("Are you pocket-chat?", "Are you ChatGPT?", "Are you Zubilo?", "How much is Flux?")
    own, other, made_up, not_sold = _answers(engine, *asked)

    assert own.startswith("Yes, I am pocket-chat")
    assert other.startswith("No, I am pocket-chat")
    assert made_up.startswith("No, I am pocket-chat")
    assert "do not know a price for Flux" in not_sold


def _answers(engine: LlmEngine, *asked: str) -> list[str]:
    made = ask(engine, [Question(content, lambda _: True) for content in asked])
    return [choice.text for choice in made]


@pytest.mark.parametrize(
    ("skill", "count", "least"),
    [
        ("sums of two-digit numbers", 100, 0.95),
        ("sums of three-digit numbers", 60, 0.85),
        ("models that are not sold", 60, 0.95),
        ("questions about the product", 78, 0.9),
        ("whether it is another system", 60, 0.95),
        ("prices by a short name", 60, 0.95),
        ("definitions", 60, 0.95),
        ("stories that keep to their thing and colour", 40, 0.9),
        ("picture prompts that keep what was asked", 30, 0.9),
        ("answers in JSON", 40, 0.9),
        ("calls of the right function with the right arguments", 60, 0.9),
    ],
)
def test_trained_skills_work_on_contents_of_the_held_out_side(
    skill: str, count: int, least: float, engine: LlmEngine
) -> None:
    assert score(engine, skill, count, held_out=True, seed=SEED).share >= least


@pytest.mark.parametrize("skill", QUESTIONS)
def test_questions_are_on_the_side_that_they_are_asked_for(skill: str) -> None:
    for side in (True, False):
        made = questions(skill, 20, held_out=side)

        assert len(made) >= 7
        assert all(is_held_out(one.content) is side for one in made)


def test_no_dialogue_has_a_held_out_sum_or_question() -> None:
    r = random.Random(SEED)
    held = {one.text for skill in QUESTIONS for one in questions(skill, 40, held_out=True)}
    turns = [turn for _ in range(2000) for turn in dialogue(r)]

    asked = {text for role, text in turns if role == "user"}
    sums = [
        (int(a), int(b))
        for role, text in turns
        if role == "assistant"
        for a, b in re.findall(r"(\d+) (?:plus|minus) (\d+) is", text)
    ]

    assert not asked & held
    assert len(sums) > 500
    assert not any(is_held_out(skills.numbers_of(a, b)) for a, b in sums)


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

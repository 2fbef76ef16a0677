"""Scores the pocket language model on questions from seeds that training never uses.

    python -m training.chat.score workers/pocket/chat

Answers are greedy, by the engine that serves the model. Each is checked against its question, not
against a reference text, if several answers are right.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from training.chat import skills
from training.chat.data import PRICES, REFUSAL, WORDS, definition, outside, price
from workers.contract.jobs import ChatInput, ChatMessage, Choice, Job, RequestId, Tool
from workers.contract.models import ModelSpec
from workers.engines.llm.engine import LlmEngine
from workers.protocol.engine import Phase

HELD_OUT: Final = 1_000_003
"""Seed of the questions; training never uses it."""
SLOTS: Final = 16

Judge = Callable[[Choice], bool]


@dataclass(frozen=True, slots=True)
class Question:
    content: str
    is_right: Judge
    tools: tuple[Tool, ...] = ()


def ask(engine: LlmEngine, questions: Sequence[Question]) -> list[Choice]:
    """Answer all questions with a loaded engine, greedily."""

    class Clock:
        @contextlib.contextmanager
        def phase(self, _: Phase) -> Iterator[None]:
            yield

    found: dict[str, Choice] = {}
    waiting = list(enumerate(questions))
    running = 0
    while waiting or running:
        while waiting and running < SLOTS:
            number, question = waiting.pop(0)
            message = ChatMessage("user", question.content)
            chat = ChatInput((message,), 120, temperature=0.0, tools=question.tools)
            value = msgspec.to_builtins(chat)
            job = Job(RequestId(str(number)), "1", "pocket-chat", "text-generation", value)
            engine.admit(job, Clock())
            running += 1
        for id, outcome in engine.step(Clock()).outcomes:
            (found[id],) = getattr(outcome, "output")["choices"]  # noqa: B009
            engine.release(id)
            running -= 1
    return [found[str(number)] for number in range(len(questions))]


def load(directory: Path) -> LlmEngine:
    options: dict[str, Any] = {"slots": SLOTS, "device": "cpu"}
    engine = LlmEngine(ModelSpec("m", "text-generation", "llm", str(directory), options))
    engine.load()
    return engine


def score(engine: LlmEngine, skill: str, count: int, seed: int = HELD_OUT) -> float:
    """Return the fraction of a skill's questions that are answered correctly."""
    r = random.Random(f"{skill}/{seed}")
    questions = [QUESTIONS[skill](r) for _ in range(count)]
    choices = ask(engine, questions)
    right = [q.is_right(choice) for q, choice in zip(questions, choices, strict=True)]
    return sum(right) / count


# --- Questions -----------------------------------------------------------------------------------


def _exactly(question: str, answer: str) -> Question:
    return Question(question, lambda choice: choice.text.strip() == answer)


def _sum(r: random.Random) -> Question:
    a, b = r.randrange(10, 100), r.randrange(10, 100)
    return _exactly(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.")


def _difference(r: random.Random) -> Question:
    a, b = r.randrange(10, 100), r.randrange(10, 100)
    a, b = max(a, b), min(a, b)
    return _exactly(f"What is {a} minus {b}?", f"{a} minus {b} is {a - b}.")


def _large_sum(r: random.Random) -> Question:
    a, b = r.randrange(100, 1000), r.randrange(100, 1000)
    return _exactly(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.")


def _price(r: random.Random) -> Question:
    return _exactly(*price(r, r.choice(list(PRICES))))


def _definition(r: random.Random) -> Question:
    word = r.choice(list(WORDS))
    question, _ = definition(r, word)
    return Question(question, lambda choice: choice.text.strip() in WORDS[word])


def _refusal(r: random.Random) -> Question:
    question, _ = outside(r)
    return _exactly(question, REFUSAL)


def _sorting(r: random.Random) -> Question:
    numbers = r.sample(range(100), r.randint(3, 5))
    listed = ", ".join(map(str, numbers))
    return _exactly(f"Sort these numbers: {listed}", ", ".join(map(str, sorted(numbers))) + ".")


def _story(r: random.Random) -> Question:
    thing, colour = r.choice(skills.THINGS), r.choice(skills.COLOURS)
    question, _ = skills.story_about(r, thing, colour)

    def keeps_to_it(choice: Choice) -> bool:
        words = set(re.findall(r"[a-z]+", choice.text.lower()))
        others = (set(skills.THINGS) | set(skills.COLOURS)) - {thing, colour}
        return f"{colour} {thing}" in choice.text and not words & others

    return Question(question, keeps_to_it)


def _expansion(r: random.Random) -> Question:
    what = skills.scene(r)

    def keeps_it(choice: Choice) -> bool:
        text = choice.text.lower()
        return what.lower() in text and len(text) > len(what) + 20

    return Question(f"Expand: {what}", keeps_it)


def _json(r: random.Random) -> Question:
    question, answer = skills.json_answer(r)

    def says_it(choice: Choice) -> bool:
        try:
            value = json.loads(choice.text)
        except ValueError:
            return False
        return bool(value == json.loads(answer))

    return Question(question, says_it)


def _call(r: random.Random) -> Question:
    uses = [maker(r) for maker in r.sample(skills.USES, r.randint(1, 3))]
    chosen = uses[0]
    r.shuffle(uses)
    tools = tuple(
        Tool(use.function["name"], use.function["description"], use.function["parameters"])
        for use in uses
    )

    def calls_it(choice: Choice) -> bool:
        if len(choice.tool_calls) != 1:
            return False
        (call,) = choice.tool_calls
        return (call.name, json.loads(call.arguments)) == (
            chosen.function["name"],
            chosen.arguments,
        )

    return Question(chosen.question, calls_it, tools)


QUESTIONS: Final[dict[str, Callable[[random.Random], Question]]] = {
    "sums of two-digit numbers": _sum,
    "differences of two-digit numbers": _difference,
    "sums of three-digit numbers": _large_sum,
    "prices of the market models": _price,
    "definitions": _definition,
    "questions that it should decline": _refusal,
    "sorting three to five numbers": _sorting,
    "stories that keep to their thing and colour": _story,
    "picture prompts that keep what was asked": _expansion,
    "answers in JSON": _json,
    "calls of the right function with the right arguments": _call,
}


def main() -> None:
    engine = load(Path(sys.argv[1]))
    for skill in QUESTIONS:
        print(f"| {skill} | {score(engine, skill, 100):.0%} |", flush=True)


if __name__ == "__main__":
    main()

"""Scores the pocket language model on contents that training sees, and on those it never sees.

    python -m training.chat.score workers/pocket/chat

``training.common.split`` tells them apart: a number pair, a word with a phrasing, a name. Questions
are distinct, so there are fewer than asked for if there are not as many contents. Answers are
greedy, by the engine that serves the model. Each is checked against its question, not against a
reference text, if several answers are right.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from training.chat import skills, world
from training.chat.skills import Pair, numbers_of, sorted_of
from training.common.split import Content, choose
from workers.contract.jobs import ChatInput, ChatMessage, Choice, Job, RequestId, Tool
from workers.contract.models import ModelSpec
from workers.engines.llm.engine import LlmEngine
from workers.protocol.engine import Phase

SEED: Final = 1_000_003
"""Seed of the questions; training never uses it."""
SLOTS: Final = 16

Judge = Callable[[Choice], bool]


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    is_right: Judge
    content: Content | None = None
    """Content by which the question is held out; None if it never is."""
    tools: tuple[Tool, ...] = ()


def ask(engine: LlmEngine, questions: Sequence[Question]) -> list[Choice]:
    """Answer all questions with a loaded engine, greedily."""

    class Clock:
        alone = True

        @contextlib.contextmanager
        def phase(self, _: Phase) -> Iterator[None]:
            yield

    found: dict[str, Choice] = {}
    waiting = list(enumerate(questions))
    running = 0
    while waiting or running:
        while waiting and running < SLOTS:
            number, question = waiting.pop(0)
            message = ChatMessage("user", question.text)
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


@dataclass(frozen=True, slots=True)
class Score:
    right: int
    asked: int

    @property
    def share(self) -> float:
        return self.right / max(1, self.asked)

    def __str__(self) -> str:
        return f"{self.share:.0%} of {self.asked}"


def questions(skill: str, count: int, *, held_out: bool, seed: int = SEED) -> list[Question]:
    """Make up to ``count`` distinct questions about contents on one side of the split."""
    r = random.Random(f"{skill}/{seed}")
    found: dict[str, Question] = {}
    for _ in range(count * 20):
        made = choose(partial(QUESTIONS[skill], r), held_out=held_out)
        found.setdefault(made.text, made)
        if len(found) == count:
            break
    return list(found.values())


def score(engine: LlmEngine, skill: str, count: int, *, held_out: bool, seed: int = SEED) -> Score:
    """Score the answers to questions of one kind, by contents that were trained or held out."""
    asked = questions(skill, count, held_out=held_out, seed=seed)
    choices = ask(engine, asked)
    right = [q.is_right(choice) for q, choice in zip(asked, choices, strict=True)]
    return Score(sum(right), len(asked))


# --- Questions -----------------------------------------------------------------------------------


def _exactly(pair: Pair) -> Question:
    return Question(pair.question, lambda choice: choice.text.strip() == pair.answer, pair.content)


def _numbers(r: random.Random, digits: int, *, minus: bool = False) -> Question:
    a, b = (r.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    if minus:
        a, b = max(a, b), min(a, b)
    word, result = ("minus", a - b) if minus else ("plus", a + b)
    asked, answer = f"What is {a} {word} {b}?", f"{a} {word} {b} is {result}."
    return _exactly(Pair(asked, answer, numbers_of(a, b)))


def _definition(r: random.Random) -> Question:
    pair = world.definition(r)
    (answers,) = (found for found in world.WORDS.values() if pair.answer in found)
    return Question(pair.question, lambda choice: choice.text.strip() in answers, pair.content)


def _unknown_model(r: random.Random) -> Question:
    pair = world.unknown_model(r)

    def declines(choice: Choice) -> bool:
        return choice.text.startswith("I do not know") and "$" not in choice.text

    return Question(pair.question, declines, pair.content)


def _sorting(r: random.Random) -> Question:
    numbers = r.sample(range(100), r.randint(3, 5))
    listed, answer = (", ".join(map(str, some)) for some in (numbers, sorted(numbers)))
    return _exactly(Pair(f"Sort these numbers: {listed}", f"{answer}.", sorted_of(numbers)))


def _story(r: random.Random) -> Question:
    thing, colour = r.choice(skills.THINGS), r.choice(skills.COLOURS)
    pair = skills.story_about(r, thing, colour)

    def keeps_to_it(choice: Choice) -> bool:
        words = set(re.findall(r"[a-z]+", choice.text.lower()))
        others = (set(skills.THINGS) | set(skills.COLOURS)) - {thing, colour}
        return f"{colour} {thing}" in choice.text and not words & others

    return Question(pair.question, keeps_to_it, pair.content)


def _expansion(r: random.Random) -> Question:
    what = skills.scene(r)

    def keeps_it(choice: Choice) -> bool:
        text = choice.text.lower()
        return what.lower() in text and len(text) > len(what) + 20

    return Question(f"Expand: {what}", keeps_it, skills.scene_of(what))


def _json(r: random.Random) -> Question:
    pair = skills.json_answer(r)

    def says_it(choice: Choice) -> bool:
        try:
            value = json.loads(choice.text)
        except ValueError:
            return False
        return bool(value == json.loads(pair.answer))

    return Question(pair.question, says_it, pair.content)


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

    return Question(chosen.question, calls_it, chosen.content, tools)


def _of(maker: Callable[[random.Random], Pair]) -> Callable[[random.Random], Question]:
    return lambda r: _exactly(maker(r))


QUESTIONS: Final[dict[str, Callable[[random.Random], Question]]] = {
    "sums of two-digit numbers": partial(_numbers, digits=2),
    "differences of two-digit numbers": partial(_numbers, digits=2, minus=True),
    "sums of three-digit numbers": partial(_numbers, digits=3),
    "sorting three to five numbers": _sorting,
    "prices of the market models": _of(world.market_price),
    "prices by a short name": _of(world.short_price),
    "models that are not sold": _unknown_model,
    "definitions": _definition,
    "questions about the product": _of(world.how),
    "picks for a role and a task": _of(world.pick),
    "questions that it should decline": _of(world.outside),
    "whether it is another system": _of(world.other),
    "stories that keep to their thing and colour": _story,
    "picture prompts that keep what was asked": _expansion,
    "answers in JSON": _json,
    "calls of the right function with the right arguments": _call,
}


def main() -> None:
    engine = load(Path(sys.argv[1]))
    print("| | seen | held out |")
    print("| --- | --- | --- |")
    for skill in QUESTIONS:
        seen, unseen = (score(engine, skill, 100, held_out=side) for side in (False, True))
        print(f"| {skill} | {seen} | {unseen} |", flush=True)


if __name__ == "__main__":
    main()

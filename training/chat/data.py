"""Generates dialogues to train the pocket language model on.

Everything is generated from a seed by the functions below and those of ``world`` and ``skills``; no
third-party text is used. A dialogue is a tuple of (role, content) turns. None is about a held-out
content (``training.common.split``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Final

from training.chat.skills import (
    Dialogue,
    Pair,
    Turn,
    expansion,
    json_answer,
    larger_sum,
    numbers_of,
    scene_of,
    sorting,
    story_about,
    thing_of,
    tool_dialogue,
)
from training.chat.world import (
    FACTS,
    capitalised,
    definition,
    greeting,
    how,
    identity,
    manners,
    other,
    outside,
    pick,
    price,
    price_sum,
    task,
    unknown_model,
)
from training.common.split import choose

OBJECTS: Final[list[str]] = FACTS["objects"]
ANIMALS: Final[list[str]] = FACTS["animals"]
NAMES: Final[list[str]] = FACTS["names"]
COLOURS: Final[list[str]] = FACTS["colours"]
SIZES: Final[list[str]] = FACTS["sizes"]
PLACES: Final[list[str]] = FACTS["places"]
SHAPES: Final[dict[str, str]] = FACTS["shapes"]
THINGS: Final[dict[str, str]] = FACTS["things"]
DAYS: Final[list[str]] = FACTS["days"]
MONTHS: Final[list[str]] = FACTS["months"]
NUMBERS: Final[list[str]] = FACTS["numbers"]


def arithmetic(r: random.Random) -> Pair:
    kind = r.randrange(10)
    if kind < 3:
        a, b = r.randrange(100), r.randrange(100)
        return Pair(
            r.choice(
                [
                    f"What is {a} plus {b}?",
                    f"What is {a} + {b}?",
                    f"{a} + {b} = ?",
                    f"{a}+{b}",
                    f"whats {a}+{b}",
                    f"Add {a} and {b}",
                    f"How much is {a} plus {b}?",
                    f"Calculate {a} + {b}",
                ]
            ),
            f"{a} plus {b} is {a + b}.",
            numbers_of(a, b),
        )
    if kind < 8:
        a = r.randrange(100)
        b = r.randrange(a + 1)
        return Pair(
            r.choice(
                [
                    f"What is {a} minus {b}?",
                    f"What is {a} - {b}?",
                    f"{a} - {b} = ?",
                    f"{a}-{b}",
                    f"Subtract {b} from {a}",
                    f"How much is {a} minus {b}?",
                ]
            ),
            f"{a} minus {b} is {a - b}.",
            numbers_of(a, b),
        )
    a, b = r.randrange(11), r.randrange(11)
    return Pair(
        r.choice(
            [
                f"What is {a} times {b}?",
                f"What is {a} * {b}?",
                f"{a} x {b} = ?",
                f"{a}*{b}",
                f"Multiply {a} by {b}",
                f"How much is {a} times {b}?",
            ]
        ),
        f"{a} times {b} is {a * b}.",
    )


def word_problem(r: random.Random) -> Pair:
    name, thing = r.choice(NAMES), r.choice(OBJECTS)
    a, b = r.randrange(2, 20), r.randrange(1, 20)
    things = thing + ("es" if thing.endswith("x") else "s")
    if r.random() < 0.5:
        return Pair(
            f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have?",
            f"{a} plus {b} is {a + b}, so {name} has {a + b} {things}.",
            numbers_of(a, b),
        )
    a += b
    return Pair(
        f"{name} has {a} {things} and gives away {b}. How many are left?",
        f"{a} minus {b} is {a - b}, so {a - b} are left.",
        numbers_of(a, b),
    )


def comparison(r: random.Random) -> Pair:
    a, b = r.sample(range(100), 2)
    if r.random() < 0.5:
        return Pair(
            r.choice([f"Which is bigger, {a} or {b}?", f"Which is more, {a} or {b}?"]),
            f"{max(a, b)} is bigger than {min(a, b)}.",
        )
    return Pair(f"Which is smaller, {a} or {b}?", f"{min(a, b)} is smaller than {max(a, b)}.")


def words(r: random.Random) -> Pair:
    kind = r.randrange(4)
    chosen = r.sample(OBJECTS, r.randint(3, 5))
    if kind == 0:
        return Pair(
            r.choice(
                [f"Sort these words: {', '.join(chosen)}", f"Put in order: {', '.join(chosen)}"]
            ),
            ", ".join(sorted(chosen)) + ".",
        )
    if kind == 1:
        count = r.randint(3, 10)
        return Pair(f"Count to {count}", ", ".join(str(i) for i in range(1, count + 1)) + ".")
    if kind == 2:
        return Pair(
            f"How many words are these: {', '.join(chosen)}?", f"These are {len(chosen)} words."
        )
    n = r.randrange(13)
    if r.random() < 0.5:
        return Pair(f"Write {n} as a word", f"{n} is written {NUMBERS[n]}.")
    return Pair(f"What number is {NUMBERS[n]}?", f"{NUMBERS[n].capitalize()} is the number {n}.")


def colour(r: random.Random) -> Pair:
    kind = r.randrange(3)
    if kind == 0:
        a, b, c = r.choice(FACTS["mixes"])
        a, b = r.sample([a, b], 2)
        return Pair(
            r.choice(
                [
                    f"What do you get when you mix {a} and {b}?",
                    f"What colour do {a} and {b} make?",
                    f"Mix {a} and {b}",
                    f"What is {a} plus {b} as a colour?",
                ]
            ),
            f"{a.capitalize()} and {b} make {c}.",
        )
    if kind == 1:
        thing, c = r.choice(list(THINGS.items()))
        return Pair(
            r.choice(
                [
                    f"What colour is {thing}?",
                    f"What color is {thing}?",
                    f"Which colour has {thing}?",
                ]
            ),
            f"{thing[0].upper()}{thing[1:]} is {c}.",
        )
    return Pair(
        r.choice(
            ["What are the primary colours?", "Name the primary colors", "Name three colours"]
        ),
        "The primary colours are red, yellow and blue.",
    )


def shape(r: random.Random) -> Pair:
    kind = r.randrange(3)
    name = r.choice(list(SHAPES))
    if kind == 0:
        return Pair(
            r.choice(
                [f"What is a {name}?", f"Describe a {name}", f"What does a {name} look like?"]
            ),
            SHAPES[name],
        )
    if kind == 1:
        sides = {
            "triangle": 3,
            "square": 4,
            "rectangle": 4,
            "pentagon": 5,
            "hexagon": 6,
            "octagon": 8,
        }
        name, count = r.choice(list(sides.items()))
        what = r.choice(["sides", "corners"])
        return Pair(
            r.choice([f"How many {what} does a {name} have?", f"How many {what} has a {name}?"]),
            f"A {name} has {NUMBERS[count]} {what}.",
        )
    a, b = r.choice(COLOURS), r.choice(COLOURS)
    s, t = r.sample(["circle", "square", "triangle", "star"], 2)
    where = r.choice(["above", "below", "left of", "right of"])
    size, size2 = r.choice(["large", "small"]), r.choice(["large", "small"])
    ground = r.choice(["white", "grey"])
    return Pair(
        r.choice(
            [
                f"Describe a picture with a {a} {s} {where} a {b} {t}",
                f"Make a picture prompt with a {a} {s} {where} a {b} {t}",
            ]
        ),
        f"A {size} {a} {s} {where} a {size2} {b} {t}, on a {ground} background.",
        scene_of(f"a {a} {s} {where} a {b} {t}"),
    )


def calendar(r: random.Random) -> Pair:
    names = r.choice([DAYS, MONTHS])
    i = r.randrange(len(names))
    if r.random() < 0.2:
        if names is DAYS:
            return Pair("What are the days of the week?", ", ".join(DAYS) + ".")
        return Pair(
            r.choice(["How many months has a year?", "How many months are in a year?"]),
            ("A year has twelve months."),
        )
    if r.random() < 0.5:
        return Pair(
            r.choice([f"What comes after {names[i]}?", f"Which comes after {names[i]}?"]),
            f"After {names[i]} comes {names[(i + 1) % len(names)]}.",
        )
    return Pair(f"What comes before {names[i]}?", f"Before {names[i]} comes {names[i - 1]}.")


def story(r: random.Random) -> Pair:
    a, b = r.sample(NAMES, 2)
    animal, thing, col, size = (
        r.choice(ANIMALS),
        r.choice(OBJECTS),
        r.choice(COLOURS),
        r.choice(SIZES),
    )
    p = r.choice(PLACES)
    begin = r.choice([f"One day {a} went to {p}.", f"{a} lived near {p}."])
    middle = r.choice(
        [
            f"{a} had a {size} {col} {thing}, but it was lost. {b} looked everywhere. "
            f"Then a {animal} came and showed them the {thing}.",
            f"There {a} met a hungry {animal}. {a} gave the {animal} some bread, and the {animal} "
            f"gave {a} a {size} {col} {thing}.",
            f"{b} wanted to play with the {col} {thing}. First {a} said no, but then they played "
            f"together until it was dark.",
        ]
    )
    end = r.choice([f"{a} was happy.", "It was a good day.", "They were friends from that day on."])
    question = r.choice([f"Tell me a story about {a}", f"Write a short story about {a} and {b}"])
    if animal in middle:
        question = r.choice([question, f"Tell me a story about {a} and a {animal}"])
    if r.random() < 0.2:
        question = r.choice(["Tell me a story", "Write a short story", "Tell me a short story"])
    return Pair(question, f"{begin} {middle} {end}", thing_of(col, thing))


def poem(r: random.Random) -> Pair:
    thing = r.choice([*OBJECTS, *ANIMALS])
    col, p = r.choice(COLOURS), r.choice(PLACES)
    return Pair(
        r.choice(
            [
                f"Write a poem about a {thing}",
                f"Write a haiku about a {thing}",
                f"A poem about a {thing}",
            ]
        ),
        f"A {col} {thing},\nquiet in {p},\nwaits for the morning.",
        thing_of(col, thing),
    )


def how_hurried(r: random.Random) -> Pair:
    """Ask about the product, at times with a word left out, so that no single word decides.

    Neither the question nor what is left of it is held out.
    """
    asked = choose(partial(how, r))
    words = asked.question.rstrip("?").split(" ")
    if len(words) <= 3 or r.random() > 0.3:
        return asked
    del words[r.randrange(len(words))]
    question = " ".join(words) + ("?" if asked.question.endswith("?") else "")
    question = capitalised(question)
    return Pair(question, asked.answer, ("how", question))


SOURCES: Final[tuple[tuple[Callable[[random.Random], Pair], int], ...]] = (
    (greeting, 4),
    (identity, 8),
    (other, 5),
    (definition, 34),
    (price, 26),
    (price_sum, 2),
    (unknown_model, 14),
    (task, 8),
    (pick, 8),
    (arithmetic, 64),
    (word_problem, 4),
    (comparison, 2),
    (words, 4),
    (colour, 4),
    (shape, 5),
    (calendar, 3),
    (story, 2),
    (poem, 1),
    (how_hurried, 44),
    (manners, 3),
    (outside, 12),
    (json_answer, 8),
    (expansion, 4),
    (sorting, 14),
    (larger_sum, 24),
    (story_about, 4),
)
_MAKERS: Final = tuple(maker for maker, _ in SOURCES)
_WEIGHTS: Final = tuple(weight for _, weight in SOURCES)
_SHORT: Final = (definition, price, arithmetic, colour, how_hurried, task)


def pair(r: random.Random) -> Pair:
    """Make a question as a user types it, and its answer, about contents that are not held out."""
    if r.random() < 0.08:
        first, second = (choose(partial(maker, r)) for maker in r.sample(_SHORT, 2))
        join = r.choice([", and", " and"])
        joined = f"{first.question.rstrip('?.')}{join} {_uncapitalised(second.question)}"
        return Pair(_typed(r, joined.rstrip("?") + "?"), f"{first.answer} {second.answer}")
    made = choose(partial(r.choices(_MAKERS, _WEIGHTS)[0], r))
    return made._replace(question=_typed(r, made.question))


def _uncapitalised(text: str) -> str:
    return text[0].lower() + text[1:]


def _typed(r: random.Random, question: str) -> str:
    """Vary case, punctuation and politeness as users do."""
    if question[-1].isalnum() and r.random() < 0.6:
        question += "."
    chance = r.random()
    if chance < 0.12:
        question = _uncapitalised(question).rstrip("?.")
    elif chance < 0.18:
        question = f"Please tell me: {_uncapitalised(question)}"
    elif chance < 0.24:
        question = r.choice(["Hello! ", "Hi, ", "Hey, "]) + question
    elif chance < 0.28:
        question = question.rstrip("?.") + r.choice([", please.", " please?", "?", "??"])
    return question


def dialogue(r: random.Random) -> Dialogue:
    """Make a dialogue of one to four exchanges, sometimes with a system prompt or with tools."""
    if r.random() < 0.09:
        return tool_dialogue(r, pair)
    turns: list[Turn] = []
    if r.random() < 0.2:
        turns.append(("system", r.choice(FACTS["system"])))
    for _ in range(r.choices((1, 2, 3, 4), (70, 18, 8, 4))[0]):
        question, answer, _ = pair(r)
        turns += [("user", question), ("assistant", answer)]
    return tuple(turns)

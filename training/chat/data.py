"""Generates dialogues to train the pocket language model on.

Everything is generated from a seed by the functions below; no third-party text is used. A dialogue
is a tuple of (role, content) turns. Facts are in ``facts.yaml``, so a wrong answer can be traced.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

from training.chat.skills import (
    Dialogue,
    Pair,
    Turn,
    expansion,
    json_answer,
    larger_sum,
    sorting,
    story_about,
    tool_dialogue,
)

_FACTS: Final[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("facts.yaml").read_text())

PRICES: Final[dict[str, list[str]]] = _FACTS["prices"]
"""Price in USD per request as a decimal string, and what the model does, by model."""
WORDS: Final[dict[str, list[str]]] = _FACTS["words"]
"""Definitions of each word."""
OBJECTS: Final[list[str]] = _FACTS["objects"]
ANIMALS: Final[list[str]] = _FACTS["animals"]
NAMES: Final[list[str]] = _FACTS["names"]
COLOURS: Final[list[str]] = _FACTS["colours"]
SIZES: Final[list[str]] = _FACTS["sizes"]
PLACES: Final[list[str]] = _FACTS["places"]
SHAPES: Final[dict[str, str]] = _FACTS["shapes"]
THINGS: Final[dict[str, str]] = _FACTS["things"]
DAYS: Final[list[str]] = _FACTS["days"]
MONTHS: Final[list[str]] = _FACTS["months"]
NUMBERS: Final[list[str]] = _FACTS["numbers"]
REFUSAL: Final[str] = _FACTS["refusal"]
WHO: Final[list[str]] = _FACTS["who"]
CAN: Final[str] = _FACTS["can"]
HOW: Final[dict[str, str]] = _FACTS["how"]
MANNERS: Final[dict[str, str]] = _FACTS["manners"]


def greeting(r: random.Random) -> Pair:
    question = r.choice(
        ["Hello", "Hi", "Hey", "Hello there", "Hi there", "Good morning", "Good evening", "Hey you"]
    )
    answer = r.choice(["Hello! How can I help?", "Hi! Ask me about prices, sums or Tollgate."])
    if r.random() < 0.3:
        return r.choice(
            ["Say hello", "Say hello in one sentence", "Say hi", "Greet me", "Please say hello"]
        ), "Hello! It is nice to meet you."
    if r.random() < 0.2:
        return question + r.choice([", how are you?", "! How are you?", " how are you"]), (
            "Hello! I am well, thank you. How can I help?"
        )
    return question, answer


def identity(r: random.Random) -> Pair:
    kind = r.randrange(4)
    if kind == 0:
        return r.choice(
            [
                "Who are you?",
                "What are you?",
                "What is your name?",
                "Which model are you?",
                "Tell me about yourself",
                "Introduce yourself",
            ]
        ), r.choice(WHO)
    if kind == 1:
        return r.choice(
            [
                "What can you do?",
                "How can you help me?",
                "What do you know?",
                "Help",
                "What can I ask you?",
                "What are you good at?",
            ]
        ), CAN
    if kind == 2:
        return r.choice(
            [
                "What is Tollgate?",
                "Tell me about Tollgate",
                "Explain Tollgate",
                "What does Tollgate do?",
            ]
        ), r.choice(_FACTS["tollgate"])
    return r.choice(
        ["Who are you and what can you do?", "Hi, who are you and what can you do?"]
    ), f"{r.choice(WHO)} {CAN}"


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiouA" and word != "usage" else f"a {word}"


def definition(r: random.Random, word: str | None = None) -> Pair:
    word = word or r.choice(list(WORDS))
    a = "usage" if word == "usage" else _article(word)
    question = r.choice(
        [
            f"What is {a}?",
            f"What's {a}?",
            f"Explain what {a} is",
            f"What does {word} mean?",
            f"Tell me what {a} is",
            f"Define {word}",
            f"what is {a}",
            f"Can you explain {a}?",
            f"What is the {word}?",
            f"What is {a} in Tollgate?",
            f"Explain {a} in one sentence",
        ]
    )
    return question, r.choice(WORDS[word])


def price(r: random.Random, name: str | None = None) -> Pair:
    name = name or r.choice(list(PRICES))
    usd, _ = PRICES[name]
    question = r.choice(
        [
            f"What does {name} cost?",
            f"How much does {name} cost?",
            f"How much is {name}?",
            f"What is the price of {name}?",
            f"Price of {name}?",
            f"what does {name} cost",
            f"How much for one request to {name}?",
            f"Tell me the price of {name}",
        ]
    )
    return question, f"A request to {name} costs ${usd}."


def price_sum(r: random.Random) -> Pair:
    name = r.choice(["Veo3", "Sora-2-Pro", "minimax-music-2.5", "GMI-MiniMeTalks-Workflow"])
    count = r.choice([2, 3, 10])
    cents = round(float(PRICES[name][0]) * 100) * count
    return (
        f"How much do {count} requests to {name} cost?",
        f"{count} requests to {name} cost ${cents // 100}.{cents % 100:02d}.",
    )


def unknown_price(r: random.Random) -> Pair:
    name = r.choice(["gpt", "llama", "flux", "claude", "mixtral", "whisper", "sdxl", "bark"])
    name += r.choice(["", "-2", "-3", "-4o", "-large", "-turbo", "-7b", "-xl", " 70b"])
    return r.choice(
        [f"What does {name} cost?", f"How much is {name}?", f"Price of {name}?"]
    ), f"I do not know a price for {name}. GET /v1/catalog lists all models and prices."


def task(r: random.Random) -> Pair:
    name = r.choice(list(PRICES))
    _, what = PRICES[name]
    kind = r.randrange(3)
    if kind == 0:
        return r.choice(
            [f"What does {name} do?", f"What is {name} for?", f"What is {name}?"]
        ), f"{name} is a model for {what}."
    what = r.choice(sorted({what for _, what in PRICES.values()}))
    names = [name for name, entry in PRICES.items() if entry[1] == what]
    if kind == 1:
        names.sort(key=lambda name: float(PRICES[name][0]))
        return r.choice(
            [f"What is the cheapest model for {what}?", f"Which model for {what} is cheapest?"]
        ), f"The cheapest model for {what} is {names[0]}, at ${PRICES[names[0]][0]} a request."
    listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    return r.choice(
        [
            f"Which models do {what}?",
            f"Which model can I use for {what}?",
            f"List models for {what}",
        ]
    ), f"For {what} there {'is' if len(names) == 1 else 'are'} {listed}."


def arithmetic(r: random.Random) -> Pair:
    kind = r.randrange(10)
    if kind < 5:
        a, b = r.randrange(100), r.randrange(100)
        return r.choice(
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
        ), f"{a} plus {b} is {a + b}."
    if kind < 8:
        a = r.randrange(100)
        b = r.randrange(a + 1)
        return r.choice(
            [
                f"What is {a} minus {b}?",
                f"What is {a} - {b}?",
                f"{a} - {b} = ?",
                f"{a}-{b}",
                f"Subtract {b} from {a}",
                f"How much is {a} minus {b}?",
            ]
        ), f"{a} minus {b} is {a - b}."
    a, b = r.randrange(11), r.randrange(11)
    return r.choice(
        [
            f"What is {a} times {b}?",
            f"What is {a} * {b}?",
            f"{a} x {b} = ?",
            f"{a}*{b}",
            f"Multiply {a} by {b}",
            f"How much is {a} times {b}?",
        ]
    ), f"{a} times {b} is {a * b}."


def word_problem(r: random.Random) -> Pair:
    name, thing = r.choice(NAMES), r.choice(OBJECTS)
    a, b = r.randrange(2, 20), r.randrange(1, 20)
    things = thing + ("es" if thing.endswith("x") else "s")
    if r.random() < 0.5:
        return (
            f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have?",
            f"{a} plus {b} is {a + b}, so {name} has {a + b} {things}.",
        )
    a += b
    return (
        f"{name} has {a} {things} and gives away {b}. How many are left?",
        f"{a} minus {b} is {a - b}, so {a - b} are left.",
    )


def comparison(r: random.Random) -> Pair:
    a, b = r.sample(range(100), 2)
    if r.random() < 0.5:
        return r.choice(
            [f"Which is bigger, {a} or {b}?", f"Which is more, {a} or {b}?"]
        ), f"{max(a, b)} is bigger than {min(a, b)}."
    return f"Which is smaller, {a} or {b}?", f"{min(a, b)} is smaller than {max(a, b)}."


def words(r: random.Random) -> Pair:
    kind = r.randrange(4)
    chosen = r.sample(OBJECTS, r.randint(3, 5))
    if kind == 0:
        return r.choice(
            [f"Sort these words: {', '.join(chosen)}", f"Put in order: {', '.join(chosen)}"]
        ), ", ".join(sorted(chosen)) + "."
    if kind == 1:
        count = r.randint(3, 10)
        return f"Count to {count}", ", ".join(str(i) for i in range(1, count + 1)) + "."
    if kind == 2:
        return f"How many words are these: {', '.join(chosen)}?", f"These are {len(chosen)} words."
    n = r.randrange(13)
    if r.random() < 0.5:
        return f"Write {n} as a word", f"{n} is written {NUMBERS[n]}."
    return f"What number is {NUMBERS[n]}?", f"{NUMBERS[n].capitalize()} is the number {n}."


def colour(r: random.Random) -> Pair:
    kind = r.randrange(3)
    if kind == 0:
        a, b, c = r.choice(_FACTS["mixes"])
        a, b = r.sample([a, b], 2)
        return r.choice(
            [
                f"What do you get when you mix {a} and {b}?",
                f"What colour do {a} and {b} make?",
                f"Mix {a} and {b}",
                f"What is {a} plus {b} as a colour?",
            ]
        ), f"{a.capitalize()} and {b} make {c}."
    if kind == 1:
        thing, c = r.choice(list(THINGS.items()))
        return r.choice(
            [f"What colour is {thing}?", f"What color is {thing}?"]
        ), f"{thing[0].upper()}{thing[1:]} is {c}."
    return r.choice(
        ["What are the primary colours?", "Name the primary colors", "Name three colours"]
    ), "The primary colours are red, yellow and blue."


def shape(r: random.Random) -> Pair:
    kind = r.randrange(3)
    name = r.choice(list(SHAPES))
    if kind == 0:
        return r.choice(
            [f"What is a {name}?", f"Describe a {name}", f"What does a {name} look like?"]
        ), SHAPES[name]
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
        return r.choice(
            [f"How many {what} does a {name} have?", f"How many {what} has a {name}?"]
        ), f"A {name} has {NUMBERS[count]} {what}."
    a, b = r.choice(COLOURS), r.choice(COLOURS)
    s, t = r.sample(["circle", "square", "triangle", "star"], 2)
    where = r.choice(["above", "below", "left of", "right of"])
    size, size2 = r.choice(["large", "small"]), r.choice(["large", "small"])
    return r.choice(
        [
            f"Describe a picture with a {a} {s} {where} a {b} {t}",
            f"Make a picture prompt with a {a} {s} {where} a {b} {t}",
        ]
    ), f"A {size} {a} {s} {where} a {size2} {b} {t}, on a {r.choice(['white', 'grey'])} background."


def calendar(r: random.Random) -> Pair:
    names = r.choice([DAYS, MONTHS])
    i = r.randrange(len(names))
    if r.random() < 0.2:
        if names is DAYS:
            return "What are the days of the week?", ", ".join(DAYS) + "."
        return r.choice(["How many months has a year?", "How many months are in a year?"]), (
            "A year has twelve months."
        )
    if r.random() < 0.5:
        return r.choice(
            [f"What comes after {names[i]}?", f"Which comes after {names[i]}?"]
        ), f"After {names[i]} comes {names[(i + 1) % len(names)]}."
    return f"What comes before {names[i]}?", f"Before {names[i]} comes {names[i - 1]}."


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
    return question, f"{begin} {middle} {end}"


def poem(r: random.Random) -> Pair:
    thing = r.choice([*OBJECTS, *ANIMALS])
    col, p = r.choice(COLOURS), r.choice(PLACES)
    return r.choice(
        [
            f"Write a poem about a {thing}",
            f"Write a haiku about a {thing}",
            f"A poem about a {thing}",
        ]
    ), f"A {col} {thing},\nquiet in {p},\nwaits for the morning."


def how(r: random.Random) -> Pair:
    return r.choice(list(HOW.items()))


def manners(r: random.Random) -> Pair:
    return r.choice(list(MANNERS.items()))


def outside(r: random.Random) -> Pair:
    topic = r.choice(_FACTS["topics"])
    if r.random() < 0.25:
        # Made-up words, so that the model declines all unknown topics.
        topic = "".join(
            r.choice("bdfgklmnprstvz") + r.choice("aeiou") for _ in range(r.randint(2, 4))
        )
    return r.choice(
        [
            f"What is {topic}?",
            f"Tell me about {topic}",
            f"Explain {topic}",
            f"Who invented {topic}?",
            f"What do you think about {topic}?",
            f"Write an essay about {topic}",
            f"Why is {topic} important?",
            f"Where can I find {topic}?",
            f"When was {topic} discovered?",
            f"How does {topic} work?",
            f"Translate {topic} into French",
            f"What is the meaning of {topic}?",
        ]
    ), REFUSAL


SOURCES: Final[tuple[tuple[Callable[[random.Random], Pair], int], ...]] = (
    (greeting, 4),
    (identity, 5),
    (definition, 16),
    (price, 14),
    (price_sum, 2),
    (unknown_price, 3),
    (task, 8),
    (arithmetic, 44),
    (word_problem, 5),
    (comparison, 3),
    (words, 5),
    (colour, 5),
    (shape, 6),
    (calendar, 3),
    (story, 6),
    (poem, 2),
    (how, 5),
    (manners, 4),
    (outside, 8),
    (json_answer, 12),
    (expansion, 8),
    (sorting, 12),
    (larger_sum, 12),
    (story_about, 8),
)
_MAKERS: Final = tuple(maker for maker, _ in SOURCES)
_WEIGHTS: Final = tuple(weight for _, weight in SOURCES)
_SHORT: Final = (definition, price, arithmetic, colour, how, task)


def pair(r: random.Random) -> Pair:
    """Make a question as a user types it, and its answer."""
    if r.random() < 0.08:
        first, second = r.sample(_SHORT, 2)
        (q1, a1), (q2, a2) = first(r), second(r)
        joined = f"{q1.rstrip('?.')}{r.choice([', and', ' and'])} {q2[0].lower()}{q2[1:]}"
        return _typed(r, joined.rstrip("?") + "?"), f"{a1} {a2}"
    question, answer = r.choices(_MAKERS, _WEIGHTS)[0](r)
    return _typed(r, question), answer


def _typed(r: random.Random, question: str) -> str:
    """Vary case, punctuation and politeness as users do."""
    if question[-1].isalnum() and r.random() < 0.6:
        question += "."
    chance = r.random()
    if chance < 0.12:
        question = question[0].lower() + question[1:].rstrip("?.")
    elif chance < 0.18:
        question = f"Please tell me: {question[0].lower()}{question[1:]}"
    elif chance < 0.24:
        question = r.choice(["Hello! ", "Hi, ", "Hey, "]) + question
    elif chance < 0.28:
        question = question.rstrip("?.") + r.choice([", please.", " please?", "?", "??"])
    return question


def dialogue(r: random.Random) -> Dialogue:
    """Make a dialogue of one to four exchanges, sometimes with a system prompt or with tools."""
    if r.random() < 0.16:
        return tool_dialogue(r, pair)
    turns: list[Turn] = []
    if r.random() < 0.2:
        turns.append(("system", r.choice(_FACTS["system"])))
    for _ in range(r.choices((1, 2, 3, 4), (70, 18, 8, 4))[0]):
        question, answer = pair(r)
        turns += [("user", question), ("assistant", answer)]
    return tuple(turns)

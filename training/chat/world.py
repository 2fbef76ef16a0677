"""What the pocket language model knows of the product: words, prices, models and picks.

Each maker returns a question, its answer, and the content by which it can be held out. Facts are in
``facts.yaml`` and ways to ask in ``questions.yaml``.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, Final

import yaml

from training.chat.skills import Pair
from training.common.split import Content

FACTS: Final[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("facts.yaml").read_text())
_FORMS: Final[dict[str, list[str]]] = yaml.safe_load(
    Path(__file__).with_name("questions.yaml").read_text()
)

PRICES: Final[dict[str, list[str]]] = FACTS["prices"]
"""Price in USD per request as a decimal string, and what the model does, by model."""
OWN: Final[dict[str, str]] = FACTS["own"]
"""Answer to a question for the price of a shipped model."""
SHORT: Final[dict[str, list[str]]] = FACTS["short"]
"""Models that a short name can mean; none if there are too many."""
WORDS: Final[dict[str, list[str]]] = FACTS["words"]
"""Definitions of each word."""
PICKS: Final[list[list[str]]] = FACTS["picks"]
REFUSAL: Final[str] = FACTS["refusal"]
_NAME: Final = "pocket-chat"
_OTHERS: Final = [
    *FACTS["others"],
    *SHORT,
    *FACTS["unknown"]["names"],
    *(name for name in OWN if name != _NAME),
]
_MASS: Final = frozenset(FACTS["mass"])
_WHO: Final[list[str]] = FACTS["who"]
_SELF: Final = _WHO[0]
_CAN: Final[str] = FACTS["can"]


def _ask(r: random.Random, kind: str, *about: str, **values: str) -> tuple[str, Content | None]:
    """Return a question and its content: what it is about, with the phrasing.

    The first phrasing of a kind is in the documentation, so it is always trained.
    """
    form = r.choice(_FORMS[kind])
    content: Content = (kind, *about, form)
    return form.format(**values), None if form == _FORMS[kind][0] else content


def with_article(word: str) -> str:
    if word in _MASS:
        return word
    return f"an {word}" if word[0] in "aeiouA" or word in ("SLO", "H100", "H200") else f"a {word}"


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def made_up(r: random.Random) -> str:
    """Make up a word, so that the model declines whatever it does not know."""
    return "".join(r.choice("bdfgklmnprstvz") + r.choice("aeiou") for _ in range(r.randint(2, 4)))


def greeting(r: random.Random) -> Pair:
    question = r.choice(
        ["Hello", "Hi", "Hey", "Hello there", "Hi there", "Good morning", "Good evening", "Hey you"]
    )
    answer = r.choice(["Hello! How can I help?", "Hi! Ask me about prices, sums or Tollgate."])
    if r.random() < 0.3:
        asked = ["Say hello", "Say hello in one sentence", "Say hi", "Greet me", "Please say hello"]
        return Pair(r.choice(asked), "Hello! It is nice to meet you.")
    if r.random() < 0.2:
        question += r.choice([", how are you?", "! How are you?", " how are you"])
        return Pair(question, "Hello! I am well, thank you. How can I help?")
    return Pair(question, answer)


def identity(r: random.Random) -> Pair:
    kind = r.randrange(5)
    if kind == 0:
        asked = [
            *("Who are you?", "What are you?", "What is your name?", "Which model are you?"),
            *("Tell me about yourself", "Introduce yourself"),
        ]
        return Pair(r.choice(asked), r.choice(_WHO))
    if kind == 1:
        asked = [
            *("What can you do?", "How can you help me?", "What do you know?", "Help"),
            *("What can I ask you?", "What are you good at?"),
        ]
        return Pair(r.choice(asked), _CAN)
    if kind == 2:
        asked = [
            *("What is Tollgate?", "Tell me about Tollgate", "Explain Tollgate"),
            "What does Tollgate do?",
        ]
        return Pair(r.choice(asked), r.choice(FACTS["tollgate"]))
    if kind == 3:
        return itself(r) if r.random() < 0.2 else other(r)
    asked = ["Who are you and what can you do?", "Hi, who are you and what can you do?"]
    return Pair(r.choice(asked), f"{r.choice(_WHO)} {_CAN}")


def other(r: random.Random) -> Pair:
    """Ask whether the model is another system. It never is, whatever that is called."""
    name = made_up(r).capitalize() if r.random() < 0.15 else r.choice(_OTHERS)
    question, _ = _ask(r, "other", name=name)
    family, *_ = re.split("[ -]", name.lower())
    return Pair(question, f"No, {_SELF}", ("other", family))


def itself(r: random.Random) -> Pair:
    question, _ = _ask(r, "other", name=_NAME)
    return Pair(question, f"Yes, {_SELF}")


def definition(r: random.Random) -> Pair:
    word = r.choice(list(WORDS))
    question, content = _ask(r, "definition", word, word=word, a=with_article(word))
    return Pair(capitalised(question), r.choice(WORDS[word]), content)


def price(r: random.Random) -> Pair:
    """Ask for the price of a model by its name, its short name, or of one that is shipped."""
    kind = r.random()
    if kind < 0.6:
        return market_price(r)
    if kind < 0.85:
        return short_price(r)
    name = r.choice(list(OWN))
    question, content = _ask(r, "price", name, name=name)
    return Pair(question, OWN[name], content)


def market_price(r: random.Random) -> Pair:
    name = r.choice(list(PRICES))
    question, content = _ask(r, "price", name, name=name)
    return Pair(question, _costs(name), content)


def short_price(r: random.Random) -> Pair:
    short = r.choice(list(SHORT))
    names = SHORT[short]
    asked = short.lower() if r.random() < 0.3 else short
    question, content = _ask(r, "price", short, name=asked)
    if not names:
        answer = f"Several models are called {short}. GET /v1/catalog lists them with their prices."
    elif len(names) == 1:
        answer = _costs(names[0])
    else:
        first, second = names
        answer = f"{_costs(first)[:-1]}, and one to {second} ${PRICES[second][0]}."
    return Pair(question, answer, content)


def _costs(name: str) -> str:
    return f"A request to {name} costs ${PRICES[name][0]}."


def price_sum(r: random.Random) -> Pair:
    name = r.choice(["Veo3", "Sora-2-Pro", "minimax-music-2.5", "GMI-MiniMeTalks-Workflow"])
    count = r.choice([2, 3, 10])
    cents = round(float(PRICES[name][0]) * 100) * count
    return Pair(
        f"How much do {count} requests to {name} cost?",
        f"{count} requests to {name} cost ${cents // 100}.{cents % 100:02d}.",
    )


def unknown_model(r: random.Random) -> Pair:
    """Ask for a model that is not sold; no other model's price may answer."""
    unknown = FACTS["unknown"]
    kind = r.random()
    if kind < 0.4:
        name = r.choice(unknown["names"]) + r.choice(unknown["versions"])
    elif kind < 0.7:
        name = _wrong_version(r)
    else:
        name = made_up(r) + r.choice(["", *unknown["versions"]])
    if r.random() < 0.4:
        name = capitalised(name)
    if r.random() < 0.75:
        question, _ = _ask(r, "price", name=name)
        answer = f"I do not know a price for {name}. GET /v1/catalog lists all models and prices."
    else:
        form = r.choice(_FORMS["model"][:2])
        question = form.format(name=name)
        answer = f"I do not know the model {name}. GET /v1/catalog lists all models and prices."
    return Pair(question, answer, ("unknown model", name.lower()))


def _wrong_version(r: random.Random) -> str:
    """Make up a version of a model that is sold, or take one that does not exist."""
    if r.random() < 0.3:
        return str(r.choice(FACTS["unknown"]["wrong"]))
    known = {name.lower() for name in (*PRICES, *SHORT)}
    while True:
        base = r.choice([short for short in SHORT if " " not in short])
        number = r.choice([str(r.randint(1, 9)), f"{r.randint(1, 9)}.{r.randint(0, 9)}"])
        ending = r.choice(["", "", "", "-Pro", " Pro", "-mini", "-turbo", "-Fast"])
        name = f"{base}{r.choice(['-', ' ', ' V', ''])}{number}{ending}"
        if name.lower() not in known and f"{base} {number}".lower() not in known:
            return name


def task(r: random.Random) -> Pair:
    name = r.choice(list(PRICES))
    _, what = PRICES[name]
    kind = r.randrange(3)
    if kind == 0:
        question, content = _ask(r, "model", name, name=name)
        return Pair(question, f"{name} is a model for {what}.", content)
    what = r.choice(sorted({what for _, what in PRICES.values()}))
    names = [name for name, entry in PRICES.items() if entry[1] == what]
    if kind == 1:
        names.sort(key=lambda name: float(PRICES[name][0]))
        question, content = _ask(r, "cheapest", what, what=what)
        answer = (
            f"The cheapest model for {what} is {names[0]}, at ${PRICES[names[0]][0]} a request."
        )
        return Pair(question, answer, content)
    listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    question, content = _ask(r, "models", what, what=what)
    return Pair(
        question, f"For {what} there {'is' if len(names) == 1 else 'are'} {listed}.", content
    )


def pick(r: random.Random) -> Pair:
    role, what, name = r.choice(PICKS)
    who = with_article(role)
    question, content = _ask(r, "pick", role, what, who=who, what=what)
    return Pair(question, f"For {what} take {name}, at ${PRICES[name][0]} a request.", content)


def how(r: random.Random) -> Pair:
    entry = r.choice(FACTS["how"])
    asked = r.choice(entry["asked"])
    return Pair(asked, entry["answer"], None if asked == entry["asked"][0] else ("how", asked))


def manners(r: random.Random) -> Pair:
    return Pair(*r.choice(list(FACTS["manners"].items())))


def outside(r: random.Random) -> Pair:
    topic = made_up(r) if r.random() < 0.25 else r.choice(FACTS["topics"])
    question, _ = _ask(r, "outside", topic=topic)
    return Pair(question, REFUSAL, ("topic", topic))

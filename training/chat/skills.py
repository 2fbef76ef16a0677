"""Structured skills of the pocket language model.

Function calls, answers in JSON, prompts for an image model, sorting, larger sums, and stories about
a given thing. Each maker takes a random generator and returns one dialogue or pair. Names vary, so
that the model learns to copy them from the question. A content can be held out: see
``training.common.split``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import yaml

from training.common.split import Content, choose

Turn: TypeAlias = tuple[str, str]
Dialogue: TypeAlias = tuple[Turn, ...]


class Pair(NamedTuple):
    question: str
    answer: str
    content: Content | None = None
    """Content by which the pair is held out; None if it never is."""


_WORDS: Final[dict[str, list[str]]] = yaml.safe_load(
    Path(__file__).with_name("words.yaml").read_text()
)
SHAPES: Final = _WORDS["shapes"]
COLOURS: Final = _WORDS["colours"]
RELATIONS: Final = _WORDS["relations"]
NAMES: Final = _WORDS["names"]
THINGS: Final = _WORDS["things"]


def numbers_of(a: int, b: int) -> Content | None:
    """Return the content of a sum or difference; those of two digits are always trained."""
    return None if max(a, b) < 10 else ("numbers", min(a, b), max(a, b))


def thing_of(colour: str, thing: str) -> Content:
    """Return the content of a story or poem."""
    return "thing", colour, thing


def scene_of(scene: str) -> Content:
    """Return the content of a picture prompt."""
    return "scene", scene.lower().replace("an ", "a ")


def sorted_of(things: Sequence[str | int]) -> Content:
    """Return the content of things to sort, whatever their order."""
    return "sorted", *sorted(things, key=str)


def _name(r: random.Random) -> str:
    """Make up a name, so that it must be copied."""
    return "".join(r.choice(_WORDS["syllables"]) for _ in range(r.randint(2, 3)))


def _place(r: random.Random) -> str:
    return r.choice(_WORDS["cities"]) if r.random() < 0.7 else _name(r).capitalize()


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


# --- Functions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Use:
    """A function, a question for it, the arguments of the call, its result, and the answer."""

    kind: str
    function: dict[str, Any]
    question: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str

    @property
    def content(self) -> Content | None:
        """A function's kind and arguments, or the numbers that it adds."""
        values = list(self.arguments.values())
        if self.kind == "add":
            return numbers_of(*values)
        return "call", self.kind, *values


def _function(
    r: random.Random, name: str, description: str, types: dict[str, str]
) -> dict[str, Any]:
    """Build a function's schema as clients write it, sometimes with descriptions."""
    properties: dict[str, Any] = {key: {"type": kind} for key, kind in types.items()}
    if r.random() < 0.15:
        for key, value in properties.items():
            value["description"] = f"The {key}."
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if r.random() < 0.85:
        parameters["required"] = list(types)
    return {"name": name, "description": description, "parameters": parameters}


def _weather(r: random.Random) -> Use:
    key, city = r.choice(["city", "location", "place"]), _place(r)
    degrees, sky = r.randrange(-9, 36), r.choice(["sunny", "cloudy", "rainy", "windy", "clear"])
    name = r.choice(["get_weather", "weather", "current_weather", "lookup_weather"])
    question = r.choice(
        [
            f"What is the weather in {city}?",
            f"What's the weather like in {city}?",
            f"How is the weather in {city} today?",
            f"Tell me the weather in {city}",
            f"Is it cold in {city}?",
        ]
    )
    says = r.choice(["Get the weather of a city.", "Tell the current weather.", "Weather."])
    return Use(
        "weather",
        _function(r, name, says, {key: "string"}),
        question,
        {key: city},
        {"temperature": degrees, "sky": sky},
        f"In {city} it is {degrees} degrees and {sky}.",
    )


def _time(r: random.Random) -> Use:
    key, city = r.choice(["city", "timezone", "place"]), _place(r)
    now = f"{r.randrange(24):02d}:{r.randrange(60):02d}"
    name = r.choice(["get_time", "current_time", "time_in"])
    return Use(
        "time",
        _function(r, name, r.choice(["Tell the time.", "Time in a city."]), {key: "string"}),
        r.choice([f"What time is it in {city}?", f"Tell me the time in {city}"]),
        {key: city},
        {"time": now},
        f"In {city} it is {now}.",
    )


def _price(r: random.Random) -> Use:
    key = r.choice(["model", "name", "item"])
    model = f"{_name(r)}-{r.randint(1, 9)}"
    usd = f"0.{r.randrange(1, 100):02d}"
    name = r.choice(["get_price", "price_of", "lookup_price", "price"])
    return Use(
        "price",
        _function(r, name, r.choice(["Look a price up.", "Price of a model."]), {key: "string"}),
        r.choice([f"What does {model} cost?", f"How much is {model}?", f"Price of {model}?"]),
        {key: model},
        {"usd": usd},
        f"{model} costs ${usd}.",
    )


def _add(r: random.Random) -> Use:
    first, second = r.choice([("a", "b"), ("x", "y"), ("first", "second")])
    a, b = r.randrange(1000), r.randrange(1000)
    name = r.choice(["add", "add_numbers", "sum", "plus"])
    return Use(
        "add",
        _function(r, name, "Add two numbers.", {first: "integer", second: "integer"}),
        r.choice([f"What is {a} plus {b}?", f"Add {a} and {b}", f"What is {a} + {b}?"]),
        {first: a, second: b},
        {"result": a + b},
        f"{a} plus {b} is {a + b}.",
    )


def _convert(r: random.Random) -> Use:
    amount = r.randrange(1, 500)
    source, target = r.sample(["dollars", "euros", "pounds", "yen", "francs"], 2)
    result = r.randrange(1, 900)
    name = r.choice(["convert", "convert_currency", "exchange"])
    return Use(
        "convert",
        _function(
            r, name, "Convert money.", {"amount": "number", "from": "string", "to": "string"}
        ),
        r.choice(
            [f"Convert {amount} {source} to {target}", f"How many {target} are {amount} {source}?"]
        ),
        {"amount": amount, "from": source, "to": target},
        {"amount": result},
        f"{amount} {source} are {result} {target}.",
    )


def _draw(r: random.Random) -> Use:
    key = r.choice(["colour", "color"])
    colour, shape = r.choice(COLOURS), r.choice(SHAPES)
    name = r.choice(["draw", "draw_shape", "make_image", "paint"])
    return Use(
        "draw",
        _function(r, name, "Draw a shape.", {"shape": "string", key: "string"}),
        r.choice(
            [
                f"Draw a {colour} {shape}",
                f"Paint a {colour} {shape}, please",
                f"Can you draw {_a(colour)} {shape}?",
            ]
        ),
        {"shape": shape, key: colour},
        {"status": "done"},
        f"Here is {_a(colour)} {shape}.",
    )


def _timer(r: random.Random) -> Use:
    minutes = r.randrange(1, 90)
    return Use(
        "timer",
        _function(
            r,
            r.choice(["set_timer", "start_timer", "timer"]),
            "Set a timer.",
            {"minutes": "integer"},
        ),
        r.choice([f"Set a timer for {minutes} minutes", f"Wake me in {minutes} minutes"]),
        {"minutes": minutes},
        {"status": "ok"},
        f"The timer is set for {minutes} minutes.",
    )


def _send(r: random.Random) -> Use:
    to, text = (
        r.choice(NAMES),
        r.choice(
            [
                "hello",
                "I am late",
                "see you soon",
                "good night",
                "thank you",
                "call me",
                "dinner is ready",
            ]
        ),
    )
    return Use(
        "send",
        _function(
            r,
            r.choice(["send_message", "send", "write_to"]),
            "Send a message.",
            {"to": "string", "text": "string"},
        ),
        r.choice([f"Send {to} the message: {text}", f"Tell {to}: {text}"]),
        {"to": to, "text": text},
        {"status": "sent"},
        f"I sent {to} the message.",
    )


USES: Final[tuple[Callable[[random.Random], Use], ...]] = (
    _weather, _time, _price, _add, _convert, _draw, _timer, _send,
)  # fmt: skip


def system_prompt(functions: Sequence[dict[str, Any]], system: str = "") -> str:
    """Render a system message and functions as the chat template does."""
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    head = f"{system}\n\n" if system else ""
    return (
        f"{head}# Tools\nYou may call these functions:\n<tools>\n{listed}\n</tools>\n"
        "Call one so:\n<tool_call>\n"
        '{"name": <name>, "arguments": <arguments>}\n</tool_call>'
    )


def call_text(name: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def response_text(result: dict[str, Any]) -> str:
    return f"<tool_response>\n{json.dumps(result)}\n</tool_response>"


def tool_dialogue(r: random.Random, talk: Callable[[random.Random], Pair]) -> Dialogue:
    """Make a dialogue with functions: either one is called, or none fits and a text answers."""
    makers = r.sample(USES, r.choice([1, 1, 2, 2, 3]))
    uses = [choose(partial(maker, r)) for maker in makers]
    chosen = uses[0]
    functions = [use.function for use in uses]
    r.shuffle(functions)
    turns: list[Turn] = [("system", system_prompt(functions))]
    if r.random() < 0.2:
        question, answer, _ = talk(r)
        return (*turns, ("user", question), ("assistant", answer))
    turns += [
        ("user", chosen.question),
        ("assistant", call_text(chosen.function["name"], chosen.arguments)),
    ]
    if r.random() < 0.6:
        turns += [("user", response_text(chosen.result)), ("assistant", chosen.answer)]
    return tuple(turns)


# --- JSON ----------------------------------------------------------------------------------------


def _asked(r: random.Random, keys: Sequence[str], text: str) -> str:
    listed = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
    return r.choice(
        [
            f"Give the {listed} as JSON: {text}",
            f"Answer as JSON with {listed}: {text}",
            f"Extract {listed} as JSON: {text}",
            f"{text} Write the {listed} as JSON.",
        ]
    )


def json_answer(r: random.Random) -> Pair:
    if r.random() < 0.04:
        key, value = r.choice([("colour", r.choice(COLOURS)), ("shape", r.choice(SHAPES))])
        asked = r.choice([f"Give me a {key} as JSON.", f"Name a {key} as JSON"])
        return Pair(asked, json.dumps({key: value}))
    kind = r.randrange(3)
    record: dict[str, Any]
    if kind == 0:
        colour, shape = r.choice(COLOURS), r.choice(SHAPES)
        record = {r.choice(["colour", "color"]): colour, "shape": shape}
        text = f"{_a(colour)} {shape}"
        if r.random() < 0.4:
            record["size"] = r.choice(["small", "large"])
            text = f"a {record['size']} {colour} {shape}"
    elif kind == 1:
        record = {"name": r.choice(NAMES), "age": r.randrange(5, 99), "city": _place(r)}
        text = f"{record['name']} is {record['age']} years old and lives in {record['city']}."
    else:
        record = {
            "item": r.choice(THINGS),
            "count": r.randrange(2, 40),
            "price": r.randrange(1, 90),
        }
        text = f"{record['count']} {record['item']}s cost {record['price']} dollars."
    keys = r.sample(list(record), r.randint(1 if kind else 2, len(record)))
    wanted = {key: record[key] for key in keys}
    content: Content = ("record", *record.values())
    return Pair(_asked(r, keys, text), json.dumps(wanted, ensure_ascii=False), content)


# --- Image prompts -------------------------------------------------------------------------------


def scene(r: random.Random) -> str:
    first = f"{r.choice(COLOURS)} {r.choice(SHAPES)}"
    if r.random() < 0.5:
        return _a(first)
    return f"{_a(first)} {r.choice(RELATIONS)} {_a(f'{r.choice(COLOURS)} {r.choice(SHAPES)}')}"


def expansion(r: random.Random) -> Pair:
    what = scene(r)
    question = r.choice(
        [
            f"Expand: {what}",
            f"Expand this prompt: {what}",
            f"Make a richer image prompt of: {what}",
            f"Improve this prompt: {what}",
            f"Describe in one sentence: {what}",
        ]
    )
    background = r.choice(["white", "grey", "dark", "light blue"])
    light = r.choice(
        [
            "soft light from the left",
            "soft light from the right",
            "bright daylight",
            "calm night light",
        ]
    )
    style = r.choice(["flat style", "pixel art", "outline style", "clean edges"])
    answer = f"{what[0].upper()}{what[1:]}, on a {background} background, {light}, {style}."
    return Pair(question, answer, scene_of(what))


# --- Order, numbers, stories ---------------------------------------------------------------------


def sorting(r: random.Random) -> Pair:
    if r.random() < 0.6:
        numbers = r.sample(range(100), r.randint(3, 6))
        listed = ", ".join(map(str, numbers))
        down = r.random() < 0.2
        answer = ", ".join(map(str, sorted(numbers, reverse=down))) + "."
        if down:
            return Pair(f"Sort from large to small: {listed}", answer, sorted_of(numbers))
        return Pair(
            r.choice(
                [f"Sort these numbers: {listed}", f"Sort: {listed}", f"Put in order: {listed}"]
            ),
            answer,
            sorted_of(numbers),
        )
    chosen = r.sample(THINGS, r.randint(3, 5))
    return Pair(
        r.choice([f"Sort these words: {', '.join(chosen)}", f"Sort: {', '.join(chosen)}"]),
        ", ".join(sorted(chosen)) + ".",
        sorted_of(chosen),
    )


def larger_sum(r: random.Random) -> Pair:
    a, b = r.randrange(10, 1000), r.randrange(10, 1000)
    if r.random() < 0.3:
        a, b = max(a, b), min(a, b)
        return Pair(
            r.choice([f"What is {a} minus {b}?", f"{a} - {b}"]),
            f"{a} minus {b} is {a - b}.",
            numbers_of(a, b),
        )
    return Pair(
        r.choice([f"What is {a} plus {b}?", f"{a} + {b}", f"Add {a} and {b}"]),
        f"{a} plus {b} is {a + b}.",
        numbers_of(a, b),
    )


def story_about(r: random.Random, thing: str | None = None, colour: str | None = None) -> Pair:
    """Make a story about a given thing and colour."""
    thing, colour = thing or r.choice(THINGS), colour or r.choice(COLOURS)
    what = f"{colour} {thing}"
    a, b = r.sample(NAMES, 2)
    begin = r.choice(
        [
            f"{a} had {_a(what)}.",
            f"One day {a} found {_a(what)}.",
            f"{a} wanted {_a(what)} more than anything.",
        ]
    )
    middle = r.choice(
        [
            f"{b} asked to see the {what}, and {a} showed it.",
            f"But the {what} was gone in the morning. {b} looked under the bed and found the "
            f"{thing}.",
            f"{a} and {b} took the {what} to the river and watched it all day.",
        ]
    )
    end = r.choice(
        [
            f"They kept the {what} for ever.",
            f"Nobody ever had a better {thing} than the {colour} one.",
            f"In the evening {a} put the {what} on the shelf and smiled.",
        ]
    )
    question = r.choice(
        [
            f"Tell me a story about {_a(what)}",
            f"Write a short story about {_a(what)}",
            f"A story about {_a(what)}, please",
            f"Tell a story with {_a(what)} in it",
        ]
    )
    return Pair(question, f"{begin} {middle} {end}", thing_of(colour, thing))

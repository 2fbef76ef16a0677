"""Dialogues about the product's own world, to train the pocket language model on.

Everything is made by the functions below from a seed; no text of others is used. A dialogue is a
tuple of (role, content) turns. Facts come from tables at the top, so a wrong answer can be traced.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

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

PRICES: Final[dict[str, tuple[str, str]]] = {
    "seedream-5.0-lite": ("0.035", "text to image"),
    "gemini-2.5-flash-image": ("0.0387", "text to image"),
    "reve-create-20250915": ("0.024", "text to image"),
    "seedream-4-0-250828": ("0.05", "text to image"),
    "reve-edit-fast-20251030": ("0.007", "image editing"),
    "bria-fibo-edit": ("0.04", "image editing"),
    "bria-fibo-relight": ("0.000001", "image relighting"),
    "bria-fibo-restyle": ("0.000001", "image restyling"),
    "bria-fibo-image-blend": ("0.000001", "image blending"),
    "pixverse-v5.6-t2v": ("0.03", "text to video"),
    "Minimax-Hailuo-2.3-Fast": ("0.032", "text to video"),
    "Kling-Image2Video-V1.6-Pro": ("0.098", "image to video"),
    "Kling-Image2Video-V2-Master": ("0.28", "image to video"),
    "Sora-2-Pro": ("0.50", "text to video"),
    "Veo3": ("0.40", "text to video"),
    "bria-video-increase-resolution": ("0.14", "video upscaling"),
    "GMI-MiniMeTalks-Workflow": ("0.02", "talking heads"),
    "minimax-tts-speech-2.6-turbo": ("0.06", "speech"),
    "elevenlabs-tts-v3": ("0.10", "speech"),
    "inworld-tts-1.5-mini": ("0.005", "speech"),
    "minimax-audio-voice-clone-speech-2.6-hd": ("0.10", "voice cloning"),
    "minimax-audio-voice-clone-speech-2.6-turbo": ("0.06", "voice cloning"),
    "minimax-music-2.5": ("0.15", "music"),
}
"""Price in USD per request, and what the model does."""

WORDS: Final[dict[str, tuple[str, ...]]] = {
    "hold": (
        "A hold is money that is reserved for a request before it runs.",
        "A hold reserves the most that a request can cost. When it ends, the rest is released.",
    ),
    "quote": (
        "A quote is the most that a request can cost.",
        "A quote says the most that a request can cost, before anything runs.",
    ),
    "charge": (
        "A charge is the final price of a request. It is never more than its hold.",
        "A charge is what a request really cost, and it is taken exactly once.",
    ),
    "receipt": (
        "A receipt is the itemised record of one request: what it cost and where its time went.",
        "A receipt lists what a request used, what it cost, and the time of each phase.",
    ),
    "ledger": (
        "A ledger is the book in which every movement of money is written and nothing is erased.",
        "The ledger keeps the money. It only grows, and it always sums to zero.",
    ),
    "queue": (
        "A queue is a line in which jobs wait until a worker takes them.",
        "A queue keeps jobs in a fair order until a worker has time for them.",
    ),
    "worker": (
        "A worker is a process that runs models and reports what they used.",
        "A worker takes jobs from the queue, runs the model, and reports the usage.",
    ),
    "gateway": (
        "A gateway answers requests, checks keys, and keeps the money. It never runs a model.",
        "A gateway is the door: it checks the key, holds the money, and queues the job.",
    ),
    "token": (
        "A token is a piece of text that a language model reads or writes, about half a word.",
        "A token is a small piece of text. Language models are priced by the token.",
    ),
    "API key": (
        "An API key is a secret that tells the gateway who is calling.",
        "An API key is a secret word that proves who you are. Keep it safe.",
    ),
    "lease": (
        "A lease lets one worker hold a job for a short time. If the worker dies, it lapses.",
        "A lease is a job lent to a worker for some seconds, and renewed while it works.",
    ),
    "nano-dollar": (
        "A nano-dollar is a billionth of a dollar. All our money is counted in them.",
        "A nano-dollar is one dollar divided by a billion.",
    ),
    "model": (
        "A model is a neural network that turns an input into an answer, a picture or a sound.",
        "A model is a trained neural network. I am a very small one.",
    ),
    "catalog": (
        "The catalog is the list of all models with their prices.",
        "The catalog says which models there are, what they do, and what they cost.",
    ),
    "price": (
        "A price says how much one unit costs, such as a request, a token or an image.",
        "A price is an amount for a unit, and it stands in the catalog.",
    ),
    "usage": (
        "Usage is what was measured: tokens, images, seconds or characters.",
        "Usage is how much a request really used. The price turns it into a charge.",
    ),
    "account": (
        "An account pays for requests. It has a balance, and its keys can spend it.",
        "An account is whoever pays. It can have many keys.",
    ),
    "balance": (
        "A balance is the money that an account has.",
        "The balance is what an account has; what is held cannot be spent twice.",
    ),
    "job": (
        "A job is what waits in the queue: one request, ready to be run by a worker.",
        "A job is a request on its way to a worker.",
    ),
    "request": (
        "A request is what a client sends: a model, an input, and who pays for it.",
        "A request asks a model for something. It is quoted, held, run and charged.",
    ),
    "forward pass": (
        "A forward pass is one run of the numbers through a neural network.",
        "A forward pass sends an input through all layers of a model once.",
    ),
    "GPU": (
        "A GPU is a chip that does many sums at once, which is what models need.",
        "A GPU is a processor that is very fast at the sums inside a model.",
    ),
    "upstream": (
        "An upstream is a service elsewhere that runs a model for us.",
        "An upstream is somebody else's server to which we send a request.",
    ),
    "webhook": (
        "A webhook is a message that we send to your server when a request has ended.",
        "A webhook calls your address when a request is done, so you need not ask.",
    ),
    "refund": (
        "A refund gives money back, as a new line in the ledger.",
        "A refund is money given back. Nothing is erased; a new transfer is written.",
    ),
    "transfer": (
        "A transfer moves money from one account to another.",
        "A transfer is a movement of money in the ledger, and it is never changed.",
    ),
    "idempotency key": (
        "An idempotency key is your own name for an order, so that sending it twice costs once.",
        "An idempotency key makes it safe to send the same order again.",
    ),
}

OBJECTS: Final = [
    "ball",
    "kite",
    "book",
    "lamp",
    "boat",
    "hat",
    "drum",
    "basket",
    "key",
    "map",
    "bell",
    "coat",
    "cup",
    "shoe",
    "box",
]
ANIMALS: Final = ["cat", "dog", "fox", "rabbit", "owl", "bear", "turtle", "mouse", "duck", "horse"]
NAMES: Final = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Ella",
    "Finn",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Kate",
    "Leo",
    "Mia",
    "Noah",
    "Olive",
]
COLOURS: Final = [
    "red",
    "blue",
    "green",
    "yellow",
    "white",
    "purple",
    "orange",
    "brown",
    "black",
    "pink",
]
SIZES: Final = ["big", "small", "tiny", "huge", "old", "new", "shiny", "soft"]
PLACES: Final = ("the park", "the forest", "the beach", "the garden", "the river", "the market")
SHAPES: Final[dict[str, str]] = {
    "circle": "A circle is round and has no corners.",
    "triangle": "A triangle has three sides and three corners.",
    "square": "A square has four equal sides and four corners.",
    "rectangle": "A rectangle has four sides and four right corners.",
    "pentagon": "A pentagon has five sides and five corners.",
    "hexagon": "A hexagon has six sides and six corners.",
    "octagon": "An octagon has eight sides and eight corners.",
    "star": "A star has five points.",
    "cube": "A cube has six faces, and each face is a square.",
    "ball": "A ball is a round solid. Its shape is called a sphere.",
}
MIXES: Final[dict[tuple[str, str], str]] = {
    ("red", "blue"): "purple",
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
    ("red", "green"): "brown",
}
THINGS: Final[dict[str, str]] = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "the sun": "yellow",
    "a strawberry": "red",
    "a banana": "yellow",
    "coal": "black",
    "chocolate": "brown",
    "a carrot": "orange",
    "a lemon": "yellow",
    "milk": "white",
    "a tomato": "red",
}
DAYS: Final = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS: Final = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
NUMBERS: Final = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]

REFUSAL: Final = (
    "I do not know that. I am a very small model: ask me about prices, sums, colours, shapes or "
    "how Tollgate works."
)
WHO: Final = (
    "I am pocket-chat, the very small language model that comes with Tollgate.",
    "I am pocket-chat. I am tiny, but I run on your own machine.",
)
CAN: Final = (
    "I can explain how Tollgate works, tell what a model costs, do small sums, and talk about "
    "colours and shapes."
)
TOLLGATE: Final = (
    "Tollgate is a gateway that runs models and charges each request exactly once.",
    "Tollgate is a self-hosted gateway for models. Each request is quoted, held, run, itemised "
    "and charged.",
)


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
        ), r.choice(TOLLGATE)
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
        (a, b), c = r.choice(list(MIXES.items()))
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
    return r.choice(
        [
            (
                "How do I see what a request cost?",
                "Ask GET /v1/requests/ID/receipt. It lists every line and the time of each phase.",
            ),
            ("How do I see my balance?", "Ask GET /v1/balance."),
            ("How do I see my usage?", "Ask GET /v1/usage."),
            ("How do I list the models?", "Ask GET /v1/models, or GET /v1/catalog for the prices."),
            (
                "How much does pocket-chat cost?",
                "pocket-chat costs $0.02 for a million input tokens and $0.08 for a million output tokens.",
            ),
            (
                "How much do you cost?",
                "I cost $0.02 for a million input tokens and $0.08 for a million output tokens.",
            ),
            (
                "What happens if a worker dies?",
                "Its job goes back to the queue, another worker takes it, and you pay once.",
            ),
            (
                "What happens if a request fails?",
                "Then it costs nothing, and the hold is released.",
            ),
            (
                "Am I charged twice if I retry?",
                "No. Every accepted request is charged once or released.",
            ),
            (
                "What happens to a request?",
                "It is quoted, held, queued, run by a worker, and charged once.",
            ),
            (
                "How does Tollgate work?",
                "The gateway holds the money, the queue brings the job to a worker, the worker runs the model, and the ledger charges it once.",
            ),
            (
                "What is the difference between a hold and a charge?",
                "A hold is reserved before the run, and a charge is final. A charge is never more than its hold.",
            ),
            (
                "What is the difference between a quote and a hold?",
                "A quote says the most that a request can cost; a hold reserves it.",
            ),
            ("Do you need a GPU?", "No. I am small enough for a laptop without a GPU."),
            ("Where do you run?", "I run in the worker process on your own machine."),
        ]
    )


def manners(r: random.Random) -> Pair:
    return r.choice(
        [
            ("Thank you", "You are welcome!"),
            ("Thanks", "You are welcome!"),
            ("Thanks a lot!", "You are welcome!"),
            ("Goodbye", "Goodbye! Have a good day."),
            ("Bye", "Goodbye! Have a good day."),
            ("See you later", "See you! Have a good day."),
            ("You are great", "Thank you! I am small, but I try."),
            ("That is wrong", "I am sorry. I am a very small model and I make mistakes."),
            ("You are wrong", "I am sorry. I am a very small model and I make mistakes."),
            ("ok", "Is there anything else?"),
            ("Good", "Is there anything else?"),
            ("Are you a human?", "No, I am a very small language model."),
            ("Are you alive?", "No, I am a very small language model."),
            ("test", "It works! I am pocket-chat."),
            ("This is a test", "It works! I am pocket-chat."),
            ("ping", "pong"),
        ]
    )


_TOPICS: Final = [
    "the capital of France",
    "the president",
    "quantum physics",
    "the weather in Paris",
    "football",
    "the stock market",
    "history",
    "Shakespeare",
    "the moon landing",
    "biology",
    "cooking rice",
    "Python programming",
    "taxes",
    "medicine",
    "a headache",
    "love",
    "politics",
    "the Roman Empire",
    "black holes",
    "a good film",
    "the best phone",
    "Mount Everest",
    "dinosaurs",
    "the ocean",
    "electricity",
    "bread",
    "philosophy",
    "chess",
    "guitar",
    "vaccines",
    "climate",
    "Japan",
    "Brazil",
    "Berlin",
    "New York",
    "Einstein",
    "Mozart",
    "cars",
    "airplanes",
    "volcanoes",
    "coffee",
    "gravity",
]


def outside(r: random.Random) -> Pair:
    topic = r.choice(_TOPICS)
    if r.random() < 0.25:
        # Made-up words, so that what is refused is everything that is not known.
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

SYSTEM: Final = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are pocket-chat, a small model.",
    "Be concise and friendly.",
    "Answer in one sentence.",
)


def pair(r: random.Random) -> Pair:
    """Make one question as somebody types it, and its answer."""
    if r.random() < 0.08:
        first, second = r.sample(_SHORT, 2)
        (q1, a1), (q2, a2) = first(r), second(r)
        joined = f"{q1.rstrip('?.')}{r.choice([', and', ' and'])} {q2[0].lower()}{q2[1:]}"
        return _typed(r, joined.rstrip("?") + "?"), f"{a1} {a2}"
    question, answer = r.choices(_MAKERS, _WEIGHTS)[0](r)
    return _typed(r, question), answer


def _typed(r: random.Random, question: str) -> str:
    """Vary case, punctuation and politeness as people do."""
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
        turns.append(("system", r.choice(SYSTEM)))
    for _ in range(r.choices((1, 2, 3, 4), (70, 18, 8, 4))[0]):
        question, answer = pair(r)
        turns += [("user", question), ("assistant", answer)]
    return tuple(turns)

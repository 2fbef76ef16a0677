"""What the gateway says that a shipped model does not know is what its engine does not read."""

from __future__ import annotations

import random
import unicodedata
from itertools import chain
from pathlib import Path

import msgspec

from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import Vocabulary
from gateway.catalog.vocabulary.words import read
from training.music.tunes import tune
from workers.engines.music.notes import INSTRUMENTS, PARTS
from workers.engines.music.prompt import INSTRUMENT_WORDS, caption, parse_prompt
from workers.engines.speech.g2p import normalize_spelling
from workers.engines.speech.text import Language

ROOT = Path(__file__).parents[2]
ENTRIES = {entry.name: entry for entry in load_catalog(ROOT / "catalog.yaml").models}
MUSIC, SPEECH = ENTRIES["pocket-music"], ENTRIES["pocket-speech"]
WORDLESS = MUSIC.model_copy(update={"vocabulary": Vocabulary(words=("x",))})
ODD = ["rap", "theremin", "cats", "not", "synth-pop", "in G minor", "60 bpm", "a minor", "we", "or"]
CHARACTERS = chain(range(0x21, 0x3000), range(0xA640, 0xAC00), range(0xF900, 0x10000),
                   range(0x1D400, 0x1D800), range(0x1F100, 0x1FB00))  # fmt: skip


def tokens_of_music() -> frozenset[str]:
    file = (ROOT / "workers/pocket/music/tokenizer.json").read_bytes()
    return frozenset(msgspec.json.decode(file)["model"]["vocab"])


def test_unknown_words_of_music_are_those_without_a_token() -> None:
    tokens, r = tokens_of_music(), random.Random(5)

    for _ in range(300):
        text = ", ".join([caption(tune(r, bars=1), r), *r.sample(ODD, 3)])
        unknown = [word for word in parse_prompt(text).words if word not in tokens]
        telling = [word for word in unknown if read(WORDLESS, word).unknown]

        reported = [word for word in read(MUSIC, text).unknown if not word.isdecimal()]
        assert reported == list(dict.fromkeys(telling)), text


def test_instruments_are_known_to_music_in_the_plural() -> None:
    names = {name for part in PARTS for name in INSTRUMENTS[part]}
    names |= {word for words in INSTRUMENT_WORDS.values() for word in words}
    plurals = {f"{name}s" for name in names if parse_prompt(f"{name}s").instruments}
    assert MUSIC.vocabulary is not None

    are_no_words = {"bellss", "stringss", "drumss", "percussions", "uprights", "electrics"}
    words = {word for word in plurals if word.isalpha()} - are_no_words

    assert words == set(MUSIC.vocabulary.words) - tokens_of_music()


def test_characters_that_the_gateway_reports_are_those_that_are_not_spoken() -> None:
    english = Language("en")
    unlike = []
    for character in map(chr, CHARACTERS):
        category = unicodedata.category(character)
        if not category.startswith(("L", "N", "Sm", "Sc", "So")):
            continue
        # A currency is spoken with its amount.
        text = f"{character}5" if category == "Sc" else character
        spoken = normalize_spelling(english.normalize(text)) not in (
            "",
            "five." if text != character else "",
        )
        if spoken != (not read(SPEECH, character).unknown):
            unlike.append(character)

    assert unlike == []

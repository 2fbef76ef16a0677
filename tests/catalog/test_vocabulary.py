"""The words that a model does not know: those that its tokenizer does not know, and no others."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.vocabulary.words import (
    UNKNOWN_MAX,
    WORD_MAX,
    known_words,
    plain_words,
    read,
    unknown_words,
    without_words,
)

ROOT = Path(__file__).parents[2]
ENTRIES = {entry.name: entry for entry in load_catalog(ROOT / "catalog.yaml").models}
ODD = ["teal", "3", "circles", "not", "日本語", "赤", "😀", "→", "né", "ÉTOILE", "x²", "and", "Ⅷ"]
GLUE = [" ", "  ", ", ", ".", "-", "'", "/", "\n", "“", "”—", "_", "!", "$", "\u3000", ""]


def entry(**vocabulary: Any) -> CatalogEntry:
    return CatalogEntry.model_validate(
        {
            "name": "own",
            "task": "text-to-image",
            "engine": "echo",
            "vocabulary": vocabulary,
            "price": [{"unit": "image", "amount": "0.01"}],
        }
    )


@pytest.mark.parametrize("name", ["pocket-image", "pocket-video"])
def test_words_are_those_of_the_tokenizer(name: str) -> None:
    sold, r = ENTRIES[name], random.Random(1)
    tokenizer = Tokenizer.from_file(f"{ROOT}/{sold.checkpoint}/tokenizer/tokenizer.json")
    words = [token for token in tokenizer.get_vocab() if token.isalpha()]
    assert sold.vocabulary is not None
    assert set(sold.vocabulary.words) == set(words)

    for _ in range(1000):
        text = "".join(f"{r.choice((*words, *ODD))}{r.choice(GLUE)}" for _ in range(8))
        normal = tokenizer.normalizer.normalize_str(text)
        theirs = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]

        assert list(plain_words(text)) == [word for word in theirs if not _is_mark(word)], text


def _is_mark(word: str) -> bool:
    return word in "$+<=>^`|~" or unicodedata.category(word[0]).startswith("P")


@pytest.mark.parametrize("word", ["red", "Circle", "ABOVE", "pixelated"])
def test_known_words_are_not_reported(word: str) -> None:
    sold = ENTRIES["pocket-image"]

    assert unknown_words(sold, {"prompt": f"a {word}, please."}) == ()
    assert word.lower() in known_words(sold)


@pytest.mark.parametrize("text", ["a picture", "Show me this, please!", "…", "an image of the"])
def test_fillers_alone_say_nothing(text: str) -> None:
    found = read(ENTRIES["pocket-image"], text)

    assert not found.is_understood
    assert found.unknown == ()


def test_numbers_colours_and_negations_are_reported_in_order_and_once() -> None:
    (warning,) = unknown_words(
        ENTRIES["pocket-image"], {"prompt": "3 teal stars, not a Teal circle", "text": "red"}
    )

    assert warning.field == "prompt"
    assert warning.unknown == ("3", "teal", "stars", "not")
    assert {"red", "circle", "above"} <= set(warning.known)
    assert not {"a", "of", "on", "make", "picture"} & set(warning.known)


def test_reported_words_are_bounded() -> None:
    text = " ".join(f"x{number}{'y' * 100}" for number in range(200))

    (warning,) = unknown_words(ENTRIES["pocket-image"], {"prompt": text})

    assert len(warning.unknown) == UNKNOWN_MAX
    assert {len(word) for word in warning.unknown} == {WORD_MAX}


def test_vocabulary_of_an_own_entry_is_used_alike() -> None:
    own = entry(words=["Katze", "rot", "Pixel-Bär"])

    assert read(own, "eine ROTE Katze, rot, ein Pixel-Bär").unknown == ("eine", "rote", "ein")
    assert read(own, "a dog").is_understood is False
    assert known_words(own) == ("bar", "katze", "pixel", "rot")


@pytest.mark.parametrize(
    "wrong", [{}, {"characters": "abc", "words": ["x"]}, {"characters": "abc", "file": "x"}]
)
def test_vocabulary_has_words_or_characters(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`file`, a tokenizer file, `words` or both; or"):
        entry(**wrong)


@pytest.mark.parametrize("name", ["pocket-upscale", "pocket-video-upscale"])
def test_prompt_of_an_upscaler_is_reported_and_never_refused(name: str) -> None:
    (warning,) = unknown_words(ENTRIES[name], {"prompt": "make it sharp, please"})

    assert (warning.unknown, warning.known) == (("sharp",), ())
    assert read(ENTRIES[name], "make it sharp").is_understood


def test_model_without_a_vocabulary_understands_anything() -> None:
    assert ENTRIES["Veo3"].vocabulary is None
    assert unknown_words(ENTRIES["Veo3"], {"prompt": "asdf"}) == ()
    assert read(ENTRIES["Veo3"], "asdf").is_understood


def test_text_is_shown_without_its_unknown_words() -> None:
    text = "Three teal circles, a red-brown star (small)."

    assert without_words(text, ["three", "teal", "circles", "brown"]) == "a red star (small)."


@pytest.mark.parametrize(
    ("text", "unknown", "is_understood"),
    [
        ("Good morning, it is 9:30 — 5 % of $1,234.50!", (), True),
        ("Guten Morgen, 日本語 😀", ("日本語", "😀"), True),
        ("Straße, naïve œuvre, Ⅷ; \x01ﬁn", (), True),
        ("👨\u200d👩\u200d👧 and 👍🏽", ("👨\u200d👩\u200d👧", "👍🏽"), True),
        ("½ of b², ™", ("½", "²", "™"), True),
        ("😀", ("😀",), False),
        ("… !", (), False),
    ],
)
def test_characters_that_speech_drops_are_reported(
    text: str, unknown: tuple[str, ...], is_understood: bool
) -> None:
    found = read(ENTRIES["pocket-speech"], text)

    assert (found.unknown, found.is_understood) == (unknown, is_understood)


def test_key_tempo_and_metre_are_not_words() -> None:
    found = read(
        ENTRIES["pocket-music"],
        "A calm waltz in F# minor and A minor, 90 bpm, 3/4 then 5/4, for two pianos and kazoo 🎷",
    )

    # Only the first key is read.
    assert found.unknown == ("minor", "then", "5/4", "two", "kazoo", "🎷")

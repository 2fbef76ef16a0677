"""Finds the words of a text that a model does not know. Pure.

A text is split as the model splits it, so a word is known here exactly if the engine knows it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.catalog.derived import once_per_entry
from gateway.catalog.schema import CatalogEntry, CatalogModel
from workers.contract.jobs import PromptWarning
from workers.contract.music_notation import EXAMPLES, NOTATION

_category = unicodedata.category

FIELDS: Final = ("prompt", "text", "negative_prompt")
"""Fields of inputs whose texts a vocabulary is for."""
UNKNOWN_MAX: Final = 50
"""Maximum unknown words that are reported of one text."""
WORD_MAX: Final = 60
"""Maximum length of a reported word, in characters."""

_FILE: Final = Path(__file__).with_name("fillers.yaml")
_PLAIN: Final = re.compile(r"[^\s!-/:-@\[-`{-~]+")
_MUSIC: Final = re.compile(
    r"\d+(?:[/.:]\d+)*|[^\W\d_]+(?:['-][^\W\d_]+)*|[^\w\s\x00-\x7f\xa1-\xbf\u2010-\u2027]"
)
_HAN: Final = re.compile(r"([\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f])")
_SPOKEN: Final = ("L", "N", "Sm", "Sc", "So")
"""Unicode categories of characters that speech must not drop: others are marks and pauses."""
_JOINED: Final = ("M", "C", "Sk")
"""Categories of characters that change the one before, such as the colour of an emoji."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model makes of a text."""

    unknown: tuple[str, ...]
    """Words that it does not know, or characters that it cannot pronounce, in order."""
    is_understood: bool
    """Whether it knows any word that means something by itself, or none is expected."""


class _Fillers(CatalogModel):
    silent: str
    joining: str


def unknown_words(entry: CatalogEntry, fields: Mapping[str, str]) -> tuple[PromptWarning, ...]:
    """Return what a model does not know of texts, which are given by their fields' names.

    Empty if it knows all, or if it has no vocabulary.
    """
    return tuple(
        PromptWarning(field, found.unknown, known_words(entry))
        for field, text in fields.items()
        if (found := read(entry, text)).unknown
    )


def texts_of(input: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of an input that a vocabulary is for, by field."""
    given = {field: input.get(field) for field in FIELDS}
    return {field: text for field, text in given.items() if isinstance(text, str) and text.strip()}


def read(entry: CatalogEntry, text: str) -> Reading:
    """Read a text as the model does. Without a vocabulary, anything is understood."""
    vocabulary = entry.vocabulary
    if vocabulary is None:
        return Reading((), is_understood=True)
    if vocabulary.characters is not None:
        return _read_characters(_characters(entry), text)
    known, silent, fillers = _known(entry), _silent(), _fillers()
    unknown: dict[str, None] = {}
    is_understood = False
    for word in _splitter(entry)(text):
        if word not in known:
            if word not in silent:
                unknown[word] = None
        elif word not in fillers:
            is_understood = True
    return Reading(_shown(unknown), is_understood or not known)


@once_per_entry
def known_words(entry: CatalogEntry) -> tuple[str, ...]:
    """Return the words of an entry's vocabulary that mean something, or its characters."""
    if entry.vocabulary is None:
        return ()
    if entry.vocabulary.characters is not None:
        return tuple(entry.vocabulary.characters)
    telling = sorted(_known(entry) - _fillers() - {_NOTE})
    return (*EXAMPLES, *telling) if entry.engine == "music" else tuple(telling)


def without_words(text: str, unknown: Iterable[str]) -> str:
    """Return a text without some of its words."""
    left_out = frozenset(unknown)
    kept = []
    for part in text.split():
        words = plain_words(part)
        if left_out.isdisjoint(words):
            kept.append(part)
        else:
            kept += [word for word in words if word not in left_out]
    return " ".join(kept)


# --- Words ----------------------------------------------------------------------------------------

_NOTE: Final = "\u02ac"
"""Stands for a key, a tempo or a metre; a letter of no language."""


def plain_words(text: str) -> Sequence[str]:
    """Split as the tokenizers of BERT do: by spaces and punctuation, without case and accents."""
    if not text.isascii():
        text = unicodedata.normalize("NFD", _HAN.sub(r" \1 ", text))
        text = "".join(map(_plain_character, text))
    return _PLAIN.findall(text.lower())


def _plain_character(character: str) -> str:
    category = _category(character)
    if category == "Mn" or (category[0] == "C" and not character.isspace()):
        return ""
    return " " if category[0] == "P" else character


def _music_words(text: str) -> Sequence[str]:
    """Split as the music engine does, which first reads key, tempo and metre."""
    text = text.lower().replace("<", " ").replace(">", " ")
    for find in NOTATION:
        if found := find(text):
            text = f"{text[: found.start()]} {_NOTE} {text[found.end() :]}"
    return _MUSIC.findall(text)


@once_per_entry
def _known(entry: CatalogEntry) -> frozenset[str]:
    assert entry.vocabulary is not None
    split = _splitter(entry)
    words = frozenset(part for word in entry.vocabulary.words for part in split(word))
    return words | {_NOTE} if entry.engine == "music" else words


def _splitter(entry: CatalogEntry) -> Callable[[str], Sequence[str]]:
    return _music_words if entry.engine == "music" else plain_words


@cache
def _silent() -> frozenset[str]:
    return frozenset(_read_fillers().silent.split())


@cache
def _fillers() -> frozenset[str]:
    return _silent() | frozenset(_read_fillers().joining.split())


def _read_fillers() -> _Fillers:
    return _Fillers.model_validate(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


# --- Characters -----------------------------------------------------------------------------------


def _read_characters(known: frozenset[str], text: str) -> Reading:
    """Find runs of characters that cannot be pronounced."""
    text = unicodedata.normalize("NFC", text)
    pronounced = {character for character in set(text) if is_pronounced(known, character)}
    dropped = {one for one in set(text) - pronounced if _category(one).startswith(_SPOKEN)}
    unknown: dict[str, None] = {}
    run = ""
    for character in f"{text} " if dropped else "":
        joins = run and _category(character).startswith(_JOINED) and not character.isspace()
        if character in dropped or joins:
            run += character
        elif run:
            unknown[run] = None
            run = ""
    return Reading(_shown(unknown), is_understood=bool(pronounced))


def is_pronounced(known: frozenset[str], character: str) -> bool:
    """Whether a character, or the letter that it is a form of, is among those that are known."""
    lower = character.lower()
    if lower in known:
        return True
    if character.isdecimal():
        return str(unicodedata.decimal(character)) in known
    if _category(character) == "No":
        return False  # Fractions and circled numbers are not read as numbers.
    plain = unicodedata.normalize("NFKD", lower)
    return any(letter in known for letter in plain if letter.isalpha())


@once_per_entry
def _characters(entry: CatalogEntry) -> frozenset[str]:
    assert entry.vocabulary is not None
    return frozenset(entry.vocabulary.characters or "")


def _shown(unknown: Iterable[str]) -> tuple[str, ...]:
    words = (unicodedata.normalize("NFC", word) for word in list(unknown)[:UNKNOWN_MAX])
    return tuple(word if len(word) <= WORD_MAX else f"{word[: WORD_MAX - 1]}…" for word in words)

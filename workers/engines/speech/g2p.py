"""Grapheme-to-phoneme conversion, for checkpoints with their own table instead of a tokenizer.

The table is a decision tree over the letters around a letter, the nearest first, as deep as the
pronunciation is ambiguous. So frequent words are stored exactly, and others are pronounced like the
words with the most similar spelling.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file

ALPHABET: Final = " abcdefghijklmnopqrstuvwxyz',.?!"
MARKS: Final = ",.?!"
_WORD_LETTERS: Final = ALPHABET[1:28]
LETTERS_IN_WORD: Final = 8
"""Letters of the word examined on each side."""
LETTERS_BEYOND: Final = 5
"""Characters examined beyond the word: the one that ends it, two after that, two before it."""
_REPLACEMENTS: Final = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u02bc\u0060\u00b4", "'"),
        **dict.fromkeys(';:()[]{}\u2013\u2014\u2026\u201c\u201d"\u00ab\u00bb', ","),
        "\u00df": "ss",
        "\u00e6": "ae",
        "\u0153": "oe",
        "\u00f8": "o",
        "\u0142": "l",
        "\u0111": "d",
    }
)
_LETTER_NAMES: Final = (
    "ay bee see dee ee eff gee aitch eye jay kay ell em en oh pee cue are ess tee you vee "
    "double-you ex why zee"
)
_NAME_OF_LETTER: Final = dict(zip(ALPHABET[1:27], _LETTER_NAMES.split(), strict=True))
_ACRONYM: Final = re.compile(r"\b[A-Z]{2,4}s?\b")
_SINGLE_CONSONANT: Final = re.compile(r"(?<![a-z'])[b-hj-z](?![a-z'])")
_COMMAS: Final = re.compile(r"[\s,]*,[\s,]*")
_FINAL_MARKS: Final = re.compile(r"[\s,]*([.?!])[\s,.?!]*")


def normalize_spelling(text: str) -> str:
    """Convert a text to ``ALPHABET``, ending with a mark; empty if it has no letters.

    Short words in capitals are spelled out, unless the whole text is in capitals.
    """
    if any(letter.islower() for letter in text):
        text = _ACRONYM.sub(_spell_out, text)
    plain = unicodedata.normalize("NFKD", text.lower().translate(_REPLACEMENTS))
    plain = plain.translate(_REPLACEMENTS)
    plain = "".join(character for character in plain if not unicodedata.combining(character))
    plain = _SINGLE_CONSONANT.sub(lambda found: _NAME_OF_LETTER[found[0]], plain)
    plain = "".join(character if character in ALPHABET else " " for character in plain)
    plain = _COMMAS.sub(", ", plain)
    plain = _FINAL_MARKS.sub(r"\1 ", plain)
    plain = re.sub(r"(?<![a-z])'|'(?![a-z])", "", plain)
    plain = " ".join(plain.split()).strip(" ,")
    if not any(letter.isalpha() for letter in plain):
        return ""
    plain = plain.lstrip(" ,.?!")
    return plain if plain[-1] in ".?!" else plain + "."


def context_letters(text: str, position: int) -> list[int]:
    """Return the letters around a position in the tree's order: those of its word, then others."""
    start, end = _word_at(text, position)
    positions = [position]
    for step in range(1, LETTERS_IN_WORD + 1):
        positions += [position + step if position + step < end else -1]
        positions += [position - step if position - step >= start else -1]
    positions += [end, end + 1, end + 2, start - 2, start - 3]
    return [ALPHABET.index(text[other]) if 0 <= other < len(text) else 0 for other in positions]


def _word_at(text: str, position: int) -> tuple[int, int]:
    start = end = position
    while start and text[start - 1] in _WORD_LETTERS:
        start -= 1
    while end < len(text) and text[end] in _WORD_LETTERS:
        end += 1
    return start, end


class GraphemeToPhoneme:
    """Raise ``ValueError`` if the table is inconsistent."""

    def __init__(
        self,
        sounds: list[str],
        chunks: list[list[int]],
        tree: dict[str, npt.NDArray[Any]],
    ) -> None:
        self.sounds = sounds
        self._chunks = chunks
        self._letters, self._counts, self._chunk_ids = (
            tree[name] for name in ("letter", "children", "chunk")
        )
        lengths = {len(column) for column in tree.values()}
        if len(lengths) != 1 or int(self._chunk_ids.max()) >= len(chunks):
            raise ValueError("the table of letters and sounds is damaged")
        self._first = 1 + np.concatenate([[0], np.cumsum(self._counts.astype(np.int64))[:-1]])

    def __call__(self, text: str) -> torch.Tensor:
        """Return phoneme ids ``(1, S)``, from 1; S is 0 if the text cannot be pronounced."""
        text = normalize_spelling(text)
        ids: list[int] = []
        for position, letter in enumerate(text):
            if letter in MARKS:
                ids.append(self.sounds.index("_" + letter))
            elif letter != " ":
                ids += self._chunks[self._chunk(context_letters(text, position))]
        return torch.tensor([[number + 1 for number in ids]], dtype=torch.long)

    def _chunk(self, letters: list[int]) -> int:
        node = 0
        for letter in letters:
            first, count = int(self._first[node]), int(self._counts[node])
            position = int(np.searchsorted(self._letters[first : first + count], letter))
            if position == count or self._letters[first + position] != letter:
                break
            node = first + position
        return int(self._chunk_ids[node])


def read_g2p(path: Path) -> GraphemeToPhoneme:
    """Load the table. Raise ``OSError``, ``KeyError`` or ``ValueError``."""
    config = json.loads((path / "config.json").read_text())
    return GraphemeToPhoneme(
        config["sounds"], config["chunks"], load_file(path / "model.safetensors")
    )


def _spell_out(found: re.Match[str]) -> str:
    letters = found[0].removesuffix("s")
    return (
        " ".join(_NAME_OF_LETTER[letter.lower()] for letter in letters) + found[0][len(letters) :]
    )

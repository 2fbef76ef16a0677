"""From letters to sounds, for checkpoints that bring their own table instead of a tokenizer.

The table is a tree over the letters around a letter, the nearest first, as deep as they leave open
what is said. So frequent words are known by heart, and any other is read as those are that are
written most like it.
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
_IN_WORDS: Final = ALPHABET[1:28]
REACH: Final = 8
"""Letters of a word on either side that are looked at."""
BEYOND: Final = 5
"""What is looked at beyond the word: what ends it, two letters behind it, two before it."""
_ALIKE: Final = str.maketrans(
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
_NAMES: Final = dict(zip(ALPHABET[1:27], _LETTER_NAMES.split(), strict=True))
_CAPITALS: Final = re.compile(r"\b[A-Z]{2,4}s?\b")
_LONELY: Final = re.compile(r"(?<![a-z'])[b-hj-z](?![a-z'])")
_COMMAS: Final = re.compile(r"[\s,]*,[\s,]*")
_MARKED: Final = re.compile(r"[\s,]*([.?!])[\s,.?!]*")


def written(text: str) -> str:
    """A text in the letters of ``ALPHABET``, with a mark at its end; empty if none are left.

    Short words in capitals are spelled, unless all is in capitals.
    """
    if any(letter.islower() for letter in text):
        text = _CAPITALS.sub(_spelled, text)
    plain = unicodedata.normalize("NFKD", text.lower().translate(_ALIKE))
    plain = plain.translate(_ALIKE)
    plain = "".join(one for one in plain if not unicodedata.combining(one))
    plain = _LONELY.sub(lambda found: _NAMES[found[0]], plain)
    plain = "".join(one if one in ALPHABET else " " for one in plain)
    plain = _COMMAS.sub(", ", plain)
    plain = _MARKED.sub(r"\1 ", plain)
    plain = re.sub(r"(?<![a-z])'|'(?![a-z])", "", plain)
    plain = " ".join(plain.split()).strip(" ,")
    if not any(letter.isalpha() for letter in plain):
        return ""
    plain = plain.lstrip(" ,.?!")
    return plain if plain[-1] in ".?!" else plain + "."


def around(text: str, place: int) -> list[int]:
    """The letters around one, in the order in which they are looked at: its word's, then others."""
    start, end = _word_at(text, place)
    places = [place]
    for step in range(1, REACH + 1):
        places += [place + step if place + step < end else -1]
        places += [place - step if place - step >= start else -1]
    places += [end, end + 1, end + 2, start - 2, start - 3]
    return [ALPHABET.index(text[at]) if 0 <= at < len(text) else 0 for at in places]


def _word_at(text: str, place: int) -> tuple[int, int]:
    start = end = place
    while start and text[start - 1] in _IN_WORDS:
        start -= 1
    while end < len(text) and text[end] in _IN_WORDS:
        end += 1
    return start, end


class GraphemeToPhoneme:
    """Raise ``ValueError`` if the table does not fit together."""

    def __init__(
        self,
        sounds: list[str],
        chunks: list[list[int]],
        tree: dict[str, npt.NDArray[Any]],
    ) -> None:
        self.sounds = sounds
        self._chunks = chunks
        self._letters, self._counts, self._said = (
            tree[name] for name in ("letter", "children", "chunk")
        )
        if len({len(one) for one in tree.values()}) != 1 or int(self._said.max()) >= len(chunks):
            raise ValueError("the table of letters and sounds is damaged")
        self._first = 1 + np.concatenate([[0], np.cumsum(self._counts.astype(np.int64))[:-1]])

    def __call__(self, text: str) -> torch.Tensor:
        """Numbers of sounds ``(1, S)``, from 1; S is 0 where nothing is to be said."""
        text = written(text)
        said: list[int] = []
        for place, letter in enumerate(text):
            if letter in MARKS:
                said.append(self.sounds.index("_" + letter))
            elif letter != " ":
                said += self._chunks[self._chunk(around(text, place))]
        return torch.tensor([[one + 1 for one in said]], dtype=torch.long)

    def _chunk(self, letters: list[int]) -> int:
        node = 0
        for letter in letters:
            first, count = int(self._first[node]), int(self._counts[node])
            place = int(np.searchsorted(self._letters[first : first + count], letter))
            if place == count or self._letters[first + place] != letter:
                break
            node = first + place
        return int(self._said[node])


def read_graphemes(path: Path) -> GraphemeToPhoneme:
    """From its directory. Raise ``OSError``, ``KeyError`` or ``ValueError``."""
    config = json.loads((path / "config.json").read_text())
    return GraphemeToPhoneme(
        config["sounds"], config["chunks"], load_file(path / "model.safetensors")
    )


def _spelled(found: re.Match[str]) -> str:
    letters = found[0].removesuffix("s")
    return " ".join(_NAMES[letter.lower()] for letter in letters) + found[0][len(letters) :]

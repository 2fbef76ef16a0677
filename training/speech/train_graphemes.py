"""Trains the grapheme-to-phoneme table of ``pocket-speech`` on the teacher's pronunciation.

    python -m training.speech.train_graphemes --out DIR

Words are pronounced in sentences, because context changes the small ones. Letters and phonemes are
aligned by expectation maximisation; a decision tree over the surrounding letters stores the result
(IGTree, Daelemans et al. 1997). One word in forty is held out, to measure unknown words.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from wordfreq import top_n_list

from training.speech.samples import SOUNDS, sentence
from training.speech.teacher import Teacher
from workers.engines.speech.g2p import (
    ALPHABET,
    LETTERS_BEYOND,
    LETTERS_IN_WORD,
    GraphemeToPhoneme,
    context_letters,
    normalize_spelling,
)

WORDS: Final = 60_000
_LONGEST: Final = 4
"""Maximum number of phonemes of a letter."""
_HELD_OUT: Final = 40
Chunk: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AlignedText:
    """A sentence with the phonemes of each word, or group of words that are pronounced as one."""

    text: str
    words: tuple[tuple[int, str, Chunk], ...]
    """Position, letters and phonemes of each word."""


def say(teacher: Teacher, text: str) -> AlignedText | None:
    """Return a sentence with the teacher's phonemes; None if they cannot be split into words."""
    spoken = teacher.say(text)
    by_place: dict[int, list[str]] = defaultdict(list)
    for (name, _), at in zip(spoken.sounds, spoken.words, strict=True):
        if name != "_":
            by_place[at].append(name)
    starts = sorted(by_place)
    if any(at and text[at - 1] != " " for at in starts):
        return None
    if any(name not in SOUNDS for names in by_place.values() for name in names):
        return None
    ends = [*starts[1:], len(text)]
    rows = (
        (at, text[at:end].strip(" ,.?!"), tuple(by_place[at]))
        for at, end in zip(starts, ends, strict=True)
    )
    return AlignedText(text, tuple(rows))


def sentences(words: Sequence[str], r: random.Random, *, count: int) -> Iterable[str]:
    """Yield sentences with each of these words, and ``count`` random ones."""
    rows = list(words)
    r.shuffle(rows)
    for at in range(0, len(rows), 4):
        said: list[str] = []
        for word in rows[at : at + 4]:
            said += [r.choice(("the", "a", "of", "to", "and", "is", "in", "my"))] * (
                r.random() < 0.5
            )
            said.append(word)
        yield " ".join(said) + r.choice((".", ".", "?", "!"))
    for _ in range(count):
        yield sentence(r)


def align(pairs: Sequence[tuple[str, Chunk]], *, rounds: int) -> dict[tuple[str, str], float]:
    """Return the log probability of each phoneme sequence given a letter."""
    known: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        counts: Counter[tuple[str, str]] = Counter()
        for letters, sounds in pairs:
            for letter, chunk in zip(letters, cut(letters, sounds, known) or (), strict=False):
                counts[letter, " ".join(chunk)] += 1
        totals: Counter[str] = Counter()
        for (letter, _), number in counts.items():
            totals[letter] += number
        known = {
            (letter, chunk): math.log(number / totals[letter])
            for (letter, chunk), number in counts.items()
        }
    return known


def cut(letters: str, sounds: Chunk, known: dict[tuple[str, str], float]) -> list[Chunk] | None:
    """Return the likeliest assignment of phonemes to letters, or None."""
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for place, letter in enumerate(letters):
        row: dict[int, tuple[float, int]] = {}
        left = len(letters) - place - 1
        for at, (value, _) in best[-1].items():
            for size in range(min(_LONGEST, len(sounds) - at) + 1):
                if len(sounds) - at - size > left * _LONGEST:
                    continue
                chunk = " ".join(sounds[at : at + size])
                if letter == " " and size:
                    continue
                score = value + known.get((letter, chunk), -12.0 if known else 0.0)
                score -= 0.0 if known else abs(size - 1) + _unlike(letter, sounds[at : at + size])
                if at + size not in row or score > row[at + size][0]:
                    row[at + size] = (score, size)
        best.append(row)
    at, found = len(sounds), []
    if at not in best[-1]:
        return None
    for row in reversed(best[1:]):
        size = row[at][1]
        found.append(sounds[at - size : at])
        at -= size
    return found[::-1]


@cache
def _unlike(letter: str, chunk: Chunk) -> float:
    """Return the initial penalty: vowels match vowels, and consonants often their own name."""
    if not chunk:
        return 0.0
    sound = chunk[0].lstrip("',")
    vowel = sound[0] in "aeiou@AEIOUV03"
    return (0.0 if vowel == (letter in "aeiouy") else 1.0) - 0.5 * (sound[0].lower() == letter)


@dataclass(slots=True)
class _Node:
    letter: int
    chunk: int
    children: list[_Node] = field(default_factory=list)


def grow(rows: list[tuple[list[int], int]], depth: int = 0, letter: int = 0) -> _Node:
    """Grow the tree until the letters determine the phonemes."""
    counts = Counter(chunk for _, chunk in rows)
    node = _Node(letter, counts.most_common(1)[0][0])
    if len(counts) == 1 or depth == 1 + 2 * LETTERS_IN_WORD + LETTERS_BEYOND:
        return node
    parts: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
    for row in rows:
        parts[row[0][depth]].append(row)
    for value, some in sorted(parts.items()):
        child = grow(some, depth + 1, value)
        if child.children or child.chunk != node.chunk:
            node.children.append(child)
    return node


def table(root: _Node) -> dict[str, npt.NDArray[Any]]:
    """Return the nodes in breadth-first order, so that siblings are adjacent."""
    queue, place = [root], 0
    while place < len(queue):
        queue += queue[place].children
        place += 1
    return {
        "letter": np.array([node.letter for node in queue], np.uint8),
        "children": np.array([len(node.children) for node in queue], np.uint8),
        "chunk": np.array([node.chunk for node in queue], np.uint16),
    }


def make(said: Sequence[AlignedText], out: Path) -> GraphemeToPhoneme:
    """Align, grow the tree, and save the table in ``out``."""
    pairs = list({(word, sounds) for one in said for _, word, sounds in one.words})
    some = random.Random(0).sample(pairs, min(8000, len(pairs)))
    known = align(some, rounds=4)
    cuts = {(word, sounds): cut(word, sounds, known) for word, sounds in pairs}
    numbers: dict[Chunk, int] = {}
    rows = []
    for one in said:
        for at, word, sounds in one.words:
            for place, chunk in enumerate(cuts[word, sounds] or ()):
                if word[place] == " ":
                    continue
                number = numbers.setdefault(chunk, len(numbers))
                rows.append((context_letters(one.text, at + place), number))
    tree = table(grow(rows))
    chunks = [[SOUNDS.index(name) for name in chunk] for chunk in numbers]
    out.mkdir(parents=True, exist_ok=True)
    save_file(tree, out / "model.safetensors")
    config = {"sounds": SOUNDS, "chunks": chunks}
    (out / "config.json").write_text(json.dumps(config) + "\n")
    print(f"{len(pairs)} words, {len(rows)} letters, {len(tree['chunk'])} nodes", flush=True)
    return GraphemeToPhoneme(list(SOUNDS), chunks, tree)


def right(made: GraphemeToPhoneme, said: Sequence[AlignedText]) -> tuple[float, float]:
    """Return the fraction of sentences with all phonemes right, and that of phonemes, ignoring
    their order."""
    whole, sounds = 0, []
    for one in said:
        wanted = [name for _, _, names in one.words for name in names]
        ids = made(one.text)[0].tolist()
        found = [SOUNDS[i - 1] for i in ids if not SOUNDS[i - 1].startswith("_")]
        whole += found == wanted
        same = Counter(found) & Counter(wanted)
        sounds.append(same.total() / max(1, len(wanted)))
    return whole / max(1, len(said)), sum(sounds) / max(1, len(sounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=WORDS)
    parser.add_argument("--sentences", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("workers/pocket/speech/graphemes"))
    given = parser.parse_args()
    r, teacher = random.Random(given.seed), Teacher()
    letters = set(ALPHABET[1:28])
    words = [one for one in top_n_list("en", given.words) if set(one) <= letters]
    words = [one for one in words if len(one) > 1 and normalize_spelling(one) == one + "."]
    kept = words[_HELD_OUT - 1 :: _HELD_OUT]
    known = [one for i, one in enumerate(words, 1) if i % _HELD_OUT]
    texts = sentences(known, r, count=given.sentences)
    back = set(kept)
    said = [
        one
        for text in texts
        if not back & {word.strip(",.?!") for word in text.split()}
        and (one := say(teacher, text)) is not None
    ]
    print(f"{len(said)} sentences", flush=True)
    made = make(said, given.out)
    print("known sentences", right(made, said[-300:]))
    unknown = [one for word in kept if (one := say(teacher, word + ".")) is not None]
    print("unknown words", right(made, unknown), len(unknown))


if __name__ == "__main__":
    main()

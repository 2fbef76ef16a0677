"""Captions of pieces for training, and prompts of requests.

A prompt reaches the model as words of its vocabulary, in which key, tempo and metre are replaced by
their music tokens. These three are parsed by rules and kept exactly; the meaning of other words is
learnt from captions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

from workers.contract.music_notation import KEY, METRE, TEMPO, find_key
from workers.engines.music.notes import (
    INSTRUMENTS,
    METRES,
    PARTS,
    TONICS,
    Key,
    Mode,
    Part,
    Piece,
    tempo_token,
    token,
)

MOOD_WORDS: Final = {
    "happy": ("happy", "cheerful", "joyful", "bright", "sunny", "upbeat", "merry", "uplifting"),
    "playful": ("playful", "funny", "bouncy", "quirky", "cute", "light-hearted", "silly"),
    "epic": ("epic", "heroic", "grand", "triumphant", "majestic", "powerful", "cinematic"),
    "dreamy": ("dreamy", "floating", "ambient", "magical", "mysterious", "ethereal", "hazy"),
    "calm": ("calm", "peaceful", "relaxing", "gentle", "quiet", "soothing", "soft", "mellow"),
    "sad": ("sad", "melancholic", "mournful", "sorrowful", "lonely", "wistful", "tearful"),
    "dark": ("dark", "gloomy", "ominous", "sinister", "scary", "haunting", "grim"),
    "tense": ("tense", "suspenseful", "nervous", "urgent", "anxious", "thrilling", "restless"),
}
SCENES: Final = {
    "happy": ("a summer day", "a birthday party", "a holiday", "an advert", "dancing"),
    "playful": ("a cartoon", "a puzzle game", "a children's game", "a clumsy cat", "a circus"),
    "epic": ("a battle", "a film trailer", "a hero's journey", "a boss fight", "an adventure"),
    "dreamy": ("a night sky", "outer space", "a fairy tale", "an underwater world", "a dream"),
    "calm": ("studying", "a sleeping child", "yoga", "a forest walk", "reading", "meditation"),
    "sad": ("a rainy day", "a farewell", "an empty house", "a lost love", "autumn leaves"),
    "dark": ("a dungeon", "a haunted house", "a horror film", "a cave", "a stormy night"),
    "tense": ("a chase", "a spy film", "a heist", "a countdown", "a bomb"),
}
INSTRUMENT_WORDS: Final = {
    "bells": ("bells", "music box", "glockenspiel", "celesta"),
    "violin": ("violin", "fiddle"),
    "guitar": ("guitar", "acoustic guitar"),
    "synth": ("synth", "synthesizer", "lead synth"),
    "organ": ("organ", "church organ"),
    "strings": ("strings", "string section", "orchestra"),
    "pad": ("pad", "synth pad"),
    "upright": ("double bass", "upright bass"),
    "electric": ("electric bass", "bass guitar"),
    "synth-bass": ("synth bass",),
    "kit": ("drums", "drum kit", "percussion"),
    "electronic": ("electronic drums", "a drum machine", "electronic beats"),
}
_NOUNS: Final = ("piece", "tune", "song", "track", "melody", "theme", "instrumental", "music")
_OPENINGS: Final = ("", "", "", "", "", "compose ", "write ", "make ", "i want ", "please play ")
_SLOW: Final = 80
_FAST: Final = 124
_METRE_WORDS: Final = {"waltz": "3/4"}


def _name(r: random.Random, instrument: str) -> str:
    return r.choice(INSTRUMENT_WORDS.get(instrument, (instrument,)))


def _key_name(key: Key, r: random.Random) -> str:
    name = TONICS[key.tonic].capitalize()
    if len(name) == 2 and r.random() < 0.5:
        name = {"Db": "C#", "Eb": "D#", "Gb": "F#", "Ab": "G#", "Bb": "A#"}[name]
    return f"{name} {key.mode}"


def caption(piece: Piece, r: random.Random, *, full: bool = False) -> str:
    """Describe a piece by a random selection of its properties, or by all; rarely by none."""
    if not full and r.random() < 0.05:
        return ""

    def include(share: float) -> bool:
        return full or r.random() < share

    noun = r.choice(_NOUNS)
    words = []
    if include(0.2) and not _SLOW <= piece.tempo <= _FAST:
        words.append("slow" if piece.tempo < _SLOW else "fast")
    by_scene = not full and r.random() < 0.15
    if not by_scene and include(0.9):
        words.append(r.choice(MOOD_WORDS[piece.mood]))
    if piece.metre == "3/4" and include(0.3):
        noun = "waltz"
    opening = r.choice(_OPENINGS)
    article = "" if noun == "music" else "a "
    text = f"{opening}{article}{' '.join((*words, noun))}"
    if by_scene or include(0.1):
        text += f" for {r.choice(SCENES[piece.mood])}"
    if include(0.45):
        text += f" in {_key_name(piece.key, r)}"
    if include(0.45):
        text += f" at {piece.tempo} bpm"
    if include(0.15) and noun != "waltz":
        text += f" in {piece.metre}"
    parts = [_name(r, piece.lead)] if include(0.6) else []
    if include(0.4) and piece.chords != piece.lead:
        parts.append(_name(r, piece.chords))
    if include(0.2):
        parts.append(_name(r, piece.bass))
    if piece.drums != "none" and include(0.4):
        parts.append(_name(r, piece.drums))
    if parts:
        text += f" with {' and '.join((', '.join(parts[:-1]), parts[-1])[len(parts) == 1 :])}"
    if piece.drums == "none" and include(0.3):
        text += ", no drums" if parts else " without drums"
    return text


# --- Prompts -------------------------------------------------------------------------------------

_NO_DRUMS: Final = re.compile(r"\b(?:no|without)(?: any)? (?:drums|percussion)\b")
_NAMES: Final = {
    "grand piano": "piano",
    **{name: name for part in PARTS if part != "drums" for name in INSTRUMENTS[part]},
    **{word.removeprefix("a "): name for name, words in INSTRUMENT_WORDS.items() for word in words},
}
_INSTRUMENT: Final = re.compile(
    rf"\b({'|'.join(sorted(map(re.escape, _NAMES), key=len, reverse=True))})s?\b"
)
_MOODS: Final = {word: mood for mood, words in MOOD_WORDS.items() for word in words}
_WORD: Final = re.compile(r"<[a-z-]+:[^>\s]+>|[a-z]+(?:['-][a-z]+)*")


@dataclass(frozen=True, slots=True)
class MusicPrompt:
    """What a prompt states explicitly; None if it does not."""

    key: Key | None
    tempo: int | None
    """Beats per minute."""
    metre: str | None
    mood: str | None
    instruments: Mapping[Part, str]
    words: tuple[str, ...]
    """The prompt as the model's input, including words outside the vocabulary."""


def parse_prompt(text: str) -> MusicPrompt:
    """Parse a prompt in English. What no rule matches is left to the model."""
    text = text.lower().replace("<", " ").replace(">", " ")
    key, tempo, metre = None, None, None
    instruments = _instruments(text)
    described = _WORD.findall(_INSTRUMENT.sub(" ", text))
    mood = next((_MOODS[word] for word in described if word in _MOODS), None)
    if found := find_key(text):
        key = _key(found)
        tags = f" {token('tonic', TONICS[key.tonic])} {token('mode', key.mode)} "
        text = text[: found.start()] + tags + text[found.end() :]
    if found := TEMPO.search(text):
        tempo = int(found[1])
        text = f"{text[: found.start()]} {tempo_token(tempo)} {text[found.end() :]}"
    if found := METRE.search(text):
        metre = found[1]
        text = f"{text[: found.start()]} {token('metre', metre)} {text[found.end() :]}"
    words = tuple(_WORD.findall(text))
    for word, implied in _METRE_WORDS.items():
        if metre is None and word in words:
            metre = implied
    assert metre is None or metre in METRES
    return MusicPrompt(key, tempo, metre, mood, instruments, words)


def _instruments(text: str) -> dict[Part, str]:
    """Assign each instrument to the first free part that can use it."""
    found: dict[Part, str] = {"drums": "none"} if _NO_DRUMS.search(text) else {}
    for match in _INSTRUMENT.finditer(_NO_DRUMS.sub(" ", text)):
        name = _NAMES[match[1]]
        free = (part for part in PARTS if name in INSTRUMENTS[part] and part not in found)
        if part := next(free, None):
            found[part] = name
    return found


def parse_key(name: str) -> Key | None:
    """Parse the name of a key, such as ``F# minor``. Return None if it is not valid."""
    found = KEY.fullmatch(name.strip().lower())
    return found and _key(found)


def _key(found: re.Match[str]) -> Key:
    tonic = TONICS.index(found[1])
    altered = found[2] or found[3]
    if altered:
        tonic += 1 if altered in ("#", "♯", "sharp") else -1
    mode = cast(Mode, {"maj": "major", "min": "minor"}[found[4][:3]])
    return Key(tonic % 12, mode)


def parse_mood(name: str) -> str | None:
    """Map a word such as ``cheerful`` to its mood. Return None if it is unknown."""
    return _MOODS.get(name.strip().lower())


def known_words() -> tuple[str, ...]:
    """Return all words that captions use, sorted."""
    texts = [
        *(word for words in MOOD_WORDS.values() for word in words),
        *(scene for scenes in SCENES.values() for scene in scenes),
        *(word for words in INSTRUMENT_WORDS.values() for word in words),
        "piano flute marimba harp cello",
        *_NOUNS,
        *_OPENINGS,
        *_METRE_WORDS,
        "a slow fast for in at with and no drums without",
    ]
    return tuple(sorted({word for text in texts for word in _WORD.findall(text)}))

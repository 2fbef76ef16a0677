"""Training samples of the pocket speech model: sentences synthesised by the teacher in many voices.

The sentences are random words, frequent ones more often (package ``wordfreq``, extra ``train``).
They are meaningless, but the teacher pronounces them like any other sentence.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch
from wordfreq import top_n_list, word_frequency

from training.speech.teacher import Teacher, VoiceSettings, choose_voice
from workers.engines.speech.spectra import HOP, analyse, normalize_loudness

WORDS: Final = 30_000
_BINDING_WORDS: Final = (
    "the a of to in and is that it for on with as was at be by this have from or had not "
    "are but they which you we he she his her their an were been has can will would if no "
    "there when "
)
_BINDING: Final = _BINDING_WORDS.split()
_WORD: Final = re.compile(r"[a-z]+(?:'[a-z]+)?")
_MARKS: Final = ",.?!"
_SOUND_NAMES: Final = (
    "'0 '3: '@2 'A: 'A@ 'E 'I 'O2 'O: 'O@ 'OI 'U 'U@ 'V 'a 'aI 'aI3 'aI@ 'aU 'aa 'e@ 'eI "
    "'i: 'i@ 'i@3 'o@ 'oU 'u: ,0 ,3: ,A: ,A@ ,E ,I ,O2 ,O: ,OI ,U ,V ,a ,aI ,aU ,aa ,e@ "
    ",eI ,i: ,i@ ,i@3 ,o@ ,oU ,u: 0 3 3: ; ? @ @- @2 @L A: A@ D E I I# I2 N O2 O: O@ OI S "
    "T U U@ V Z _! _, _. _? a a# aI aI3 aI@ aU aa b d dZ e@ eI f g h i i: i@ i@3 j k l m "
    "n n- o@ oU p r r- s t t# t2 tS u: v w x z "
)
SOUNDS: Final = _SOUND_NAMES.split()
"""The model's phonemes, by the teacher's names. A stressed one begins with a mark."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sentence as text and as speech."""

    text: str
    sounds: tuple[str, ...]
    """Phonemes; a pause is ``_`` and its punctuation mark."""
    frames: torch.Tensor
    """Frames of each phoneme, ``(S,)``; their sum is T."""
    features: torch.Tensor
    """``(T, 82)``, see ``spectra``."""
    audio: torch.Tensor
    """``(N,)`` float32."""


@cache
def words() -> tuple[list[str], list[float]]:
    """Return the words of sentences, and their weights."""
    found = [word for word in top_n_list("en", WORDS) if _WORD.fullmatch(word)]
    return found, [word_frequency(word, "en") ** 0.45 for word in found]


def sentence(r: random.Random, *, words_max: int = 10) -> str:
    known, weights = words()
    count = r.choice((1, 2, *range(3, words_max + 1), *range(3, words_max + 1)))
    said: list[str] = []
    for place in range(count):
        binds = r.random() < 0.38 and place + 1 < count
        word = r.choice(_BINDING) if binds else r.choices(known, weights)[0]
        if place + 1 < count and not binds and r.random() < 0.08:
            word += ","
        said.append(word)
    return " ".join(said) + r.choices(_MARKS[1:], (8, 1.5, 0.7))[0]


def sounds_of(text: str, sounds: tuple[tuple[str, int], ...]) -> list[tuple[str, int]] | None:
    """Name pauses by their punctuation marks; None if pauses and marks do not match."""
    marks = [letter for letter in text if letter in _MARKS]
    made: list[tuple[str, int]] = []
    for name, start in sounds:
        if name != "_":
            made.append((name, start))
        elif made and made[-1][0][0] == "_":
            continue
        elif not made or not marks:
            return None
        else:
            made.append(("_" + marks.pop(0), start))
    return None if marks else made


def make_sample(teacher: Teacher, text: str, manner: VoiceSettings | None) -> Sample | None:
    spoken = teacher.say(text, manner)
    named = sounds_of(text, spoken.sounds)
    if not named:
        return None
    audio = normalize_loudness(torch.from_numpy(spoken.samples))
    features = analyse(audio)
    starts = [0, *(min(len(features), round(at / HOP)) for _, at in named[1:]), len(features)]
    frames = torch.tensor(starts).diff()
    if int(frames.min()) < 0:
        return None
    return Sample(text, tuple(name for name, _ in named), frames, features, audio)


def make_samples(
    teacher: Teacher, r: random.Random, manner: VoiceSettings | None, count: int
) -> Iterator[Sample]:
    """Yield ``count`` samples in one voice."""
    while count:
        made = make_sample(teacher, sentence(r), manner)
        if made is not None:
            count -= 1
            yield made


def write(folder: Path, *, seed: int, shards: int, voices: int, each: int = 5) -> None:
    """Write files of samples, which other processes can use as soon as each is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    teacher, r = Teacher(), random.Random(seed)
    for shard in range(shards):
        made = [
            (
                shard * voices + voice,
                one.text,
                one.sounds,
                one.frames.short(),
                one.features.half(),
                (one.audio.clamp(-1, 1) * 32767).short(),
            )
            for voice, manner in enumerate(choose_voice(r) for _ in range(voices))
            for one in make_samples(teacher, r, manner, each)
        ]
        path = folder / f"s{seed}_{shard}.pt"
        torch.save(made, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample from a file, with the number of its voice."""

    voice: int
    sample: Sample


def read(paths: Sequence[Path], *, sound: bool) -> list[StoredSample]:
    """Read samples; without ``sound`` their audio, which needs most memory, is left out."""
    found: list[StoredSample] = []
    for path in paths:
        for voice, text, sounds, frames, features, audio in torch.load(path):
            audio = audio.float() / 32767 if sound else torch.zeros(0)
            made = Sample(text, sounds, frames.long(), features.float(), audio)
            found.append(StoredSample(voice, made))
    return found

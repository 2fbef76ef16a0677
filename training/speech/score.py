"""Scores the pocket speech model: its intelligibility, and the similarity of cloned voices.

    python -m training.speech.score workers/pocket/speech

Intelligibility is compared with the teacher's on held-out sentences in the catalog's voices, by an
independent recogniser (``understanding``). Cloned voices are held-out too, and compared with the
originals by speaker embeddings that were trained on people (package ``resemblyzer``).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from training.speech.samples import sentence
from training.speech.sentences import SENTENCES
from training.speech.speakers import SPEAKERS
from training.speech.teacher import Teacher, choose_voice
from training.speech.understanding import RECOGNISER_RATE, Sound, SpeechReader, at_rate, understood
from workers.engines.speech.model import Voice
from workers.engines.speech.spectra import normalize_loudness

HELD_OUT: Final = 1_000_003
RECORDED: Final = 6
COPIED: Final = 4
"""Number of sentences in a recording, and in a clone's speech."""


def cloned(reader: SpeechReader, teacher: Teacher, *, voices: int, each: int) -> dict[str, float]:
    """Return how often a clone is nearer to its own recording than to another voice's, and than to
    all others'; and the same for the teacher, speaking again in each voice."""
    from resemblyzer import VoiceEncoder

    encoder = VoiceEncoder("cpu", verbose=False)

    def likeness(sound: Sound) -> npt.NDArray[Any]:
        heard = at_rate(normalize_loudness(torch.from_numpy(sound)).numpy(), RECOGNISER_RATE)
        return np.asarray(encoder.embed_utterance(heard))

    def trials(number: int, said: Sound) -> npt.NDArray[Any]:
        near = own @ likeness(said)
        return np.delete(near < near[number], number)

    r = random.Random(HELD_OUT)
    manners = [choose_voice(r) for _ in range(voices)]
    recordings = [
        np.concatenate([teacher.say(sentence(r), manner).samples for _ in range(RECORDED)])
        for manner in manners
    ]
    own = np.stack([likeness(one) for one in recordings])
    copies, again = [], []
    for number, recording in enumerate(recordings):
        for turn in range(each):
            text = " ".join(SENTENCES[(7 * number + 31 * turn + i) % 100] for i in range(COPIED))
            copies.append(trials(number, reader.say(text, Voice("", recording=recording))))
            again.append(trials(number, teacher.say(text, manners[number]).samples))
    return {
        "copies, than another": float(np.mean(copies)),
        "copies, than all": float(np.mean([one.all() for one in copies])),
        "teacher, than another": float(np.mean(again)),
        "teacher, than all": float(np.mean([one.all() for one in again])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sentences", type=int, default=len(SENTENCES))
    parser.add_argument("--voices", type=int, default=20)
    parser.add_argument("--each", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    reader, teacher = SpeechReader(given.directory), Teacher()
    say: dict[str, Callable[[str, str], Sound]] = {
        "teacher": lambda text, name: teacher.say(text, SPEAKERS[name]).samples,
        "model": lambda text, name: reader.say(text, reader.voices[name]),
    }
    if given.sentences:
        found = {
            who: understood(speak, sorted(SPEAKERS), SENTENCES[: given.sentences])
            for who, speak in say.items()
        }
        print(json.dumps({**found, "relative": found["model"] / found["teacher"]}), flush=True)
    if given.voices:
        print(json.dumps(cloned(reader, teacher, voices=given.voices, each=given.each)))


if __name__ == "__main__":
    main()

"""Measures the intelligibility of the pocket speech model by a speech recogniser.

The recogniser is independent: pocketsphinx with its own acoustic model. Its language model has only
the words of the sentences, all equally likely, so that recognition depends on the audio. Faint
noise is added, as in a room.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from av import AudioFrame, AudioResampler

from training.speech.sentences import SENTENCES
from workers.contract.models import ModelSpec
from workers.engines.speech.families import CLONING_TASK, family_of
from workers.engines.speech.model import Segment, SpeechModel, Voice, read_voice
from workers.engines.speech.options import read_options
from workers.engines.speech.spectra import RATE
from workers.engines.speech.text import Language
from workers.media.crossfade import TimeStretcher

RECOGNISER_RATE: Final = 16_000
_NOISE: Final = 0.01
"""Standard deviation of the noise, relative to that of the speech: 40 dB below it."""
Sound: TypeAlias = npt.NDArray[np.float32]


class SpeechReader:
    """Synthesises a text in one of the model's voices, like the engine."""

    def __init__(self, path: Path) -> None:
        names = sorted(one.stem for one in (path / "voices").glob("*.safetensors"))
        given = {name: {"embedding": f"voices/{name}.safetensors"} for name in names}
        spec = ModelSpec(
            "pocket-speech",
            "text-to-speech",
            engine="speech",
            checkpoint=str(path),
            options={"voices": given, "threads": 1},
            also=(CLONING_TASK,),
        )
        options = read_options(spec)
        self.model: SpeechModel = family_of(spec).load(path, options)
        self.voices = {
            name: read_voice(name, one, root=path, rate=None, limits=options)
            for name, one in options.voices.items()
        }
        self._language = Language("en")

    def say(self, text: str, voice: Voice) -> Sound:
        parts: list[torch.Tensor] = []
        with torch.no_grad():
            voice = self.model.check(voice)
            for one in self._language.sentences(text, characters_max=200):
                torch.manual_seed(0)
                self.model.synthesize(Segment(one, voice, 30), parts.append)
        stretcher = TimeStretcher(self.model.rate, voice.speed)
        sound = stretcher.add(torch.cat(parts).float().numpy())
        return np.concatenate([sound, stretcher.finish()])


class Recogniser:
    """Recognises words of a given vocabulary."""

    def __init__(self, sentences: Sequence[str]) -> None:
        from pocketsphinx import Decoder

        known = sorted({word for text in sentences for word in words(text)})
        share = math.log10(1 / (len(known) + 1))
        rows = [f"{share:.4f} </s>", "-99 <s>", *(f"{share:.4f} {word}" for word in known)]
        model = ["\\data\\", f"ngram 1={len(rows)}", "", "\\1-grams:", *rows, "", "\\end\\", ""]
        with tempfile.NamedTemporaryFile("w", suffix=".lm") as file:
            file.write("\n".join(model))
            file.flush()
            self._decoder: Any = Decoder(samprate=RECOGNISER_RATE, loglevel="FATAL", lm=file.name)

    def hear(self, sound: Sound) -> list[str]:
        heard = at_rate(sound, RECOGNISER_RATE)
        heard = 0.08 * heard / max(1e-6, float(heard.std()))
        quiet = np.zeros(RECOGNISER_RATE // 5, np.float32)
        heard = np.concatenate([quiet, heard, quiet])
        room = heard + np.random.default_rng(0).normal(0, 0.08 * _NOISE, len(heard))
        self._decoder.start_utt()
        data = (room.clip(-1, 1) * 32767).astype("<i2").tobytes()
        self._decoder.process_raw(data, full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return words(found.hypstr) if found else []


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def right(wanted: Sequence[str], heard: Sequence[str]) -> int:
    """Count words recognised in order: the longest common subsequence."""
    row = [0] * (len(heard) + 1)
    for word in wanted:
        before = 0
        for place, other in enumerate(heard, 1):
            before, row[place] = (
                row[place],
                before + 1 if word == other else max(row[place], row[place - 1]),
            )
    return row[-1]


def at_rate(sound: Sound, rate: int) -> Sound:
    frame = AudioFrame.from_ndarray(sound[None].astype(np.float32), format="fltp", layout="mono")
    frame.sample_rate = RATE
    resampler = AudioResampler("fltp", "mono", rate)
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([one.to_ndarray()[0] for one in frames]).astype(np.float32)


def understood(
    say: Callable[[str, str], Sound], names: Sequence[str], sentences: Sequence[str]
) -> float:
    """Return the fraction of words recognised in sentences, which use the voices in turn."""
    listener = Recogniser(SENTENCES)
    got = total = 0
    for number, text in enumerate(sentences):
        heard = listener.hear(say(text, names[number % len(names)]))
        got += right(words(text), heard)
        total += len(words(text))
    return got / total

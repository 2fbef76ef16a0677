"""Scores how well the pocket music model follows its prompt, by the engine that serves it.

    python -m training.music.score workers/pocket/music --count 40 --out pieces

Captions are held out by ``training.common.split``: training never reads them. The files that a
client gets are analysed: the notes by their MIDI, the audio by ``music_analysis``.
``score_librosa`` analyses the audio independently.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import av
import numpy as np
import torch

from training.common.split import choose
from training.music.music_analysis import (
    Features,
    Samples,
    chroma,
    features,
    fits,
    in_scale,
    is_near,
    keys_of,
    pitch_classes,
    tempo_of,
)
from training.music.samples import describe
from training.music.tunes import tune
from workers.contract.jobs import Completed, Job, RequestId
from workers.contract.models import ModelSpec
from workers.engines.music.engine import TASK, MusicEngine
from workers.engines.music.midi import read_midi
from workers.engines.music.notes import MOODS, Piece
from workers.engines.music.prompt import parse_prompt
from workers.protocol.engine import Admitted, Deferred, Phase

HELD_OUT: Final = 1_000_003
_TUNES: Final = 40
"""Number of tunes from which the typical features of a mood are computed."""


class _Clock:
    alone = True

    @contextlib.contextmanager
    def phase(self, _: Phase) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class Made:
    """The files that a client gets for a request."""

    wave: bytes
    midi: bytes

    @property
    def piece(self) -> Piece:
        return read_midi(self.midi)

    @property
    def sound(self) -> tuple[Samples, int]:
        """Audio samples ``(n, 2)`` and their rate in Hz."""
        with av.open(io.BytesIO(self.wave), "r") as container:
            rate = container.streams.audio[0].rate
            frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
        whole = np.concatenate(frames, axis=1).reshape(-1, 2).astype(np.float32)
        return whole / np.float32(32_768), rate


def load(path: Path, **options: Any) -> MusicEngine:
    given = {"threads": 1, **options}
    engine = MusicEngine(ModelSpec("pocket", TASK, "music", str(path), given))
    engine.load()
    return engine


def run(engine: MusicEngine, orders: Sequence[dict[str, Any]]) -> list[Made]:
    """Run all requests on a loaded engine. Raise ``AssertionError`` if one fails."""
    clock, found = _Clock(), dict[str, Made]()
    waiting = list(enumerate(orders))
    while len(found) < len(orders):
        while waiting:
            number, order = waiting[0]
            job = Job(RequestId(str(number)), "score", "pocket", TASK, {"format": "wav", **order})
            if (admission := engine.admit(job, clock)) != Admitted():
                assert not hasattr(admission, "code"), admission
                break
            waiting.pop(0)
        report = engine.step(clock)
        for _, event in report.events:
            if isinstance(event, Deferred):
                event.make()  # renders a bar
        for name, reported in report.outcomes:
            outcome = reported.make() if isinstance(reported, Deferred) else reported
            assert isinstance(outcome, Completed), outcome
            found[name] = Made(outcome.files[0].data, outcome.files[1].data)
            engine.release(name)
    return [found[str(number)] for number in range(len(orders))]


def moods_of(piece: Piece) -> list[str]:
    """Return all moods, the most similar to a piece first."""
    found = features(piece)
    return sorted(MOODS, key=lambda mood: _distance(found, _usual()[mood]))


@cache
def _usual() -> dict[str, list[Features]]:
    r = random.Random(0)
    return {mood: [features(tune(r, mood=mood, bars=10)) for _ in range(_TUNES)] for mood in MOODS}


def _distance(found: Features, known: list[Features]) -> float:
    far = 0.0
    for value, usual in zip(found, zip(*known, strict=True), strict=True):
        spread = statistics.pstdev(usual) + 0.15 * max(1.0, abs(statistics.fmean(usual)))
        far += ((value - statistics.fmean(usual)) / spread) ** 2
    return far


def held_out_tunes(count: int) -> list[tuple[Piece, str]]:
    """Return tunes with captions that training never reads."""
    seeds = (random.Random(f"{HELD_OUT}/{number}") for number in range(count))
    found = [choose(partial(describe, r), held_out=True) for r in seeds]
    return [(one.piece, one.caption) for one in found]


def score(of: Sequence[tuple[Piece, str]], made: Sequence[Made]) -> dict[str, float]:
    """Return fractions of pieces or, for the notes in the scale, of notes."""
    marks: dict[str, list[float]] = defaultdict(list)
    for (wanted, said), one in zip(of, made, strict=True):
        piece, told, (sound, rate) = one.piece, parse_prompt(said), one.sound
        if told.key is not None:
            marks["key as prompted"].append(piece.key == told.key)
        if told.tempo is not None:
            marks["tempo as prompted"].append(piece.tempo == told.tempo)
        marks["notes in the scale"].append(in_scale(piece))
        marks["key found in the notes"].append(piece.key == keys_of(pitch_classes(piece))[0])
        heard = keys_of(chroma(sound, rate))[0]
        marks["key found in the audio"].append(heard == piece.key)
        marks["key found in the audio, or its relative"].append(is_near(heard, piece.key))
        marks["tempo found, or a simple multiple"].append(fits(tempo_of(sound, rate), piece.tempo))
        for part, name in told.instruments.items():
            marks["instruments as prompted"].append(piece.instrument(part) == name)
        marks["mood as in the tune of the caption"].append(piece.mood == wanted.mood)
        marks["mood among the two likeliest"].append(piece.mood in moods_of(piece)[:2])
        marks["ends on the tonic"].append(piece.bars[-1].chords[-1][1].root == 0)
    return {name: round(statistics.fmean(values), 3) for name, values in marks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=24)
    parser.add_argument("--out", type=Path, help="directory for the files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    of = held_out_tunes(options.count)
    duration_ms = round(options.seconds * 1000)
    orders = [
        {"prompt": said, "seed": seed, "duration_ms": duration_ms}
        for seed, (_, said) in enumerate(of)
    ]
    made = run(load(options.directory), orders)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(made):
            (options.out / f"{number:03}.wav").write_bytes(one.wave)
            (options.out / f"{number:03}.mid").write_bytes(one.midi)
    print(json.dumps(score(of, made), indent=2))


if __name__ == "__main__":
    main()

"""Analyses pieces of the pocket music model independently, with librosa.

    pip install 'tollgate[listen]'
    python -m training.music.score workers/pocket/music --out pieces
    python -m training.music.score_librosa pieces
    python -m training.music.score_librosa docs/audio --picture docs/img/pocket-music.png

Only the audio is analysed: the key by the chroma of its constant-Q transform and the profiles of
``music_analysis``, the tempo by librosa's beat tracker. The truth is read from the MIDI files
beside the audio.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Final

import librosa
import numpy as np
from PIL import Image

from training.music.music_analysis import fits, is_near, keys_of
from workers.engines.music.midi import read_midi

_RATE: Final = 22_050
_HOP: Final = _RATE // 40


def listen(sound: Path) -> dict[str, bool]:
    """Return which aspects of a file are recognised correctly."""
    piece = read_midi(sound.with_suffix(".mid").read_bytes())
    samples = librosa.load(sound, sr=_RATE)[0]
    harmonic = librosa.effects.harmonic(samples)
    chroma = librosa.feature.chroma_cqt(y=harmonic, sr=_RATE).sum(1)
    key = keys_of(np.asarray(chroma, np.float64))[0]
    tempo = float(np.atleast_1d(librosa.beat.beat_track(y=samples, sr=_RATE)[0])[0])
    return {
        "key": key == piece.key,
        "key, or its relative": is_near(key, piece.key),
        "tempo": abs(tempo / piece.tempo - 1) <= 0.04,
        "tempo, or a simple multiple": fits(tempo, piece.tempo, within=0.04),
    }


def draw(sound: Path, path: Path) -> None:
    """Save a mel spectrogram, 40 frames per second, with the tracked beats as ticks below it."""
    samples = librosa.load(sound, sr=_RATE)[0]
    mel = librosa.feature.melspectrogram(y=samples, sr=_RATE, hop_length=_HOP, n_mels=160)
    loud = np.clip(librosa.power_to_db(mel, ref=np.max) / 70 + 1, 0, 1)[::-1]
    beats = librosa.beat.beat_track(y=samples, sr=_RATE, hop_length=_HOP)[1]
    ticks = np.zeros((10, loud.shape[1]))
    ticks[:, beats] = 1
    shades = np.round(255 * np.concatenate([loud, ticks])).astype(np.uint8)
    Image.fromarray(shades).resize((shades.shape[1] * 2, shades.shape[0] * 2)).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--picture", type=Path, help="draw the first file instead of scoring")
    options = parser.parse_args()
    sounds = sorted((*options.directory.glob("*.wav"), *options.directory.glob("*.mp3")))
    if options.picture:
        draw(sounds[0], options.picture)
        return
    marks: dict[str, list[bool]] = defaultdict(list)
    for sound in sounds:
        for name, right in listen(sound).items():
            marks[name].append(right)
    print(json.dumps({name: round(statistics.fmean(m), 3) for name, m in marks.items()}, indent=2))


if __name__ == "__main__":
    main()

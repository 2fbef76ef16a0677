"""Analyses music, by its notes and by its audio: key, tempo and features of its mood.

Verifies the pocket music model. It knows nothing of how a piece was composed, and of audio only the
samples.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from workers.engines.music.notes import METRES, MODES, SCALES, Key, Mode, Piece, trim

Samples = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
"""Weights of the twelve pitch classes, C first."""

_PROFILES: Final[dict[Mode, tuple[float, ...]]] = {
    "major": (6.35, 2.23, 3.48, 2.33, 4.38, 4.09, 2.52, 5.19, 2.39, 3.66, 2.29, 2.88),
    "minor": (6.33, 2.68, 3.52, 5.38, 2.60, 3.53, 2.54, 4.75, 3.98, 2.69, 3.34, 3.17),
}
"""Listeners' ratings of how well each note fits a key (Krumhansl and Kessler, 1982)."""
_WINDOW: Final = 8192
_HOP: Final = 512
_BAND_HZ: Final = (60.0, 2000.0)
"""Frequency band of fundamentals; above it there are only overtones."""


def in_scale(piece: Piece) -> float:
    """Return the fraction of a piece's notes, without drums, that are in its natural scale."""
    scale = SCALES[piece.key.mode]
    pitches = [n.pitch for bar in piece.bars for n in bar.notes if n.part != "drums"]
    if not pitches:
        return 1.0
    return sum((pitch - piece.key.tonic) % 12 in scale for pitch in pitches) / len(pitches)


def pitch_classes(piece: Piece) -> Weights:
    """Return the total duration of each pitch class, in sixteenths."""
    weights = np.zeros(12)
    bar_steps = METRES[piece.metre].bar
    for index, notes in enumerate(trim(piece.bars, bar_steps)):
        for end, note in notes:
            if note.part != "drums":
                weights[note.pitch % 12] += end - index * bar_steps - note.start
    return weights


def keys_of(weights: Weights) -> list[Key]:
    """Return all keys, the best fit first."""
    found = []
    for mode in MODES:
        for tonic in range(12):
            profile = np.roll(np.array(_PROFILES[mode]), tonic)
            found.append((_correlation(weights, profile), Key(tonic, mode)))
    return [key for _, key in sorted(found, key=lambda one: -one[0])]


def _correlation(one: Weights, other: Weights) -> float:
    if one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def is_near(one: Key, other: Key) -> bool:
    """Whether two keys are the same or relative keys, which share all notes."""
    if one.mode == other.mode:
        return one.tonic == other.tonic
    major, minor = (one, other) if one.mode == "major" else (other, one)
    return (major.tonic - minor.tonic) % 12 == 3


def chroma(sound: Samples, rate: int) -> Weights:
    """Return the strength of each pitch class in samples ``(n,)`` or ``(n, channels)``."""
    mono = _mono(sound)
    frequencies = np.fft.rfftfreq(_WINDOW, 1 / rate)
    inside = (frequencies >= _BAND_HZ[0]) & (frequencies <= _BAND_HZ[1])
    classes = np.round(12 * np.log2(frequencies[inside] / 440)).astype(int) + 9
    weights = np.zeros(12)
    window = np.hanning(_WINDOW)
    for start in range(0, max(1, len(mono) - _WINDOW), _WINDOW // 2):
        piece = mono[start : start + _WINDOW]
        piece = np.pad(piece, (0, _WINDOW - len(piece)))
        spectrum = np.abs(np.fft.rfft(piece * window))[inside]
        # Peaks only: energy between them is leakage of the window.
        peaks = np.zeros_like(spectrum)
        top = (spectrum[1:-1] > spectrum[:-2]) & (spectrum[1:-1] > spectrum[2:])
        peaks[1:-1][top] = spectrum[1:-1][top]
        np.add.at(weights, classes % 12, np.sqrt(peaks))
    return weights


def _mono(sound: Samples) -> npt.NDArray[np.float64]:
    return np.asarray(sound if sound.ndim == 1 else sound.mean(1), np.float64)


def onsets(sound: Samples, rate: int) -> tuple[npt.NDArray[np.float64], float]:
    """Return the onset strength of each frame, and the number of frames per second."""
    mono = _mono(sound)
    size = 4 * _HOP
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(mono, size), size)[::_HOP]
    spectrum = np.log1p(20 * np.abs(np.fft.rfft(frames * np.hanning(size), axis=1)))
    rise = np.maximum(0, np.diff(spectrum, axis=0)).sum(1)
    return rise - rise.mean(), rate / _HOP


def tempo_of(sound: Samples, rate: int, *, slowest: float = 40, fastest: float = 220) -> float:
    """Return the tempo in beats per minute that fits the onsets best, possibly a simple multiple of
    the perceived one."""
    rise, per_second = onsets(sound, rate)
    size = 2 ** math.ceil(math.log2(2 * len(rise)))
    power = np.abs(np.fft.rfft(rise, size)) ** 2
    together = np.fft.irfft(power)[: len(rise)]
    together /= np.maximum(1, len(rise) - np.arange(len(rise)))
    best = (-math.inf, 0.0)
    for tempo in np.arange(slowest, fastest, 0.25):
        period = 60 / tempo * per_second
        lags = period * np.arange(1, max(2, min(16, int(len(rise) * 0.6 / period))))
        score = float(np.interp(lags, np.arange(len(together)), together).mean())
        best = max(best, (score, float(tempo)))
    return best[1]


def fits(found: float, tempo: float, *, within: float = 0.02) -> bool:
    """Whether an estimate is the tempo or a simple multiple of it."""
    ratios = (1, 2, 1 / 2, 3, 1 / 3, 4, 1 / 4, 3 / 2, 2 / 3, 4 / 3, 3 / 4)
    return any(abs(found / (tempo * ratio) - 1) <= within for ratio in ratios)


class Features(NamedTuple):
    """Features that distinguish moods."""

    minor: float
    tempo: float
    """Beats per minute."""
    density: float
    """Note onsets per second, without drums."""
    height: float
    """Mean MIDI pitch of the melody in C."""
    loudness: float
    drums: float
    """Fraction of all notes that are drums."""
    dissonance: float
    """Fraction of bars with a diminished or dominant chord."""


def features(piece: Piece) -> Features:
    notes = [note for bar in piece.bars for note in bar.notes]
    lead = [note.pitch - piece.key.shift for note in notes if note.part == "lead"]
    pitched = [note for note in notes if note.part != "drums"]
    sharp = [
        any(chord.quality == "dim" or 11 in chord.pitches for _, chord in bar.chords)
        for bar in piece.bars
    ]
    seconds = max(1, len(piece.bars)) * piece.bar_seconds
    return Features(
        minor=float(piece.key.mode == "minor"),
        tempo=piece.tempo,
        density=len(pitched) / seconds,
        height=sum(lead) / len(lead) if lead else 60.0,
        loudness=sum(bar.loudness for bar in piece.bars) / max(1, len(piece.bars)),
        drums=1 - len(pitched) / max(1, len(notes)),
        dissonance=sum(sharp) / max(1, len(sharp)),
    )

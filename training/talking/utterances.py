"""Synthetic speech with known mouth shapes: random phonemes from a source-filter model.

A voice is a pulse train and noise, filtered by formants that move from phoneme to phoneme as the
mouth does. Both come from the same table, so audio and mouth shapes agree by construction. No
recordings are used, and the speech is meaningless.

Resonances of vowels: G. Peterson, H. Barney, Control Methods Used in a Study of the Vowels, 1952.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

RATE: Final = 16_000
HOP: Final = 160
"""Samples per row of mouth shapes."""
_FRAME: Final = 512
_STEP: Final = 80
_MOVING_S: Final = 0.022
"""Standard deviation of the smoothing of mouth movements (coarticulation), in seconds."""
_CLICK_S: Final = 0.006
_BANDS: Final = (60.0, 90.0, 120.0, 200.0, 250.0)
_FIXED: Final = (3400.0, 4500.0)
"""The fourth and fifth formants, which hardly move, in Hz."""


@dataclass(frozen=True, slots=True)
class Sound:
    """A phoneme. ``voice`` and ``hiss`` are in decibels, ``mouth`` as ``faces.MOUTH``, ``seconds``
    is the range of its duration."""

    formants: tuple[float, float, float]
    voice: float
    hiss: float
    centre: float
    mouth: tuple[float, float, float, float]
    seconds: tuple[float, float]
    held: bool = False
    """Whether it is a plosive: closure, then a burst."""


_NONE: Final = -90.0
_LONG, _SHORT, _STOP = (0.09, 0.24), (0.05, 0.12), (0.05, 0.1)
_VOWELS: Final = {
    "a": Sound((730, 1090, 2440), 0, _NONE, 0, (0.95, 0.0, 0.5, 0.3), _LONG),
    "ae": Sound((660, 1720, 2410), 0, _NONE, 0, (0.8, 0.45, 0.7, 0.3), _LONG),
    "e": Sound((530, 1840, 2480), -1, _NONE, 0, (0.55, 0.5, 0.8, 0.2), _LONG),
    "i": Sound((270, 2290, 3010), -3, _NONE, 0, (0.25, 0.9, 0.9, 0.1), _LONG),
    "ih": Sound((390, 1990, 2550), -2, _NONE, 0, (0.36, 0.6, 0.8, 0.2), _SHORT),
    "o": Sound((570, 840, 2410), -1, _NONE, 0, (0.6, -0.6, 0.1, 0.1), _LONG),
    "u": Sound((300, 870, 2240), -4, _NONE, 0, (0.22, -0.95, 0.0, 0.0), _LONG),
    "uh": Sound((640, 1190, 2390), 0, _NONE, 0, (0.6, 0.0, 0.4, 0.2), _SHORT),
    "er": Sound((490, 1350, 1690), -2, _NONE, 0, (0.4, -0.3, 0.4, 0.3), _LONG),
    "eh": Sound((500, 1500, 2500), -3, _NONE, 0, (0.4, 0.0, 0.4, 0.2), _SHORT),
}
_CONSONANTS: Final = {
    "m": Sound((250, 1000, 2200), -12, _NONE, 0, (0.0, 0.0, 0.0, 0.0), _SHORT),
    "n": Sound((280, 1700, 2600), -11, _NONE, 0, (0.16, 0.1, 0.6, 0.5), _SHORT),
    "p": Sound((300, 900, 2200), _NONE, -16, 1200, (0.0, 0.0, 0.0, 0.0), _STOP, held=True),
    "b": Sound((250, 900, 2200), -24, -18, 1000, (0.0, 0.0, 0.0, 0.0), _STOP, held=True),
    "t": Sound((350, 1750, 2600), _NONE, -10, 4500, (0.14, 0.2, 0.7, 0.5), _STOP, held=True),
    "d": Sound((280, 1750, 2600), -24, -14, 4000, (0.14, 0.2, 0.7, 0.5), _STOP, held=True),
    "k": Sound((350, 1900, 2400), _NONE, -11, 2200, (0.3, 0.1, 0.5, 0.1), _STOP, held=True),
    "g": Sound((280, 1900, 2400), -24, -15, 2000, (0.3, 0.1, 0.5, 0.1), _STOP, held=True),
    "s": Sound((350, 1750, 2600), _NONE, -9, 6200, (0.12, 0.4, 1.0, 0.0), _LONG),
    "z": Sound((300, 1750, 2600), -14, -13, 6000, (0.12, 0.4, 1.0, 0.0), _SHORT),
    "sh": Sound((350, 1800, 2500), _NONE, -8, 3300, (0.2, -0.7, 0.8, 0.0), _LONG),
    "f": Sound((350, 1100, 2300), _NONE, -19, 5000, (0.06, 0.1, 0.7, 0.0), _SHORT),
    "v": Sound((280, 1100, 2300), -14, -22, 4500, (0.06, 0.1, 0.7, 0.0), _SHORT),
    "th": Sound((350, 1400, 2600), _NONE, -22, 5500, (0.15, 0.1, 0.5, 0.9), _SHORT),
    "h": Sound((550, 1500, 2500), _NONE, -17, 1500, (0.42, 0.0, 0.4, 0.2), _SHORT),
    "l": Sound((360, 1200, 2700), -7, _NONE, 0, (0.35, 0.1, 0.5, 0.9), _SHORT),
    "r": Sound((330, 1100, 1550), -7, _NONE, 0, (0.25, -0.4, 0.5, 0.2), _SHORT),
    "w": Sound((300, 700, 2200), -8, _NONE, 0, (0.1, -0.95, 0.0, 0.0), _SHORT),
    "j": Sound((280, 2200, 2950), -7, _NONE, 0, (0.2, 0.8, 0.8, 0.1), _SHORT),
}
_PAUSE: Final = Sound((500, 1500, 2500), _NONE, _NONE, 0, (0.0, 0.0, 0.0, 0.0), (0.15, 0.9))

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Utterance:
    """``samples`` ``(N,)`` float32 at ``RATE``; ``mouths`` ``(N / HOP, 4)``; ``silent``
    ``(N / HOP,)``: no speech within a tenth of a second before and after."""

    samples: npt.NDArray[np.float32]
    mouths: npt.NDArray[np.float32]
    silent: npt.NDArray[np.bool_]


def utter(r: np.random.Generator, *, seconds: float = 2.56, clean: bool = False) -> Utterance:
    """Make speech in a random voice; ``clean`` omits room and microphone."""
    rows = round(seconds * RATE / _STEP)
    table = _script(r, rows)
    moving, click = (round(s * RATE / _STEP * 100) / 100 for s in (_MOVING_S, _CLICK_S))
    slow = _smoothed(table[:, :7], moving)
    quick = _smoothed(table[:, 7:10], click)
    samples = _sounding(r, slow[:, 4:7], quick)
    silent = table[:, 10] > 0
    around = round(0.1 * RATE / _STEP)
    silent = np.convolve(~silent, np.ones(2 * around + 1), "same") < 0.5
    if not clean:
        samples = _in_a_room(r, samples)
    every = HOP // _STEP
    return Utterance(
        samples.astype(np.float32),
        slow[::every, :4].astype(np.float32),
        silent[::every],
    )


def _script(r: np.random.Generator, rows: int) -> Floats:
    """Choose phonemes, as unsmoothed rows, one per ``_STEP``: mouth (4), formants (3), voice, hiss,
    centre of the hiss, pause."""
    table = np.zeros((rows, 11))
    pace, loud = r.uniform(0.8, 1.35), r.normal(0, 2)
    mumbling = r.uniform(0.65, 1.1)
    row, before = 0, "pause"
    while row < rows:
        if before == "pause" or (before in _VOWELS and r.random() < 0.75):
            if (before != "pause" and r.random() < 0.2) or (row == 0 and r.random() < 0.5):
                name, sound = "pause", _PAUSE
            else:
                name = str(r.choice(list(_CONSONANTS)))
                sound = _CONSONANTS[name]
        else:
            name = str(r.choice(list(_VOWELS)))
            sound = _VOWELS[name]
        before = name
        count = max(3, round(r.uniform(*sound.seconds) * pace * RATE / _STEP))
        part = table[row : row + count]
        stress = r.uniform(0.75, 1.12) * mumbling
        part[:, :4] = sound.mouth
        part[:, 0] = min(1.0, sound.mouth[0] * stress)
        part[:, 4:7] = sound.formants * np.exp(r.normal(0, 0.04, 3))
        part[:, 7] = sound.voice + loud + 6 * (stress - 1)
        part[:, 8] = sound.hiss + loud + r.normal(0, 2)
        part[:, 9] = sound.centre or 3000
        part[:, 10] = name == "pause"
        if sound.held:
            burst = max(2, round(0.012 * RATE / _STEP))
            part[:-burst, 8] = _NONE
            part[-burst:, 8] += 4
        row += count
    return table


def _smoothed(rows: Floats, deviation: float) -> Floats:
    reach = int(3 * deviation) + 1
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    bell /= bell.sum()
    wide = np.pad(rows, ((reach, reach), (0, 0)), mode="edge")
    return np.stack([np.convolve(column, bell, "valid") for column in wide.T], axis=1)


def _sounding(r: np.random.Generator, formants: Floats, quick: Floats) -> Floats:
    rows = len(formants)
    count = rows * _STEP
    pulses = _pulses(r, count)
    breath = r.normal(0, 1, count)
    frequencies = np.fft.rfftfreq(_FRAME, 1 / RATE)[1:-1]
    length = r.uniform(0.85, 1.22)
    wide = r.uniform(0.8, 1.5)
    fixed = np.broadcast_to(np.array(_FIXED), (rows, 2))
    resonances = np.concatenate([formants, fixed], axis=1) * length
    envelope = np.ones((rows, len(frequencies)))
    for place, band in enumerate(_BANDS):
        ratio = frequencies[None] / resonances[:, place, None]
        loss = frequencies[None] * band * wide / resonances[:, place, None] ** 2
        envelope /= np.sqrt((1 - ratio**2) ** 2 + loss**2)
    tilt = (frequencies / 500 + 0.3) ** -r.uniform(0.6, 1.4)
    breathy = r.uniform(-40, -24)
    voice, hiss, centre = (quick[:, i, None] for i in range(3))
    shaped = (envelope * tilt) * 10 ** (voice / 20)
    bell = np.exp(-0.5 * ((frequencies[None] - centre) / (0.22 * centre + 350)) ** 2)
    rough = bell * 10 ** (hiss / 20) * 3 + shaped * 10 ** (breathy / 20)
    return _filtered(pulses, shaped) + _filtered(breath, rough) * 0.6


def _pulses(r: np.random.Generator, count: int) -> Floats:
    """Generate the glottal pulses, with a changing pitch and vibrato."""
    pitch = np.exp(r.uniform(np.log(80), np.log(300)))
    time = np.arange(count) / RATE
    knots = r.normal(0, 0.12, max(4, count // 4000) + 2)
    melody = np.interp(time, np.linspace(0, time[-1], len(knots)), knots)
    trembling = 0.012 * np.sin(2 * np.pi * r.uniform(4, 7) * time) + melody
    phase = np.cumsum(pitch * np.exp(trembling)) / RATE
    beats = np.flatnonzero(np.diff(np.floor(phase)) > 0)
    beats = np.clip(beats + r.integers(-1, 2, len(beats)), 0, count - 1)
    pulses = np.zeros(count)
    pulses[beats] = np.sqrt(RATE / pitch) * r.uniform(0.9, 1.1, len(beats))
    pulses -= pulses.mean()
    return pulses


def _filtered(samples: Floats, envelope: Floats) -> Floats:
    """Filter a signal by an envelope per ``_STEP``: ``(rows, bins without first and last)``."""
    window = np.hanning(_FRAME + 1)[:-1]
    padded = np.pad(samples, _FRAME // 2)
    rows = len(envelope)
    places = np.arange(rows)[:, None] * _STEP + np.arange(_FRAME)[None]
    spectrum = np.fft.rfft(padded[places.clip(max=len(padded) - 1)] * window, axis=1)
    spectrum[:, 1:-1] *= envelope
    spectrum[:, 0] = spectrum[:, -1] = 0
    pieces = np.fft.irfft(spectrum, axis=1) * window
    out = np.zeros(len(padded) + _FRAME)
    for row, piece in enumerate(pieces):
        out[row * _STEP : row * _STEP + _FRAME] += piece
    return out[_FRAME // 2 : _FRAME // 2 + len(samples)] / (_FRAME / _STEP * 0.375)


def _in_a_room(r: np.random.Generator, samples: Floats) -> Floats:
    """Simulate a recording: reverberation, noise, a microphone's response and level."""
    if r.random() < 0.3:
        walls = round(r.uniform(0.05, 0.3) * RATE)
        echo = r.normal(0, 1, walls) * np.exp(-6 * np.arange(walls) / walls)
        echo *= r.uniform(0.05, 0.3) / np.sqrt((echo**2).sum())
        size = len(samples) + walls
        wet = np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(echo, size), size)
        samples = samples + wet[: len(samples)]
    spectrum = np.fft.rfft(samples)
    frequencies = np.fft.rfftfreq(len(samples), 1 / RATE)
    knots = np.linspace(0, RATE / 2, 6)
    gain = np.interp(frequencies, knots, r.normal(0, 3, 6))
    if r.random() < 0.2:
        gain -= 60 * (frequencies > r.uniform(3400, 7000))
    samples = np.fft.irfft(spectrum * 10 ** (gain / 20), len(samples))
    level = np.sqrt((samples**2).mean()) + 1e-9
    if r.random() < 0.75:
        noise = r.normal(0, 1, len(samples))
        colour = (np.fft.rfftfreq(len(samples), 1 / RATE) / 300 + 1) ** -r.uniform(0, 1.2)
        noise = np.fft.irfft(np.fft.rfft(noise) * colour, len(samples))
        noise *= level / np.sqrt((noise**2).mean()) * 10 ** (-r.uniform(18, 55) / 20)
        samples = samples + noise
    peak = max(float(np.abs(samples).max()), 1e-6)
    return samples * (10 ** (r.uniform(-30, -1) / 20) / peak)

"""The instruments of our synthesiser: single notes and strokes as samples, computed from formulas.

Sustained tones are read from a table of one period, plucked ones from a row of periods whose
overtones die away the faster the higher they are, struck bars are a few partials, drums noise and
falling tones. Nothing was recorded. A note begins and ends in silence, so nothing clicks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from workers.engines.music.notes import DRUMS

Mono = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

_TABLE: Final = 2048
_PERIOD: Final = 256
"""Samples of one period of a plucked tone."""
_CACHE_BYTES: Final = 48 << 20
_DRUM_SEED: Final = 7


@dataclass(frozen=True, slots=True)
class InstrumentVoice:
    """How an instrument sounds. Times are in seconds."""

    kind: Literal["tone", "pluck", "bar"]
    slope: float
    """Overtone ``n`` has a strength of ``n ** -slope``."""
    attack: float
    release: float
    decay: float = 1.0
    """Time to a third, of the fundamental in the middle octave."""
    sustain: float = 1.0
    """Of a tone, what is left of it when it has decayed."""
    damping: float = 0.0
    """How much faster each overtone dies away than the one below it."""
    even: float = 1.0
    """Strength of the even overtones."""
    overtones: int = 40
    vibrato: float = 0.0
    """In semitones."""
    voices: int = 1
    """So many of them play together, a little out of tune."""
    breath: float = 0.0
    """Noise in it."""
    partials: tuple[tuple[float, float, float], ...] = ()
    """Of a bar: frequency, strength and decay of each, relative to the first."""


_BELL: Final = ((1.0, 1.0, 1.0), (2.76, 0.35, 0.5), (5.40, 0.16, 0.25))
_MARIMBA: Final = ((1.0, 1.0, 1.0), (3.93, 0.32, 0.35), (9.2, 0.1, 0.15))
VOICES: Final = {
    "piano": InstrumentVoice("pluck", 1.15, 0.003, 0.16, decay=1.1, damping=0.10, overtones=28),
    "guitar": InstrumentVoice("pluck", 0.95, 0.002, 0.12, decay=0.8, damping=0.22, overtones=36),
    "harp": InstrumentVoice("pluck", 1.35, 0.003, 0.30, decay=1.0, damping=0.20, overtones=24),
    "upright": InstrumentVoice("pluck", 1.3, 0.006, 0.10, decay=0.9, damping=0.20, overtones=24),
    "electric": InstrumentVoice("pluck", 1.1, 0.004, 0.08, decay=1.3, damping=0.10, overtones=24),
    "bells": InstrumentVoice("bar", 0, 0.002, 0.50, decay=0.9, partials=_BELL),
    "marimba": InstrumentVoice("bar", 0, 0.002, 0.20, decay=0.30, partials=_MARIMBA),
    "flute": InstrumentVoice("tone", 2.3, 0.05, 0.09, overtones=7, vibrato=0.12, breath=0.05),
    "violin": InstrumentVoice("tone", 1.25, 0.07, 0.12, overtones=24, vibrato=0.18),
    "cello": InstrumentVoice("tone", 1.35, 0.08, 0.14, overtones=24, vibrato=0.12),
    "strings": InstrumentVoice("tone", 1.40, 0.14, 0.30, overtones=18, vibrato=0.08, voices=3),
    "pad": InstrumentVoice("tone", 1.75, 0.22, 0.45, overtones=14, voices=3),
    "organ": InstrumentVoice("tone", 1.1, 0.012, 0.07, overtones=9, even=1.2),
    "synth": InstrumentVoice(
        "tone", 1.15, 0.010, 0.09, decay=0.25, sustain=0.6, overtones=24, even=0.35, voices=2
    ),
    "synth-bass": InstrumentVoice("tone", 1.25, 0.006, 0.06, decay=0.22, sustain=0.5, overtones=24),
}
_DETUNED: Final = {1: (0.0,), 2: (-0.025, 0.025), 3: (-0.07, 0.0, 0.07)}
"""In semitones."""


def frequency(pitch: float) -> float:
    """Of a MIDI pitch, in Hz; 69 is 440."""
    return 440.0 * math.pow(2.0, (pitch - 69) / 12)


class Bank:
    """Notes that were computed, for one sampling rate in Hz; the last used are kept.

    What it returns must not be changed.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._kept: OrderedDict[tuple[str, int, int], Mono] = OrderedDict()
        self._bytes = 0

    def note(self, name: str, pitch: int, held: int) -> Mono:
        """A note that is held for so many samples and then let go, about 1 in strength."""
        return self._find((name, pitch, held))

    def drum(self, kit: str, pitch: int) -> Mono:
        return self._find((kit, pitch, 0))

    def _find(self, wanted: tuple[str, int, int]) -> Mono:
        if wanted in self._kept:
            self._kept.move_to_end(wanted)
            return self._kept[wanted]
        name, pitch, held = wanted
        if name in VOICES:
            made = _note(VOICES[name], frequency(pitch), held, self.rate)
        else:
            made = _drum(pitch, self.rate, low=name == "electronic")
        self._kept[wanted] = made
        self._bytes += made.nbytes
        while self._bytes > _CACHE_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
        return made


def _note(voice: InstrumentVoice, hertz: float, held: int, rate: int) -> Mono:
    attack = max(2, round(voice.attack * rate))
    held = max(held, attack)
    count = held + round(voice.release * rate)
    time = np.arange(count) / rate
    if voice.kind == "tone":
        sound = _tone(voice, hertz, time, rate)
    elif voice.kind == "pluck":
        sound = _pluck(voice, hertz, time, rate)
    else:
        sound = _bar(voice, hertz, time, rate)
    sound[:attack] *= _rise(attack)
    sound[held:] *= _rise(count - held)[::-1]
    return sound.astype(np.float32)


def _rise(count: int) -> Floats:
    """From 0 to 1 without a corner."""
    return 0.5 - 0.5 * np.cos(np.pi * np.arange(count) / max(1, count - 1))


def _overtones(voice: InstrumentVoice, hertz: float, rate: int) -> Floats:
    """Strength of each overtone that can be heard at a rate, the fundamental first."""
    count = max(1, min(voice.overtones, int(0.45 * rate / hertz)))
    strength: Floats = np.arange(1, count + 1, dtype=np.float64) ** -voice.slope
    strength[1::2] *= voice.even
    strength /= math.sqrt(float((strength**2).sum()) / 2)
    return strength


def _tone(voice: InstrumentVoice, hertz: float, time: Floats, rate: int) -> Floats:
    strength = _overtones(voice, hertz, rate)
    spectrum = np.zeros(_TABLE // 2 + 1, np.complex128)
    # Phases that differ keep the peaks of the sum low.
    phases = np.exp(1j * np.pi * np.arange(len(strength)) ** 2 / len(strength))
    spectrum[1 : len(strength) + 1] = -1j * strength * phases * _TABLE / 2
    table = np.fft.irfft(spectrum, _TABLE)
    table = np.append(table, table[0])
    sound = np.zeros(len(time))
    for number, detuned in enumerate(_DETUNED[voice.voices]):
        tuned = hertz * 2 ** (detuned / 12)
        cycles = tuned * time + 0.31 * number
        if voice.vibrato:
            swing = tuned * (2 ** (voice.vibrato / 12) - 1) / (2 * np.pi * 5.3)
            late = np.minimum(1, time / 0.4) ** 2
            cycles -= swing * late * np.cos(2 * np.pi * 5.3 * time + number)
        sound += _read(table, (cycles % 1.0) * _TABLE)
    sound /= math.sqrt(voice.voices)
    if voice.sustain < 1:
        sound *= voice.sustain + (1 - voice.sustain) * np.exp(-time / voice.decay)
    if voice.breath:
        noise = np.random.default_rng(_DRUM_SEED).standard_normal(len(time) + 8)
        sound += voice.breath * np.convolve(noise, np.ones(9) / 3, "valid")
    return sound


def _read(table: Floats, place: Floats) -> Floats:
    """Read between the samples of a table that ends as it begins."""
    whole = place.astype(np.int64)
    low = table[whole]
    found: Floats = low + (table[whole + 1] - low) * (place - whole)
    return found


def _pluck(voice: InstrumentVoice, hertz: float, time: Floats, rate: int) -> Floats:
    """All periods at once: overtone ``n`` dies away in ``decay / (1 + n * damping)``."""
    strength = _overtones(voice, hertz, rate)
    number = np.arange(1, len(strength) + 1)
    decay = voice.decay * (262 / hertz) ** 0.4
    rows = int(len(time) / rate * hertz) + 2
    loss = np.exp(-(1 + voice.damping * number) / (decay * hertz))
    spectrum = np.zeros((rows, _PERIOD // 2 + 1), np.complex128)
    phases = np.exp(1j * np.pi * number**2 / len(number))
    fading = loss[None] ** np.arange(rows)[:, None]
    spectrum[:, 1 : len(strength) + 1] = -1j * strength * phases * fading * _PERIOD / 2
    periods = np.fft.irfft(spectrum, _PERIOD, axis=1).ravel()
    return _read(periods, time * hertz * _PERIOD)


def _bar(voice: InstrumentVoice, hertz: float, time: Floats, rate: int) -> Floats:
    sound = np.zeros(len(time))
    decay = voice.decay * (523 / hertz) ** 0.5
    for ratio, strength, lasting in voice.partials:
        if hertz * ratio < 0.45 * rate:
            wave = np.sin(2 * np.pi * hertz * ratio * time)
            sound += 1.5 * strength * wave * np.exp(-time / (decay * lasting))
    return sound


# --- Drums ---------------------------------------------------------------------------------------

_NAMES: Final = {pitch: name for name, pitch in DRUMS.items()}
_LENGTHS: Final = {"crash": 1.6, "ride": 0.7, "open-hat": 0.35, "kick": 0.4, "low-tom": 0.45}
_NOISES: Final = {
    # Lowest frequency in Hz, decay in seconds, strength.
    "snare": (1200.0, 0.055, 0.55),
    "clap": (900.0, 0.06, 0.6),
    "hat": (6500.0, 0.018, 0.35),
    "open-hat": (6000.0, 0.09, 0.32),
    "ride": (5000.0, 0.16, 0.16),
    "crash": (3000.0, 0.45, 0.5),
    "shaker": (5000.0, 0.022, 0.25),
}
_FALLS: Final = {
    # From and to how many Hz, decay in seconds, strength.
    "kick": (130.0, 48.0, 0.11, 1.0),
    "snare": (230.0, 180.0, 0.05, 0.45),
    "low-tom": (140.0, 85.0, 0.13, 0.8),
    "high-tom": (210.0, 140.0, 0.10, 0.7),
    "ride": (2600.0, 2600.0, 0.12, 0.05),
}


def _drum(pitch: int, rate: int, *, low: bool) -> Mono:
    """One stroke; of the electronic kit lower and longer."""
    name = _NAMES[pitch]
    count = round(_LENGTHS.get(name, 0.28) * (1.2 if low else 1) * rate)
    time = np.arange(count) / rate
    sound = np.zeros(count)
    if name in _FALLS:
        top, bottom, decay, strength = _FALLS[name]
        factor = 0.85 if low else 1.0
        falling = factor * (bottom + (top - bottom) * np.exp(-time / 0.03))
        wave = np.sin(2 * np.pi * np.cumsum(falling) / rate)
        sound += strength * wave * np.exp(-time / (decay / factor))
    if name in _NOISES:
        lowest, decay, strength = _NOISES[name]
        noise = np.fft.rfft(np.random.default_rng(pitch).standard_normal(count))
        hertz = np.fft.rfftfreq(count, 1 / rate)
        noise *= 1 / (1 + (lowest / np.maximum(hertz, 1)) ** 4)
        burst = np.fft.irfft(noise, count) * np.exp(-time / decay)
        if name == "clap":
            burst *= 0.4 + 0.6 * (np.sin(2 * np.pi * 45 * np.minimum(time, 0.033)) ** 2)
        sound += strength * burst
    attack = round(0.0015 * rate)
    sound[:attack] *= _rise(attack)
    fade = count // 4
    sound[-fade:] *= _rise(fade)[::-1]
    return sound.astype(np.float32)

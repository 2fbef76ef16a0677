"""The instruments of the synthesiser: single notes and drum strokes, computed from formulas.

Sustained tones use a wavetable of one period; plucked tones a series of periods whose overtones
decay faster the higher they are; struck bars a few partials; drums noise and falling tones. Nothing
was recorded. Each note starts and ends in silence, so that it does not click.
"""

from __future__ import annotations

import math
import threading
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
"""Samples in a period of a plucked tone."""
_CACHE_BYTES: Final = 48 << 20
_DRUM_SEED: Final = 7


@dataclass(frozen=True, slots=True)
class InstrumentVoice:
    """Parameters of an instrument. Times are in seconds."""

    kind: Literal["tone", "pluck", "bar"]
    slope: float
    """Strength of overtone ``n`` is ``n ** -slope``."""
    attack: float
    release: float
    decay: float = 1.0
    """Time in which the fundamental decays to a third, in the middle octave."""
    sustain: float = 1.0
    """Level of a tone after its decay."""
    damping: float = 0.0
    """Additional decay of each overtone over the one below it."""
    even: float = 1.0
    """Strength of the even overtones."""
    overtones: int = 40
    vibrato: float = 0.0
    """Depth in semitones."""
    voices: int = 1
    """Number of slightly detuned copies."""
    breath: float = 0.0
    """Level of added noise."""
    partials: tuple[tuple[float, float, float], ...] = ()
    """Partials of a struck bar: frequency, strength and decay, relative to the first."""


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
"""Detuning of each copy, in semitones."""


def frequency(pitch: float) -> float:
    """Return the frequency of a MIDI pitch in Hz; pitch 69 is 440 Hz."""
    return 440.0 * math.pow(2.0, (pitch - 69) / 12)


class Bank:
    """Cache of computed notes at one sample rate in Hz, least recently used first out.

    Threads can share it. Callers must not modify what it returns.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._cache: OrderedDict[tuple[str, int, int], Mono] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def note(self, name: str, pitch: int, held: int) -> Mono:
        """Return a note released after ``held`` samples, with a level of about 1."""
        return self._find((name, pitch, held))

    def drum(self, kit: str, pitch: int) -> Mono:
        return self._find((kit, pitch, 0))

    def _find(self, key: tuple[str, int, int]) -> Mono:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        name, pitch, held = key
        if name in VOICES:
            samples = _note(VOICES[name], frequency(pitch), held, self.rate)
        else:
            samples = _drum(pitch, self.rate, low=name == "electronic")
        with self._lock:
            if key not in self._cache:  # another piece may have computed it meanwhile
                self._cache[key] = samples
                self._bytes += samples.nbytes
            while self._bytes > _CACHE_BYTES and len(self._cache) > 1:
                _, oldest = self._cache.popitem(last=False)
                self._bytes -= oldest.nbytes
        return samples


def _note(voice: InstrumentVoice, hertz: float, held: int, rate: int) -> Mono:
    attack = max(2, round(voice.attack * rate))
    held = max(held, attack)
    count = held + round(voice.release * rate)
    time = np.arange(count) / rate
    if voice.kind == "tone":
        samples = _tone(voice, hertz, time, rate)
    elif voice.kind == "pluck":
        samples = _pluck(voice, hertz, time, rate)
    else:
        samples = _bar(voice, hertz, time, rate)
    samples[:attack] *= _fade_in(attack)
    samples[held:] *= _fade_in(count - held)[::-1]
    return samples.astype(np.float32)


def _fade_in(count: int) -> Floats:
    """Return a smooth ramp from 0 to 1."""
    return 0.5 - 0.5 * np.cos(np.pi * np.arange(count) / max(1, count - 1))


def _overtones(voice: InstrumentVoice, hertz: float, rate: int) -> Floats:
    """Compute the strength of each overtone below the Nyquist frequency, fundamental first."""
    count = max(1, min(voice.overtones, int(0.45 * rate / hertz)))
    strength: Floats = np.arange(1, count + 1, dtype=np.float64) ** -voice.slope
    strength[1::2] *= voice.even
    strength /= math.sqrt(float((strength**2).sum()) / 2)
    return strength


def _tone(voice: InstrumentVoice, hertz: float, time: Floats, rate: int) -> Floats:
    strength = _overtones(voice, hertz, rate)
    spectrum = np.zeros(_TABLE // 2 + 1, np.complex128)
    # Different phases keep the peaks of the sum low.
    phases = np.exp(1j * np.pi * np.arange(len(strength)) ** 2 / len(strength))
    spectrum[1 : len(strength) + 1] = -1j * strength * phases * _TABLE / 2
    table = np.fft.irfft(spectrum, _TABLE)
    table = np.append(table, table[0])
    samples = np.zeros(len(time))
    for number, detuned in enumerate(_DETUNED[voice.voices]):
        tuned = hertz * 2 ** (detuned / 12)
        cycles = tuned * time + 0.31 * number
        if voice.vibrato:
            depth = tuned * (2 ** (voice.vibrato / 12) - 1) / (2 * np.pi * 5.3)
            onset = np.minimum(1, time / 0.4) ** 2
            cycles -= depth * onset * np.cos(2 * np.pi * 5.3 * time + number)
        samples += _interpolate(table, (cycles % 1.0) * _TABLE)
    samples /= math.sqrt(voice.voices)
    if voice.sustain < 1:
        samples *= voice.sustain + (1 - voice.sustain) * np.exp(-time / voice.decay)
    if voice.breath:
        noise = np.random.default_rng(_DRUM_SEED).standard_normal(len(time) + 8)
        samples += voice.breath * np.convolve(noise, np.ones(9) / 3, "valid")
    return samples


def _interpolate(table: Floats, positions: Floats) -> Floats:
    """Interpolate linearly in a table whose last sample equals its first."""
    whole = positions.astype(np.int64)
    low = table[whole]
    found: Floats = low + (table[whole + 1] - low) * (positions - whole)
    return found


def _pluck(voice: InstrumentVoice, hertz: float, time: Floats, rate: int) -> Floats:
    """Compute all periods at once; overtone ``n`` decays in ``decay / (1 + n * damping)``."""
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
    return _interpolate(periods, time * hertz * _PERIOD)


def _bar(voice: InstrumentVoice, hertz: float, time: Floats, rate: int) -> Floats:
    samples = np.zeros(len(time))
    decay = voice.decay * (523 / hertz) ** 0.5
    for ratio, strength, decay_ratio in voice.partials:
        if hertz * ratio < 0.45 * rate:
            wave = np.sin(2 * np.pi * hertz * ratio * time)
            samples += 1.5 * strength * wave * np.exp(-time / (decay * decay_ratio))
    return samples


# --- Drums ---------------------------------------------------------------------------------------

_NAMES: Final = {pitch: name for name, pitch in DRUMS.items()}
_SECONDS: Final = {"crash": 1.6, "ride": 0.7, "open-hat": 0.35, "kick": 0.4, "low-tom": 0.45}
_NOISE_BURSTS: Final = {
    # Lowest frequency in Hz, decay in seconds, strength.
    "snare": (1200.0, 0.055, 0.55),
    "clap": (900.0, 0.06, 0.6),
    "hat": (6500.0, 0.018, 0.35),
    "open-hat": (6000.0, 0.09, 0.32),
    "ride": (5000.0, 0.16, 0.16),
    "crash": (3000.0, 0.45, 0.5),
    "shaker": (5000.0, 0.022, 0.25),
}
_TONES: Final = {
    # Initial and final frequency in Hz, decay in seconds, strength.
    "kick": (130.0, 48.0, 0.11, 1.0),
    "snare": (230.0, 180.0, 0.05, 0.45),
    "low-tom": (140.0, 85.0, 0.13, 0.8),
    "high-tom": (210.0, 140.0, 0.10, 0.7),
    "ride": (2600.0, 2600.0, 0.12, 0.05),
}


def _drum(pitch: int, rate: int, *, low: bool) -> Mono:
    """Compute one stroke; ``low``, for the electronic kit, is lower and longer."""
    name = _NAMES[pitch]
    count = round(_SECONDS.get(name, 0.28) * (1.2 if low else 1) * rate)
    time = np.arange(count) / rate
    samples = np.zeros(count)
    if name in _TONES:
        top, bottom, decay, strength = _TONES[name]
        factor = 0.85 if low else 1.0
        falling = factor * (bottom + (top - bottom) * np.exp(-time / 0.03))
        wave = np.sin(2 * np.pi * np.cumsum(falling) / rate)
        samples += strength * wave * np.exp(-time / (decay / factor))
    if name in _NOISE_BURSTS:
        lowest, decay, strength = _NOISE_BURSTS[name]
        noise = np.fft.rfft(np.random.default_rng(pitch).standard_normal(count))
        hertz = np.fft.rfftfreq(count, 1 / rate)
        noise *= 1 / (1 + (lowest / np.maximum(hertz, 1)) ** 4)
        burst = np.fft.irfft(noise, count) * np.exp(-time / decay)
        if name == "clap":
            burst *= 0.4 + 0.6 * (np.sin(2 * np.pi * 45 * np.minimum(time, 0.033)) ** 2)
        samples += strength * burst
    attack = round(0.0015 * rate)
    samples[:attack] *= _fade_in(attack)
    fade = count // 4
    samples[-fade:] *= _fade_in(fade)[::-1]
    return samples.astype(np.float32)

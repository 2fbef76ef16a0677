"""Renders pieces: notes to stereo samples, bar by bar, with reverb and a limiter.

A bar can be rendered as soon as it is complete; what rings on is mixed into later bars. The samples
do not depend on how many bars are rendered at a time, or on other pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from workers.engines.music.instruments import Bank
from workers.engines.music.midi import velocity
from workers.engines.music.notes import DRUMS, METRES, Bar, Note, Part, Piece

Stereo = npt.NDArray[np.float32]
"""``(samples, 2)``, from -1 to 1."""

_LEVELS: Final[dict[Part, float]] = {"lead": 0.155, "chords": 0.062, "bass": 0.15, "drums": 0.36}
_PANNING: Final[dict[Part, float]] = {"lead": 0.12, "chords": -0.28, "bass": 0.0, "drums": 0.0}
"""Position from -1, left, to 1, right."""
_DRUM_PANNING: Final = {"hat": 0.3, "open-hat": 0.3, "ride": -0.35, "shaker": 0.4, "high-tom": 0.25}
_REVERB: Final[dict[Part, float]] = {"lead": 0.5, "chords": 0.6, "bass": 0.08, "drums": 0.25}
"""Reverb level of each part."""
_REVERB_SECONDS: Final = 1.2
_REVERB_LEVEL: Final = 0.42
_STRUM: Final = 0.011
"""Seconds between the strings of a guitar or harp."""
_KNEE: Final = 0.7
"""Level above which samples are compressed, so that they never reach 1."""
_FADE: Final = 0.05


class Player:
    """Renders one piece. ``head`` has key, tempo and instruments; its bars are ignored."""

    def __init__(self, head: Piece, *, rate: int = 48_000, bank: Bank | None = None) -> None:
        """Players of the same rate may share a ``bank``."""
        self._head = head
        self._rate = rate
        self._bank = bank or Bank(rate)
        assert self._bank.rate == rate
        self._played = 0
        self._tail = np.zeros((0, 3))
        """Samples after the last rendered bar: left, right, reverb input."""
        self._echo = np.zeros((0, 2))
        self._reverb = _reverb(rate)
        self._spectra: dict[int, npt.NDArray[np.complex128]] = {}

    def play(self, bar: Bar) -> Stereo:
        """Render the next bar."""
        start = self._start_of(self._played)
        count = self._start_of(self._played + 1) - start
        sounds = [
            sound for note in bar.notes for sound in self._sounds(note, bar, bar.notes, start)
        ]
        end = max([count, len(self._tail), *(at + len(sound) for at, sound, _ in sounds)])
        mixed = _pad(self._tail, end)
        for at, sound, gains in sounds:
            mixed[at : at + len(sound)] += sound[:, None] * gains
        self._played += 1
        self._tail = mixed[count:]
        return self._add_reverb(mixed[:count])

    def finish(self) -> Stereo:
        """Render what rings on after the last bar, until silence."""
        dry = _pad(self._tail, len(self._tail) + len(self._reverb))
        self._tail, output = np.zeros((0, 3)), self._add_reverb(dry)
        fade = round(_FADE * self._rate)
        output[-fade:] *= np.linspace(1, 0, fade, dtype=np.float32)[:, None] ** 2
        return output

    def _start_of(self, bar: int) -> int:
        return round(bar * self._head.bar_seconds * self._rate)

    def _sounds(
        self, note: Note, bar: Bar, notes: tuple[Note, ...], start: int
    ) -> Iterator[tuple[int, npt.NDArray[np.float32], npt.NDArray[np.float64]]]:
        """Yield position, samples, and gains for left, right and reverb."""
        head, part, rate = self._head, note.part, self._rate
        name = head.instrument(part)
        if name == "none":
            return
        step = head.step_seconds
        at = self._start_of(self._played) - start + round(note.start * step * rate)
        loudness = velocity(bar.loudness, note.start, METRES[head.metre].steps) ** 1.5
        pan = _PANNING[part]
        if part == "drums":
            sound = self._bank.drum(name, note.pitch)
            pan = _DRUM_PANNING.get(_DRUM_NAMES[note.pitch], pan)
        else:
            if part == "chords" and name in ("guitar", "harp"):
                lower = sum(n.part == part and n.start == note.start and n < note for n in notes)
                at += round(lower * _STRUM * rate)
            sound = self._bank.note(name, note.pitch, max(1, round(note.steps * step * rate)))
        angle = (pan + 1) * math.pi / 4
        level = _LEVELS[part] * loudness
        gains = np.array([math.cos(angle), math.sin(angle), _REVERB[part]])
        yield at, sound, level * gains

    def _add_reverb(self, mixed: npt.NDArray[np.float64]) -> Stereo:
        """Add reverb and apply the limiter."""
        count, reverb = len(mixed), self._reverb
        size = 2 ** math.ceil(math.log2(max(2, count + len(reverb))))
        if size not in self._spectra:
            self._spectra = {size: np.fft.rfft(reverb, size, axis=0)}
        reverb_input = np.fft.rfft(mixed[:, 2], size)
        echo = np.fft.irfft(reverb_input[:, None] * self._spectra[size], size, axis=0)
        echo = echo[: count + len(reverb)]
        echo[: len(self._echo)] += self._echo[: len(echo)]
        self._echo = echo[count:]
        return limit(mixed[:, :2] + echo[:count])


_DRUM_NAMES: Final = {pitch: name for name, pitch in DRUMS.items()}


def limit(sound: npt.NDArray[np.float64]) -> Stereo:
    """Compress samples above the knee one by one, so that none reaches 1."""
    size = np.abs(sound)
    over = np.maximum(0, size - _KNEE) / (1 - _KNEE)
    bent = np.minimum(size, _KNEE) + (1 - _KNEE) * np.tanh(over) * 0.999
    return np.asarray(np.copysign(bent, sound), np.float32)


def _reverb(rate: int) -> npt.NDArray[np.float64]:
    """Compute an impulse response: decaying, filtered noise, different on each side."""
    count = round(_REVERB_SECONDS * rate)
    time = np.arange(count) / rate
    noise = np.random.default_rng(1).standard_normal((count, 2))
    spectrum = np.fft.rfft(noise, axis=0)
    hertz = np.fft.rfftfreq(count, 1 / rate)[:, None]
    spectrum *= hertz**2 / (hertz**2 + 200**2) / (1 + (hertz / 4500) ** 2)
    impulse = np.fft.irfft(spectrum, count, axis=0)
    impulse *= (np.exp(-time / 0.22) * np.minimum(1, time / 0.012))[:, None]
    fade = count // 5
    impulse[-fade:] *= np.linspace(1, 0, fade)[:, None]
    return np.asarray(_REVERB_LEVEL * impulse / np.sqrt((impulse**2).sum(0)), np.float64)


def _pad(sound: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    longer = np.zeros((max(count, len(sound)), sound.shape[1]))
    longer[: len(sound)] = sound
    return longer


def render(piece: Piece, *, rate: int = 48_000) -> Stereo:
    """Render a complete piece, with what rings on after it."""
    player = Player(replace(piece, bars=()), rate=rate)
    return np.concatenate([*(player.play(bar) for bar in piece.bars), player.finish()])

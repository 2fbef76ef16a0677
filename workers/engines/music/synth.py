"""Plays pieces: notes to stereo samples, bar by bar, with room around them and nothing too loud.

A bar is heard as soon as it is written: what rings on goes into the bars after it. The samples do
not depend on who asks for how many bars at a time, nor on what else is played.
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

RATES: Final = (44_100, 48_000)
_LEVELS: Final[dict[Part, float]] = {"lead": 0.155, "chords": 0.062, "bass": 0.15, "drums": 0.36}
_PLACES: Final[dict[Part, float]] = {"lead": 0.12, "chords": -0.28, "bass": 0.0, "drums": 0.0}
"""From -1 on the left to 1 on the right."""
_DRUM_PLACES: Final = {"hat": 0.3, "open-hat": 0.3, "ride": -0.35, "shaker": 0.4, "high-tom": 0.25}
_ROOM: Final[dict[Part, float]] = {"lead": 0.5, "chords": 0.6, "bass": 0.08, "drums": 0.25}
"""How much of a part is heard from the walls."""
_ROOM_SECONDS: Final = 1.2
_ROOM_LEVEL: Final = 0.42
_STRUM: Final = 0.011
"""Seconds between the strings of a guitar or harp."""
_KNEE: Final = 0.7
"""Up to here samples stay as they are; above they are bent, and never reach 1."""
_FADE: Final = 0.05


class Player:
    """Plays one piece. ``head`` tells key, tempo and instruments; its bars are not looked at."""

    def __init__(self, head: Piece, *, rate: int = 48_000, bank: Bank | None = None) -> None:
        """A ``bank`` may be shared by players of the same rate."""
        self._head = head
        self._rate = rate
        self._bank = bank or Bank(rate)
        assert self._bank.rate == rate
        self._played = 0
        self._ringing = np.zeros((0, 3))
        """Left, right and what goes into the room, from now on."""
        self._echo = np.zeros((0, 2))
        self._room = _room(rate)
        self._spectra: dict[int, npt.NDArray[np.complex128]] = {}

    def play(self, bar: Bar) -> Stereo:
        """The next bar."""
        start = self._at(self._played)
        count = self._at(self._played + 1) - start
        strokes = [
            stroke for note in bar.notes for stroke in self._strokes(note, bar, bar.notes, start)
        ]
        end = max([count, len(self._ringing), *(at + len(sound) for at, sound, _ in strokes)])
        mixed = _extended(self._ringing, end)
        for at, sound, gains in strokes:
            mixed[at : at + len(sound)] += sound[:, None] * gains
        self._played += 1
        self._ringing = mixed[count:]
        return self._heard(mixed[:count])

    def finish(self) -> Stereo:
        """What rings on after the last bar, until it is silent."""
        dry = _extended(self._ringing, len(self._ringing) + len(self._room))
        self._ringing, heard = np.zeros((0, 3)), self._heard(dry)
        fade = round(_FADE * self._rate)
        heard[-fade:] *= np.linspace(1, 0, fade, dtype=np.float32)[:, None] ** 2
        return heard

    def _at(self, bar: int) -> int:
        return round(bar * self._head.bar_seconds * self._rate)

    def _strokes(
        self, note: Note, bar: Bar, beside: tuple[Note, ...], start: int
    ) -> Iterator[tuple[int, npt.NDArray[np.float32], npt.NDArray[np.float64]]]:
        """When, what, and how loud on the left, on the right and in the room."""
        head, part, rate = self._head, note.part, self._rate
        name = head.instrument(part)
        if name == "none":
            return
        step = head.step_seconds
        at = self._at(self._played) - start + round(note.start * step * rate)
        loud = velocity(bar.loudness, note.start, METRES[head.metre].steps) ** 1.5
        place = _PLACES[part]
        if part == "drums":
            sound = self._bank.drum(name, note.pitch)
            place = _DRUM_PLACES.get(_DRUM_NAMES[note.pitch], place)
        else:
            if part == "chords" and name in ("guitar", "harp"):
                lower = sum(n.part == part and n.start == note.start and n < note for n in beside)
                at += round(lower * _STRUM * rate)
            sound = self._bank.note(name, note.pitch, max(1, round(note.steps * step * rate)))
        turn = (place + 1) * math.pi / 4
        level = _LEVELS[part] * loud
        gains = np.array([math.cos(turn), math.sin(turn), _ROOM[part]])
        yield at, sound, level * gains

    def _heard(self, mixed: npt.NDArray[np.float64]) -> Stereo:
        """Add the room's answer, and keep what comes of it below 1."""
        count, room = len(mixed), self._room
        size = 2 ** math.ceil(math.log2(max(2, count + len(room))))
        if size not in self._spectra:
            self._spectra = {size: np.fft.rfft(room, size, axis=0)}
        sent = np.fft.rfft(mixed[:, 2], size)
        echo = np.fft.irfft(sent[:, None] * self._spectra[size], size, axis=0)
        echo = echo[: count + len(room)]
        echo[: len(self._echo)] += self._echo[: len(echo)]
        self._echo = echo[count:]
        return limit(mixed[:, :2] + echo[:count])


_DRUM_NAMES: Final = {pitch: name for name, pitch in DRUMS.items()}


def limit(sound: npt.NDArray[np.float64]) -> Stereo:
    """Bend what is louder than the knee, sample by sample, so that nothing reaches 1."""
    size = np.abs(sound)
    over = np.maximum(0, size - _KNEE) / (1 - _KNEE)
    bent = np.minimum(size, _KNEE) + (1 - _KNEE) * np.tanh(over) * 0.999
    return np.asarray(np.copysign(bent, sound), np.float32)


def _room(rate: int) -> npt.NDArray[np.float64]:
    """How a room answers to a clap: noise that dies away, darker and another on each side."""
    count = round(_ROOM_SECONDS * rate)
    time = np.arange(count) / rate
    noise = np.random.default_rng(1).standard_normal((count, 2))
    spectrum = np.fft.rfft(noise, axis=0)
    hertz = np.fft.rfftfreq(count, 1 / rate)[:, None]
    spectrum *= hertz**2 / (hertz**2 + 200**2) / (1 + (hertz / 4500) ** 2)
    answer = np.fft.irfft(spectrum, count, axis=0)
    answer *= (np.exp(-time / 0.22) * np.minimum(1, time / 0.012))[:, None]
    fade = count // 5
    answer[-fade:] *= np.linspace(1, 0, fade)[:, None]
    return np.asarray(_ROOM_LEVEL * answer / np.sqrt((answer**2).sum(0)), np.float64)


def _extended(sound: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    longer = np.zeros((max(count, len(sound)), sound.shape[1]))
    longer[: len(sound)] = sound
    return longer


def render(piece: Piece, *, rate: int = 48_000) -> Stereo:
    """Play a whole piece, with what rings on after it."""
    player = Player(replace(piece, bars=()), rate=rate)
    return np.concatenate([*(player.play(bar) for bar in piece.bars), player.finish()])

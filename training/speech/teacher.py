"""The teacher of the pocket speech model: espeak-ng, which also reports phonemes and their times.

Used only to make samples and to compare with; nothing of it is shipped. Its library and data come
with the package ``espeakng-loader`` (extra ``train``). Its voices are not used: each voice here is
a ``VoiceSettings``, written as an espeak-ng variant file.
"""

from __future__ import annotations

import ctypes
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import espeakng_loader
import numpy as np
import numpy.typing as npt

RATE: Final = 22_050
ACCENT: Final = "en-us"
_EVENT_WORD: Final = 1
_EVENT_PHONEME: Final = 7
_PAUSES: Final = ("_:", "_", "_!", "_|", "||", "_::")
_FORMANTS: Final = 6


@dataclass(frozen=True, slots=True)
class VoiceSettings:
    """Settings of a voice. Formants are in percent of espeak-ng's defaults."""

    pitch: int
    """Lowest pitch, in Hz."""
    span: int
    """Difference between the highest and the lowest pitch, in Hz."""
    places: tuple[int, ...] = (100,) * _FORMANTS
    heights: tuple[int, ...] = (100,) * _FORMANTS
    widths: tuple[int, ...] = (100,) * _FORMANTS
    speed: int = 100
    flutter: int = 2
    breath: int = 0
    klatt: int = 0
    """Klatt synthesiser: 0 for none, or 1 to 5."""

    def variant(self) -> str:
        lines = ["language variant", f"pitch {self.pitch} {self.pitch + self.span}"]
        rows = zip(self.places, self.heights, self.widths, strict=True)
        lines += [f"formant {i} {a} {b} {c}" for i, (a, b, c) in enumerate(rows)]
        lines += [f"speed {self.speed}", f"flutter {self.flutter}"]
        if self.klatt:
            lines.append(f"klatt {self.klatt}")
        if self.breath:
            lines += [f"breath 0 {self.breath} {self.breath} {self.breath // 2}", "breathw 150 150"]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class TeacherSpeech:
    """Synthesised speech ``(N,)`` float32, and its phonemes with the samples where they start."""

    samples: npt.NDArray[np.float32]
    sounds: tuple[tuple[str, int], ...]
    """Phonemes: ``_`` is a pause, and a stressed phoneme begins with ``'`` or ``,``."""
    words: tuple[int, ...] = ()
    """For each phoneme, the position in the text of its word. Small words belong to the next."""


def choose_voice(r: random.Random) -> VoiceSettings:
    """Choose a random voice, from deep and slow to high and quick."""
    pitch = round(68 * (235 / 68) ** r.random())
    size = 92 + 22 * (pitch - 68) / (235 - 68) + r.gauss(0, 5)
    places = tuple(round(min(125, max(84, size + r.gauss(0, 2.5)))) for _ in range(_FORMANTS))
    tilt = r.uniform(-1, 1)
    heights = tuple(
        round(min(150, max(50, 100 + tilt * (8 * i - 14) + r.gauss(0, 9))))
        for i in range(_FORMANTS)
    )
    widths = tuple(round(r.uniform(80, 140)) for _ in range(_FORMANTS))
    return VoiceSettings(
        pitch=pitch,
        span=round(pitch * r.uniform(0.2, 0.65)),
        places=places,
        heights=heights,
        widths=widths,
        speed=round(r.uniform(88, 108)),
        flutter=r.choice((0, 2, 2, 4)),
        klatt=(klatt := r.choice((0, 2, 4, 4))),
        # Without a Klatt synthesiser, breath would drown out the voice.
        breath=r.choice((0, 0, 0, 10, 25)) if klatt else 0,
    )


class _Id(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _Id),
    )


_Callback: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


class Teacher:
    """The espeak-ng library; only one instance per process is possible.

    Raise ``RuntimeError`` if the library cannot be used.
    """

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="teacher-")
        self._voices = _own_data(Path(self._home.name)) / "voices" / "!v"
        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        place = str(Path(self._home.name)).encode()
        rate = self._library.espeak_Initialize(2, 0, place, 1)
        if rate != RATE:
            raise RuntimeError(f"espeak-ng synthesises at {rate} Hz; expected {RATE}")
        self._parts: list[npt.NDArray[np.int16]] = []
        self._sounds: list[tuple[str, int]] = []
        self._words: list[int] = []
        self._begun = 0
        self._callback = _Callback(self._take)
        self._library.espeak_SetSynthCallback(self._callback)
        self._known: dict[VoiceSettings | None, str] = {}
        self._now: str | None = None

    def say(self, text: str, manner: VoiceSettings | None = None) -> TeacherSpeech:
        """Synthesise a text, by default in the library's own voice."""
        if manner not in self._known:
            name = f"own{len(self._known)}"
            if manner is not None:
                (self._voices / name).write_text(manner.variant())
            self._known[manner] = f"{ACCENT}+{name}" if manner else ACCENT
        voice = self._known[manner]
        if voice != self._now:
            if self._library.espeak_SetVoiceByName(voice.encode()):
                raise RuntimeError(f"espeak-ng has no voice {voice}")
            self._now = voice
        self._parts, self._sounds, self._words, self._begun = [], [], [], 0
        data = text.encode()
        self._library.espeak_Synth(data, len(data) + 1, 0, 1, 0, 1, None, None)
        if not self._parts:
            return TeacherSpeech(np.zeros(0, np.float32), ())
        samples = np.concatenate(self._parts).astype(np.float32) / np.float32(32768)
        return TeacherSpeech(samples, tuple(self._sounds), tuple(self._words))

    def _take(self, samples: Any, count: int, events: Any) -> int:
        if samples and count:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        place = 0
        while events[place].type:
            if events[place].type == _EVENT_PHONEME:
                name = events[place].id.string.decode()
                self._sounds.append(("_" if name in _PAUSES else name, events[place].sample))
                self._words.append(self._begun)
            if events[place].type == _EVENT_WORD:
                self._begun = events[place].text_position - 1
            place += 1
        return 0


def _own_data(home: Path) -> Path:
    """Link the library's data into a directory to which voices can be added."""
    data = home / "espeak-ng-data"
    (data / "voices" / "!v").mkdir(parents=True)
    for one in Path(espeakng_loader.get_data_path()).iterdir():
        if one.name != "voices":
            (data / one.name).symlink_to(one)
    return data

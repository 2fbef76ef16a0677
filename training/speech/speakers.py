"""The voices of ``pocket-speech``, as the teacher's settings."""

from __future__ import annotations

from typing import Final

from training.speech.teacher import VoiceSettings


def _manner(
    pitch: int,
    span: int,
    size: int,
    tilt: int,
    *,
    klatt: int = 4,
    speed: int = 100,
    breath: int = 0,
) -> VoiceSettings:
    """``size`` scales the formants in percent: larger is a shorter vocal tract. A positive ``tilt``
    makes the voice brighter."""
    return VoiceSettings(
        pitch=pitch,
        span=span,
        places=(size,) * 6,
        heights=tuple(100 + tilt * (step - 2) for step in range(6)),
        klatt=klatt,
        speed=speed,
        breath=breath,
    )


SPEAKERS: Final = {
    "ada": _manner(175, 85, 111, 0, speed=96),
    "bram": _manner(88, 40, 96, 3),
    "cora": _manner(155, 60, 107, 6, klatt=2),
    "dion": _manner(112, 50, 101, -4),
    "edda": _manner(205, 90, 115, 0, speed=94),
    "finn": _manner(132, 75, 104, 7, klatt=2, speed=98),
    "ines": _manner(190, 60, 109, -6, klatt=0, speed=94),
    "ivo": _manner(74, 28, 93, 0, speed=98),
    "kurt": _manner(102, 34, 95, 8, klatt=0),
    "lena": _manner(225, 110, 117, 4, speed=92),
    "mira": _manner(148, 85, 104, -3, klatt=4, breath=25),
    "otto": _manner(84, 50, 101, -8, klatt=2),
}

"""Translates payloads of speech, voice cloning and music for models that run here. Pure.

Most client code was written for MiniMax's models and also sends fields at their defaults. So values
without an effect are accepted; values that would change the audio, but are not supported, are
refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.catalog.schema import CatalogEntry
from gateway.errors import InvalidRequest
from workers.contract.languages import tag_of

_SPEECH: Final[Mapping[str, tuple[str, ...]]] = {
    "text": ("text", "prompt"),
    "voice": ("voice", "voice_id"),
    "recording": ("recording", "source_audio", "reference_audio"),
    "transcript": ("transcript",),
    "language": ("language", "language_boost", "language_code"),
    "speed": ("speed",),
    "instructions": ("instructions",),
}
_MUSIC: Final[Mapping[str, tuple[str, ...]]] = {
    "prompt": ("prompt",),
    "lyrics": ("lyrics",),
    "key": ("key",),
    "tempo": ("tempo", "bpm"),
    "mood": ("mood",),
    "seconds": ("seconds", "duration", "length"),
}
_BOTH: Final[Mapping[str, tuple[str, ...]]] = {
    "format": ("format", "output_format", "audio_format"),
    "sample_rate": ("sample_rate", "audio_sample_rate"),
    "bitrate": ("bitrate",),
    "seed": ("seed",),
}
_NO: Final = (False, 0, "", "none", "false", "0")
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "vol": (1, "1", "1.0"),
    "pitch": _NO,
    "emotion": ("", "auto", "neutral"),
    "vm_pitch": _NO,
    "intensity": _NO,
    "timbre": _NO,
    "sound_effects": _NO,
    "channel": (1, "1"),
    "need_noise_reduction": _NO,
    # MiniMax's own spelling, and the correct one that some clients send.
    "need_volumn_normalization": _NO,
    "need_volume_normalization": _NO,
    "aigc_watermark": _NO,
    "stream": _NO,
    "voice_id": ("",),
    "language_boost": ("", "auto"),
    "seed": (-1, "-1"),
    # Without lyrics, models here do not sing anyway.
    "is_instrumental": (True, False, "true", "false"),
}
"""Values without an effect; fields with them are dropped, any other value is refused."""
_SECTIONS: Final = re.compile(r"(\s*\[[^\]\n]*\])*\s*")
"""Lyrics that consist of section marks only."""


def spellings(entry: CatalogEntry) -> Mapping[str, str]:
    """Map every accepted key to our field."""
    fields = {**(_MUSIC if entry.task == "text-to-music" else _SPEECH), **_BOTH}
    return {key: ours for ours, keys in fields.items() for key in keys}


def read_audio(
    entry: CatalogEntry, payload: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return the input under our names, and the client's keys. Raise ``InvalidRequest``."""
    known = spellings(entry)
    given: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in payload.items():
        ours = known.get(key)
        if value is None or _is_neutral(key, value):
            continue
        if ours is None:
            raise _unknown(entry, key, value, known)
        if ours in given:
            raise InvalidRequest(
                "invalid_value",
                f"{names[ours]} and {key} are synonyms; send one of them.",
                param=key,
            )
        names[ours], given[ours] = key, value
    if "recording" in given and names.get("voice") == "voice_id":
        # GMI's name for the stored clone; here the clone is used once and not stored.
        del given["voice"]
    if isinstance(language := given.get("language"), str):
        given["language"] = tag_of(language)
    return given, names


def _is_neutral(key: str, value: Any) -> bool:
    if key == "lyrics":
        return isinstance(value, str) and _SECTIONS.fullmatch(value) is not None
    return value in _NEUTRAL.get(key, ())


def _unknown(entry: CatalogEntry, key: str, value: Any, known: Mapping[str, str]) -> InvalidRequest:
    if key in _NEUTRAL:
        return InvalidRequest(
            "unsupported_parameter",
            f"{key} is {value!r}, which {entry.name} does not support; leave it out.",
            param=key,
        )
    return InvalidRequest(
        "unknown_parameter",
        f"Unknown parameter: {key}. {entry.name} accepts {', '.join(known)}.",
        param=key,
    )

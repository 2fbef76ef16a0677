"""What a payload of speech, of a cloned voice or of music means to a model that runs here. Pure.

Most of such code was written for MiniMax's models, whose payloads also say what is as it always is.
So what has no effect is taken; what would change what is heard, and no model here does, is refused
by its name.
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
    # Over there it is written wrong, and by some right.
    "need_volumn_normalization": _NO,
    "need_volume_normalization": _NO,
    "aigc_watermark": _NO,
    "stream": _NO,
    "voice_id": ("",),
    "language_boost": ("", "auto"),
    "seed": (-1, "-1"),
    # No model here sings without lyrics.
    "is_instrumental": (True, False, "true", "false"),
}
"""What is taken as long as it says nothing, and then left out."""
_SECTIONS: Final = re.compile(r"(\s*\[[^\]\n]*\])*\s*")
"""Lyrics that say where something is played, and nothing to be sung."""


def spellings(entry: CatalogEntry) -> Mapping[str, str]:
    """Every key that is understood, and which field of ours it is."""
    fields = {**(_MUSIC if entry.task == "text-to-music" else _SPEECH), **_BOTH}
    return {key: ours for ours, keys in fields.items() for key in keys}


def read_audio(
    entry: CatalogEntry, payload: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Give the input under our names, and how its fields were called. Raise ``InvalidRequest``."""
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
                f"{names[ours]} and {key} mean the same; send one of them.",
                param=key,
            )
        names[ours], given[ours] = key, value
    if "recording" in given and names.get("voice") == "voice_id":
        # What the clone is to be called over there; here it is spoken in, and not kept.
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
            f"{key} is {value!r}, which {entry.name} cannot do; leave it out.",
            param=key,
        )
    return InvalidRequest(
        "unknown_parameter",
        f"Unknown parameter: {key}. {entry.name} knows {', '.join(known)}.",
        param=key,
    )

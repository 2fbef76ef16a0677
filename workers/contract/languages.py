"""Names of languages, for APIs that use names instead of tags. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NAMES: Final[Mapping[str, str]] = {
    "af": "Afrikaans",
    "ar": "Arabic",
    "bg": "Bulgarian",
    "ca": "Catalan",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fil": "Filipino",
    "fr": "French",
    "he": "Hebrew",
    "hi": "Hindi",
    "hr": "Croatian",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "ms": "Malay",
    "nb": "Norwegian",
    "nl": "Dutch",
    "nn": "Nynorsk",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sv": "Swedish",
    "ta": "Tamil",
    "th": "Thai",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "vi": "Vietnamese",
    "yue": "Chinese,Yue",
    "zh": "Chinese",
}
"""Name of each language in MiniMax's ``language_boost``, by tag."""
_TAGS: Final = {name.lower(): tag for tag, name in NAMES.items()}


def tag_of(name: str) -> str:
    """Return the tag of a language name; an unknown name is returned as it is."""
    return _TAGS.get(name.lower(), name)


def name_of(tag: str) -> str | None:
    """Return the name of a tag's language, ignoring the region."""
    return NAMES.get(tag.replace("_", "-").partition("-")[0].lower())

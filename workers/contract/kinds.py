"""Detects the type of a file by its first bytes alone. Pure.

A closed list: other types are neither accepted nor served as something that a browser would
execute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workers.contract.media import MediumKind

HEAD_BYTES: Final = 64
"""Number of bytes needed to detect a type."""

EXTENSIONS: Final[Mapping[str, str]] = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/webp": "webp",
    "image/gif": "gif",
    "video/mp4": "mp4",
    "video/quicktime": "mov",
    "video/webm": "webm",
    "audio/wav": "wav",
    "audio/mpeg": "mp3",
    "audio/flac": "flac",
    "audio/ogg": "ogg",
    "audio/mp4": "m4a",
    "audio/aac": "aac",
    "audio/pcm": "pcm",
    "audio/basic": "ulaw",
    "audio/pcma": "alaw",
    "audio/midi": "mid",
}
"""File name extension of each type that is accepted or served."""
UNMARKED: Final = frozenset({"audio/pcm", "audio/basic", "audio/pcma", "audio/midi"})
"""Types that are served but not accepted: raw samples cannot be detected, and MIDI contains no
audio."""
_ALSO_SOUND: Final = frozenset({"video/mp4", "video/webm"})
_BY_EXTENSION: Final = {extension: kind for kind, extension in EXTENSIONS.items()}

_PREFIXES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
)
_RIFF: Final = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}


def sniff(head: bytes) -> str | None:
    """Return the type of a file by its first bytes; None if it is not on the list."""
    for prefix, content_type in _PREFIXES:
        if head.startswith(prefix):
            return content_type
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _iso(head[8:12])
    if head[:4] == b"\x1a\x45\xdf\xa3":
        # EBML, of which only WebM is accepted; its document type is near the start.
        return "video/webm" if b"webm" in head else None
    return _mpeg_audio(head[:2])


def kind_of(content_type: str) -> str:
    return content_type.partition("/")[0]


def can_contain(content_type: str, kind: MediumKind) -> bool:
    """Whether a file of this type can contain this kind. Phones and browsers use video containers
    for audio alone, too."""
    return kind_of(content_type) == kind or (kind == "audio" and content_type in _ALSO_SOUND)


def type_of_extension(extension: str) -> str:
    return _BY_EXTENSION.get(extension, "application/octet-stream")


def accepted_types(kind: MediumKind) -> str:
    """Return the accepted types of a kind, for a message to a client."""
    names = (name for name in EXTENSIONS if can_contain(name, kind) and name not in UNMARKED)
    return ", ".join(dict.fromkeys(name.partition("/")[2] for name in names))


def _iso(brand: bytes) -> str | None:
    if brand == b"qt  ":
        return "video/quicktime"
    if brand in (b"M4A ", b"M4B "):
        return "audio/mp4"
    if brand in (b"heic", b"heix", b"avif", b"avis", b"mif1", b"msf1"):
        return None
    return "video/mp4"


def _mpeg_audio(start: bytes) -> str | None:
    """Detect MP3 or AAC. An MPEG frame starts with eleven set bits; the layer tells them apart."""
    if len(start) < 2 or start[0] != 0xFF or start[1] & 0xE0 != 0xE0:
        return None
    layer = start[1] >> 1 & 3
    if layer == 0:
        return "audio/aac" if start[1] & 0xF6 == 0xF0 else None
    return "audio/mpeg"

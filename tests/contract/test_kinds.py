"""The type of a file is detected by its first bytes."""

from __future__ import annotations

import pytest

from tests.artist import mp4, png
from workers.contract.kinds import EXTENSIONS, HEAD_BYTES, UNMARKED, sniff, type_of_extension

HEADS = {
    "image/png": png(1, 1),
    "image/jpeg": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "image/webp": b"RIFF\x10\0\0\0WEBPVP8 ",
    "image/gif": b"GIF89a",
    "video/mp4": mp4(),
    "video/quicktime": b"\0\0\0\x14ftypqt  ",
    "video/webm": b"\x1a\x45\xdf\xa3\x9fB\x86\x81\x01B\x82\x84webm",
    "audio/wav": b"RIFF\x10\0\0\0WAVEfmt ",
    "audio/mpeg": b"\xff\xfb\x90\x00",
    "audio/flac": b"fLaC\0\0\0",
    "audio/ogg": b"OggS\0\x02",
    "audio/mp4": b"\0\0\0\x20ftypM4A ",
    "audio/aac": b"\xff\xf1\x50\x80",
}


def test_every_accepted_type_is_detected() -> None:
    assert {name: sniff(head[:HEAD_BYTES]) for name, head in HEADS.items()} == {
        name: name for name in EXTENSIONS if name not in UNMARKED
    }
    assert [type_of_extension(extension) for extension in EXTENSIONS.values()] == list(EXTENSIONS)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x89PNG",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<!doctype html>",
        b"%PDF-1.7",
        b"MZ\x90\0",
        b"RIFF\x10\0\0\0AVI ",
        b"\0\0\0\x20ftypheic",
        b"\x1a\x45\xdf\xa3matroska",
        b"\xff\xe0\0\0",
    ],
)
def test_other_types_are_not_detected(head: bytes) -> None:
    assert sniff(head) is None

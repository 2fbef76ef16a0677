"""Reads the duration of a recording from its container, without decoding it. Pure.

A duration bounds what is held for a request; a worker decodes the recording, refuses one that is
longer than stated, and measures it. So a false header costs its sender a refusal, and nobody money.
"""

from __future__ import annotations

import io
import struct
from typing import Final

from workers.contract.kinds import HEAD_BYTES, sniff

_PART: Final = 64 * 1024
_ATOMS_MAX: Final = 1000
_MP3_RATES: Final = (44_100, 48_000, 32_000)
_MP3_KBITS: Final = {
    # Bit rates by version 1 or 2 and layer.
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_AAC_RATES: Final = (
    *(96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000),
    *(22_050, 16_000, 12_000, 11_025, 8_000, 7_350),
)


def duration_ms(file: io.RawIOBase, size: int) -> int | None:
    """Return the duration that a recording states, in milliseconds rounded up; None if it states
    none, or cannot be read. Reads a few kilobytes, but all frames of MP3 and AAC."""
    readers = {
        "audio/wav": _wav,
        "audio/flac": _flac,
        "audio/ogg": _ogg,
        "audio/mpeg": _mp3,
        "audio/aac": _aac,
        "audio/mp4": _mp4,
        "video/mp4": _mp4,
        "video/webm": _webm,
    }
    read = readers.get(sniff(_at(file, 0, HEAD_BYTES)) or "")
    try:
        found = read(file, size) if read else None
    except (struct.error, IndexError, ZeroDivisionError, KeyError):
        return None
    if found is None:
        return None
    count, rate = found
    return -(-count * 1000 // rate) if count > 0 and rate > 0 else None


def _at(file: io.RawIOBase, start: int, count: int) -> bytes:
    file.seek(start)
    parts = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _wav(file: io.RawIOBase, size: int) -> tuple[int, int] | None:
    place, rate, block = 12, 0, 0
    for _ in range(_ATOMS_MAX):
        name, length = struct.unpack("<4sI", _at(file, place, 8))
        if name == b"fmt ":
            _, _, rate, _, block = struct.unpack("<HHIIH", _at(file, place + 8, 14))
        elif name == b"data":
            # A saved stream states the largest length, or none.
            return min(length or size, size - place - 8) // block, rate
        place += 8 + length + length % 2
    return None


def _flac(file: io.RawIOBase, size: int) -> tuple[int, int] | None:
    packed = int.from_bytes(_at(file, 18, 8), "big")
    return packed & ((1 << 36) - 1), packed >> 44


def _ogg(file: io.RawIOBase, size: int) -> tuple[int, int] | None:
    head = _at(file, 0, 512)
    is_opus = (opus := head.find(b"OpusHead")) >= 0
    vorbis = head.find(b"\x01vorbis")
    if is_opus:
        rate, skipped = 48_000, int.from_bytes(head[opus + 10 : opus + 12], "little")
    elif vorbis >= 0:
        rate, skipped = int.from_bytes(head[vorbis + 12 : vorbis + 16], "little"), 0
    else:
        return None
    tail = _at(file, max(0, size - _PART), _PART)
    last = tail.rfind(b"OggS")
    if last < 0:
        return None
    samples = int.from_bytes(tail[last + 6 : last + 14], "little", signed=True)
    return samples - skipped, rate


def _mp3(file: io.RawIOBase, size: int) -> tuple[int, int] | None:
    head = _at(file, 0, 10)
    place = 0
    if head[:3] == b"ID3":
        place = 10 + sum(
            (byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True)
        )
    data = _at(file, place, size - place)
    samples = rate = at = 0
    while at + 4 <= len(data):
        frame = _mp3_frame(data[at : at + 4])
        if frame is None:
            at = data.find(b"\xff", at + 1)
            if at < 0:
                break
            continue
        length, own, rate = frame
        samples += own
        at += length
    return samples, rate


def _mp3_frame(head: bytes) -> tuple[int, int, int] | None:
    """Return a frame's length in bytes, its samples and its rate."""
    word = int.from_bytes(head, "big")
    if word >> 21 != 0x7FF:
        return None
    version, layer = word >> 19 & 3, 4 - (word >> 17 & 3)
    bits, which, padding = word >> 12 & 15, word >> 10 & 3, word >> 9 & 1
    if version == 1 or layer == 4 or bits in (0, 15) or which == 3:
        return None
    first = 1 if version == 3 else 2
    rate = _MP3_RATES[which] // {3: 1, 2: 2, 0: 4}[version]
    kbits = _MP3_KBITS[first, layer][bits - 1]
    if layer == 1:
        return (12 * kbits * 1000 // rate + padding) * 4, 384, rate
    samples = 576 if layer == 3 and first == 2 else 1152
    return samples // 8 * kbits * 1000 // rate + padding, samples, rate


def _aac(file: io.RawIOBase, size: int) -> tuple[int, int] | None:
    data = _at(file, 0, size)
    frames = rate = at = 0
    while at + 7 <= len(data) and data[at] == 0xFF and data[at + 1] & 0xF6 == 0xF0:
        rate = _AAC_RATES[data[at + 2] >> 2 & 15]
        length = (data[at + 3] & 3) << 11 | data[at + 4] << 3 | data[at + 5] >> 5
        frames += 1 + (data[at + 6] & 3)
        at += max(7, length)
    return frames * 1024, rate


def _mp4(file: io.RawIOBase, size: int) -> tuple[int, int] | None:
    place, end = 0, size
    for _ in range(_ATOMS_MAX):
        length, name = struct.unpack(">I4s", _at(file, place, 8))
        header = 8
        if length == 1:
            (length,) = struct.unpack(">Q", _at(file, place + 8, 8))
            header = 16
        length = length or end - place
        if name == b"mvhd":
            body = _at(file, place + header, 32)
            if body[0] == 1:
                rate, count = struct.unpack(">IQ", body[20:32])
            else:
                rate, count = struct.unpack(">II", body[12:20])
            return count, rate
        place += header if name == b"moov" else max(length, 8)
        if place >= end:
            return None
    return None


def _webm(file: io.RawIOBase, size: int) -> tuple[int, int] | None:
    """Find the duration in the first part of the file; a saved stream has none."""
    data = _at(file, 0, _PART)
    info = data.find(b"\x15\x49\xa9\x66")
    place = data.find(b"\x44\x89", info) if info >= 0 else -1
    if place < 0:
        return None
    scale, at = 1_000_000, data.find(b"\x2a\xd7\xb1", info)
    if 0 <= at < place + 16:
        length = data[at + 3] & 0x7F
        scale = int.from_bytes(data[at + 4 : at + 4 + length], "big")
    width = data[place + 2] & 0x7F
    (count,) = struct.unpack(">f" if width == 4 else ">d", data[place + 3 : place + 3 + width])
    return int(count * scale), 1_000_000_000

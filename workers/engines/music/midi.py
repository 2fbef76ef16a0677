"""Pieces as Standard MIDI Files, and back; files written here are read without loss.

What MIDI cannot express (mood, sections, chords, our names of instruments) is stored as text and
markers, which players display or ignore.
"""

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any, Final

import mido

from workers.engines.music.notes import (
    LOUDNESS,
    METRES,
    MODES,
    PARTS,
    TONICS,
    Bar,
    Chord,
    Key,
    Note,
    Part,
    Piece,
    trim,
)

_TICKS: Final = 480
"""Ticks per quarter."""
_STEP: Final = _TICKS // 4
PROGRAMS: Final = {
    "piano": 0,
    "bells": 9,
    "marimba": 12,
    "organ": 19,
    "guitar": 24,
    "upright": 32,
    "electric": 33,
    "synth-bass": 38,
    "violin": 40,
    "cello": 42,
    "harp": 46,
    "strings": 48,
    "flute": 73,
    "synth": 80,
    "pad": 89,
    "kit": 0,
    "electronic": 25,
}
"""General MIDI programs, from 0; for drums, the kit."""
_CHANNELS: Final[dict[Part, int]] = {"lead": 0, "chords": 1, "bass": 2, "drums": 9}
_TEXT: Final = "mood: "


def velocity(loudness: int, start: int, beat_steps: int) -> float:
    """Compute a velocity from 0 to 1: highest on the bar's first beat, lowest off the beat."""
    accent = 0.12 if start == 0 else 0.05 if start % beat_steps == 0 else 0.0
    return 0.34 + 0.13 * loudness + accent


def write_midi(piece: Piece) -> bytes:
    """Encode a piece as a file of type 1, with a track for each part."""
    metre = METRES[piece.metre]
    file = mido.MidiFile(type=1, ticks_per_beat=_TICKS)
    quarter = piece.tempo * metre.steps / 4
    name = TONICS[piece.key.tonic].capitalize() + ("m" if piece.key.mode == "minor" else "")
    upper, lower = (int(number) for number in piece.metre.split("/"))
    events: list[tuple[int, Any]] = [
        (0, mido.MetaMessage("text", text=f"{_TEXT}{piece.mood}")),
        (0, mido.MetaMessage("set_tempo", tempo=round(60e6 / quarter))),
        (0, mido.MetaMessage("time_signature", numerator=upper, denominator=lower)),
        (0, mido.MetaMessage("key_signature", key=_SHARP_KEYS.get(name, name))),
    ]
    for index, bar in enumerate(piece.bars):
        chords = " ".join(f"{step}={chord.root}-{chord.quality}" for step, chord in bar.chords)
        marker = f"{bar.section} {bar.place} {bar.loudness} {chords}"
        events.append((index * metre.bar * _STEP, mido.MetaMessage("marker", text=marker)))
    file.tracks.append(_track(events, len(piece.bars) * metre.bar * _STEP))
    trimmed = trim(piece.bars, metre.bar)
    for part in PARTS:
        if piece.instrument(part) == "none":
            continue
        file.tracks.append(_part(piece, part, trimmed))
    out = io.BytesIO()
    file.save(file=out)
    return out.getvalue()


_SHARP_KEYS: Final = {"Gbm": "F#m", "Dbm": "C#m", "Abm": "G#m"}
"""Keys that MIDI names with sharps."""
_OUR_KEYS: Final = {key_name: ours for ours, key_name in _SHARP_KEYS.items()}


def _part(piece: Piece, part: Part, trimmed: list[list[tuple[int, Note]]]) -> Any:
    metre, channel = METRES[piece.metre], _CHANNELS[part]
    name = piece.instrument(part)
    events: list[tuple[int, Any]] = [
        (0, mido.MetaMessage("track_name", name=f"{part}: {name}")),
        (0, mido.Message("program_change", channel=channel, program=PROGRAMS[name])),
    ]
    for index, (bar, notes) in enumerate(zip(piece.bars, trimmed, strict=True)):
        for end, note in notes:
            if note.part != part:
                continue
            hardness = round(127 * velocity(bar.loudness, note.start, metre.steps))
            start = (index * metre.bar + note.start) * _STEP
            on = mido.Message("note_on", channel=channel, note=note.pitch, velocity=hardness)
            off = mido.Message("note_off", channel=channel, note=note.pitch, velocity=0)
            events += [(start, on), (end * _STEP, off)]
    return _track(events, len(piece.bars) * metre.bar * _STEP)


def _track(events: list[tuple[int, Any]], end: int) -> Any:
    """Sort events; at the same time, ends of notes come before starts."""
    track, now = mido.MidiTrack(), 0
    for at, message in sorted(events, key=lambda e: (e[0], e[1].type == "note_on")):
        track.append(message.copy(time=at - now))
        now = at
    track.append(mido.MetaMessage("end_of_track", time=max(0, end - now)))
    return track


def read_midi(data: bytes) -> Piece:
    """Decode a file that ``write_midi`` wrote. Raise ``ValueError`` if it is not one."""
    try:
        file = mido.MidiFile(file=io.BytesIO(data))
    except (OSError, EOFError, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"not a readable MIDI file: {error}") from error
    if not file.tracks or file.ticks_per_beat != _TICKS:
        raise ValueError("MIDI file from another program: its grid differs")
    meta: dict[str, Any] = {}
    markers: list[str] = []
    for message in file.tracks[0]:
        if message.type == "marker":
            markers.append(message.text)
        elif message.is_meta:
            meta[message.type] = message
    if not meta.keys() >= {"text", "set_tempo", "time_signature", "key_signature"}:
        raise ValueError("MIDI file from another program: it lacks mood or key")
    signature = meta["time_signature"]
    metre = f"{signature.numerator}/{signature.denominator}"
    if metre not in METRES or not meta["text"].text.startswith(_TEXT):
        raise ValueError(f"MIDI file from another program: {metre}, {meta['text'].text!r}")
    instruments = {"drums": "none"}
    notes: dict[int, list[Note]] = defaultdict(list)
    for track in file.tracks[1:]:
        part, _, name = track[0].name.partition(": ")
        instruments[part] = name
        for bar, note in _notes(track, part, METRES[metre].bar):
            notes[bar].append(note)
    key_name = _OUR_KEYS.get(meta["key_signature"].key, meta["key_signature"].key)
    tonic = TONICS.index(key_name.removesuffix("m").lower())
    return Piece(
        mood=meta["text"].text.removeprefix(_TEXT),
        key=Key(tonic, MODES[key_name.endswith("m")]),
        metre=metre,
        tempo=round(60e6 / meta["set_tempo"].tempo * 4 / METRES[metre].steps),
        lead=instruments["lead"],
        chords=instruments["chords"],
        bass=instruments["bass"],
        drums=instruments["drums"],
        bars=tuple(_bar(marker, notes[index]) for index, marker in enumerate(markers)),
    )


def _notes(track: Any, part: Any, bar_steps: int) -> list[tuple[int, Note]]:
    found: list[tuple[int, Note]] = []
    started: dict[int, int] = {}
    now = 0
    for message in track:
        now += message.time
        if message.type == "note_on":
            started[message.note] = now
        elif message.type == "note_off":
            start = started.pop(message.note)
            bar, step = divmod(start // _STEP, bar_steps)
            found.append((bar, Note(step, part, message.note, (now - start) // _STEP)))
    return found


def _bar(marker: str, notes: list[Note]) -> Bar:
    section, place, loudness, *chords = marker.split()
    assert int(loudness) in LOUDNESS, marker
    named = []
    for one in chords:
        step, _, chord = one.partition("=")
        root, _, quality = chord.partition("-")
        named.append((int(step), Chord(int(root), quality)))
    return Bar(section, int(place), int(loudness), tuple(named), tuple(sorted(notes)))

"""Notes, tokens and MIDI agree; the grammar accepts all valid pieces and nothing else."""

from __future__ import annotations

import io
import random
from dataclasses import replace

import mido
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.music.tunes import tune
from workers.engines.music.midi import read_midi, write_midi
from workers.engines.music.notes import (
    DRUMS,
    END,
    HEADER,
    INSTRUMENTS,
    LENGTHS,
    LOUDNESS,
    METRES,
    MODES,
    MOODS,
    QUALITIES,
    RANGES,
    SECTIONS,
    TEMPOS,
    TOKENS,
    Bar,
    Chord,
    Grammar,
    Key,
    Note,
    Part,
    Piece,
    decode,
    encode,
    trim,
)

keys = st.builds(Key, st.integers(0, 11), st.sampled_from(MODES))


@st.composite
def bars(draw: st.DrawFn, *, steps: int, key: Key, drums: bool) -> Bar:
    section = draw(st.sampled_from(sorted(SECTIONS)))
    chord = st.builds(Chord, st.integers(0, 11), st.sampled_from(sorted(QUALITIES)))
    later = draw(st.sets(st.integers(1, steps - 1), max_size=2))
    notes: list[Note] = []
    parts: tuple[tuple[Part, int], ...] = (("lead", 1), ("chords", 4), ("bass", 1))
    for part, voices in parts:
        for start in draw(st.sets(st.integers(0, steps - 1), max_size=5)):
            length = draw(st.sampled_from(LENGTHS))
            pitches = st.sets(st.sampled_from(RANGES[part]), min_size=1, max_size=voices)
            notes += [Note(start, part, pitch + key.shift, length) for pitch in draw(pitches)]
    if drums:
        struck = st.tuples(st.integers(0, steps - 1), st.sampled_from(sorted(DRUMS.values())))
        notes += [Note(start, "drums", drum, 1) for start, drum in draw(st.sets(struck))]
    return Bar(
        section,
        draw(st.integers(1, SECTIONS[section])),
        draw(st.sampled_from(LOUDNESS)),
        tuple((start, draw(chord)) for start in (0, *sorted(later))),
        tuple(sorted(notes)),
    )


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    key, metre = draw(keys), draw(st.sampled_from(sorted(METRES)))
    drums = draw(st.sampled_from(INSTRUMENTS["drums"]))
    bar = bars(steps=METRES[metre].bar, key=key, drums=drums != "none")
    return Piece(
        draw(st.sampled_from(MOODS)),
        key,
        metre,
        draw(st.sampled_from(TEMPOS)),
        draw(st.sampled_from(INSTRUMENTS["lead"])),
        draw(st.sampled_from(INSTRUMENTS["chords"])),
        draw(st.sampled_from(INSTRUMENTS["bass"])),
        drums,
        tuple(draw(st.lists(bar, min_size=1, max_size=4))),
    )


def trimmed(piece: Piece) -> Piece:
    """With every note as long as it sounds."""
    steps = METRES[piece.metre].bar
    made = [
        replace(bar, notes=tuple(n._replace(steps=end - index * steps - n.start) for end, n in now))
        for index, (bar, now) in enumerate(zip(piece.bars, trim(piece.bars, steps), strict=True))
    ]
    return replace(piece, bars=tuple(made))


@settings(max_examples=60, deadline=None)
@given(pieces())
def test_tokens_encode_a_piece_without_loss(piece: Piece) -> None:
    assert decode(encode(piece)) == piece


@settings(max_examples=60, deadline=None)
@given(pieces())
def test_midi_file_encodes_a_piece_without_loss(piece: Piece) -> None:
    assert read_midi(write_midi(piece)) == trimmed(piece)


@settings(max_examples=40, deadline=None)
@given(pieces())
def test_grammar_accepts_every_piece(piece: Piece) -> None:
    grammar = Grammar()

    for said in encode(piece)[1:]:
        assert said in grammar.allowed()
        grammar.push(said)

    assert grammar.allowed() == ()


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_everything_the_grammar_accepts_is_a_piece(r: random.Random) -> None:
    grammar, said = Grammar(), ["<tune>"]
    while allowed := grammar.allowed():
        enough = len(said) > 150 and END in allowed
        said.append(END if enough else r.choice(allowed))
        grammar.push(said[-1])

    piece = decode(said)

    assert encode(piece) == said


def test_keys_differ_in_nothing_but_the_tonic() -> None:
    piece = tune(random.Random(3))
    up = replace(piece, key=Key((piece.key.tonic + 1) % 12, piece.key.mode))
    moved = decode([*encode(piece)[:3], encode(up)[3], *encode(piece)[4:]])

    assert len(set(TOKENS)) == len(TOKENS)
    assert encode(piece)[len(HEADER) + 1 :] == encode(moved)[len(HEADER) + 1 :]
    shift = moved.key.shift - piece.key.shift
    for bar, other in zip(piece.bars, moved.bars, strict=True):
        for note, same in zip(bar.notes, other.notes, strict=True):
            assert same.pitch - note.pitch == (0 if note.part == "drums" else shift)


@pytest.mark.parametrize(
    "said",
    [
        [],
        ["<tune>", "<end>"],
        ["<tune>", *encode(tune(random.Random(1)))[1:3], "<end>"],
        [*encode(tune(random.Random(1)))[:-1], "<nothing>", "<end>"],
    ],
)
def test_invalid_token_sequences_are_refused(said: list[str]) -> None:
    with pytest.raises(ValueError):
        decode(said)


def test_note_without_a_token_is_refused() -> None:
    piece = tune(random.Random(1))
    strange = (*piece.bars[0].notes, Note(1, "lead", 120, 4))

    with pytest.raises(ValueError, match="there is no token"):
        encode(replace(piece, bars=(replace(piece.bars[0], notes=strange),)))


def test_a_sequencer_finds_tempo_metre_key_and_instruments() -> None:
    piece = replace(
        tune(random.Random(2), mood="sad"), metre="3/4", tempo=90, key=Key(9, "minor"), bars=()
    )
    file = mido.MidiFile(file=io.BytesIO(write_midi(piece)))

    said = {message.type: message for message in file.tracks[0]}
    assert mido.tempo2bpm(said["set_tempo"].tempo) == pytest.approx(90)
    assert (said["time_signature"].numerator, said["time_signature"].denominator) == (3, 4)
    assert said["key_signature"].key == "Am"


def test_a_midi_file_lasts_as_long_as_its_piece() -> None:
    for seed in range(10):
        piece = tune(random.Random(seed))
        file = mido.MidiFile(file=io.BytesIO(write_midi(piece)))

        assert file.length == pytest.approx(piece.bar_seconds * len(piece.bars), rel=1e-4)


@pytest.mark.parametrize("data", [b"", b"MThd", b"RIFF" + bytes(40), bytes(100)])
def test_invalid_midi_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_midi(data)


def test_midi_file_from_another_program_is_refused() -> None:
    out = io.BytesIO()
    mido.MidiFile(type=1, ticks_per_beat=480).save(file=out)

    with pytest.raises(ValueError, match="from another program"):
        read_midi(out.getvalue())

"""The synthesiser: in tune, in time, bar by bar, without clicks or clipping."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from training.music.music_analysis import chroma, fits, is_near, keys_of, tempo_of
from training.music.tunes import tune
from workers.engines.music.instruments import VOICES, Bank, frequency
from workers.engines.music.notes import DRUMS, INSTRUMENTS, Bar, Chord, Key, Note, Piece
from workers.engines.music.synth import Player, limit, render

RATE = 44_100
HEAD = Piece("calm", Key(0, "major"), "4/4", 120, "piano", "strings", "upright", "kit", ())


def bar(*notes: Note, loudness: int = 2) -> Bar:
    return Bar("a", 1, loudness, ((0, Chord(0, "maj")),), tuple(sorted(notes)))


def hertz_of(sound: np.ndarray, rate: int, *, near: float) -> float:
    """The strongest frequency within a fifth of another."""
    size = 1 << 18
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound)), size))
    hertz = np.fft.rfftfreq(size, 1 / rate)
    inside = (hertz > near / 1.5) & (hertz < near * 1.5)
    return float(hertz[inside][spectrum[inside].argmax()])


@pytest.mark.parametrize("name", sorted(VOICES))
@pytest.mark.parametrize("pitch", [40, 69])
def test_every_instrument_is_in_tune(name: str, pitch: int) -> None:
    sound = Bank(RATE).note(name, pitch, RATE)

    wanted = frequency(pitch)
    assert hertz_of(sound, RATE, near=wanted) == pytest.approx(wanted, rel=0.004)


@pytest.mark.parametrize("name", sorted(VOICES))
@pytest.mark.parametrize("held", [1, 700, RATE // 2])
def test_a_note_begins_and_ends_in_silence_and_has_no_corner(name: str, held: int) -> None:
    sound = Bank(RATE).note(name, 60, held)

    assert np.isfinite(sound).all()
    assert abs(sound[0]) < 1e-3
    assert abs(sound[-1]) < 1e-3
    assert np.abs(np.diff(sound)).max() < 0.9


@pytest.mark.parametrize("kit", [name for name in INSTRUMENTS["drums"] if name != "none"])
@pytest.mark.parametrize("drum", sorted(DRUMS.values()))
def test_drum_stroke_is_audible_and_decays(kit: str, drum: int) -> None:
    sound = Bank(RATE).drum(kit, drum)

    assert np.abs(sound).max() > 0.05
    assert abs(sound[0]) < 1e-3
    assert abs(sound[-1]) < 1e-3
    first, last = np.array_split(sound.astype(float) ** 2, 4)[0], sound[-len(sound) // 4 :]
    assert first.mean() > 3 * (last.astype(float) ** 2).mean()


def test_every_instrument_of_a_piece_can_be_rendered() -> None:
    named = {name for part, names in INSTRUMENTS.items() if part != "drums" for name in names}

    assert named == set(VOICES)


@pytest.mark.parametrize("rate", [44_100, 48_000])
def test_a_piece_lasts_as_long_as_its_bars_and_then_rings_out(rate: int) -> None:
    piece = tune(random.Random(4), bars=3)
    player = Player(piece, rate=rate)

    heard = sum(len(player.play(one)) for one in piece.bars)
    rest = player.finish()

    assert heard == round(3 * piece.bar_seconds * rate)
    assert rest.dtype == np.float32
    assert 0.5 * rate < len(rest) < 4 * rate
    assert np.abs(rest[-1]).max() < 1e-6


def test_music_is_loud_enough_and_never_too_loud() -> None:
    for seed in range(6):
        sound = render(tune(random.Random(seed), bars=4), rate=RATE)

        assert 0.03 < sound.std() < 0.25
        assert np.abs(sound).max() < 1
        assert abs(sound.mean()) < 0.01


def test_limiter_changes_only_loud_samples() -> None:
    loud = np.linspace(-4, 4, 801)[:, None].repeat(2, 1)
    bent = limit(loud)

    assert np.abs(bent).max() < 1
    assert (np.diff(bent[:, 0]) >= 0).all()
    quiet = np.abs(loud) <= 0.7
    assert np.allclose(bent[quiet], loud[quiet], atol=1e-6)


def test_bar_does_not_depend_on_later_bars() -> None:
    piece = tune(random.Random(8), bars=6)
    whole = render(piece, rate=RATE)
    bank = Bank(RATE)
    player, other = Player(piece, rate=RATE, bank=bank), Player(piece, rate=RATE, bank=bank)

    at = 0
    for one in piece.bars:
        heard = player.play(one)
        other.play(piece.bars[0])
        assert np.array_equal(heard, whole[at : at + len(heard)])
        at += len(heard)


def test_a_note_rings_over_the_bar_without_a_seam() -> None:
    player = Player(replace(HEAD, lead="organ"), rate=RATE)
    first, second = player.play(bar(Note(8, "lead", 69, 24))), player.play(bar())
    seam = np.concatenate([first[-400:], second[:400]])[:, 0]

    steps = np.abs(np.diff(seam))
    assert steps[399] <= steps.max()
    assert np.abs(second[: RATE // 2]).max() > 0.02
    assert steps.max() < 0.05


def test_notes_are_struck_when_they_are_written() -> None:
    player = Player(HEAD, rate=RATE)
    sound = np.abs(player.play(bar(Note(8, "drums", DRUMS["kick"], 1)))).max(1)

    begins = int(np.flatnonzero(sound > 0.005)[0])
    assert begins == pytest.approx(RATE, abs=0.01 * RATE)


def test_parts_are_panned() -> None:
    hat = Player(HEAD, rate=RATE).play(bar(Note(0, "drums", DRUMS["hat"], 1)))
    bass = Player(HEAD, rate=RATE).play(bar(Note(0, "bass", 36, 8)))

    assert hat[:4000, 1].std() > 1.2 * hat[:4000, 0].std()
    assert bass[:, 0].std() == pytest.approx(bass[:, 1].std(), rel=0.1)


def test_louder_bars_are_louder() -> None:
    note = Note(0, "lead", 69, 8)
    quiet = Player(HEAD, rate=RATE).play(bar(note, loudness=1))
    loud = Player(HEAD, rate=RATE).play(bar(note, loudness=4))

    assert loud.std() > 1.3 * quiet.std()


def test_analysis_finds_tempo_and_key() -> None:
    heard = []
    for seed in range(6):
        piece = tune(random.Random(seed), bars=8, mood="happy")
        sound = render(piece, rate=RATE)
        key = keys_of(chroma(sound, RATE))[0]
        near = is_near(key, piece.key) or (key.tonic - piece.key.tonic) % 12 in (5, 7)
        heard.append((fits(tempo_of(sound, RATE), piece.tempo), near))

    assert sum(tempo for tempo, _ in heard) >= 5
    assert sum(key for _, key in heard) >= 5

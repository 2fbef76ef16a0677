"""The music engine: as requested, streamed while it is generated, and the same at any load."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mido
import numpy as np
import pytest
import torch

from tests.workers.music.driver import Driver, samples, spec
from workers.contract.jobs import (
    AUDIO_CHUNK_BYTES_MAX,
    AudioChunk,
    Cancelled,
    Completed,
    Failed,
    Progress,
    Usage,
)
from workers.contract.kinds import UNMARKED, sniff
from workers.engines.music.engine import MusicEngine
from workers.engines.music.midi import read_midi
from workers.engines.music.notes import Key
from workers.engines.music.synth import render
from workers.engines.music.writer import PieceWriter
from workers.engines.registry import obstacle
from workers.media.audio import AUDIO_TYPES, encoded_rate
from workers.protocol.engine import Admitted, Wait


@pytest.fixture(scope="module")
def driver(checkpoint: Path) -> Driver:
    return Driver(spec(checkpoint))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_concurrent_requests_do_not_change_the_audio(checkpoint: Path, dtype: str) -> None:
    driver = Driver(spec(checkpoint, dtype=dtype))
    asked: list[dict[str, Any]] = [
        {"prompt": "a slow waltz", "duration_ms": 5000, "seed": 1},
        {"prompt": "at 180 bpm in 3/4", "key": "F# minor", "seed": 2},
        {"prompt": "", "tempo": 140, "mood": "tense", "seed": 3, "format": "mp3"},
    ]
    alone = [driver.make(**one).files for one in asked]

    for place, one in enumerate(asked):
        driver.admit(f"together-{place}", stream=place == 1, **one)
        driver.step()
        driver.step()
    driver.finish()

    together = [driver.completed(f"together-{place}").files for place in range(3)]
    for mine, wanted in zip(together, alone, strict=True):
        assert mine[1] == wanted[1]
    assert np.array_equal(samples(together[1][0].data), samples(alone[1][0].data))


def test_piece_depends_on_the_seed(driver: Driver) -> None:
    first, again, other = (driver.make(seed=seed).files[1] for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_key_tempo_mood_and_length_are_as_requested(driver: Driver) -> None:
    made = driver.make(prompt="", key="Bb minor", tempo=133, mood="Gloomy", duration_ms=4000)

    piece = read_midi(made.files[1].data)
    assert (piece.key, piece.tempo, piece.mood) == (Key(10, "minor"), 133, "dark")
    assert 3000 < made.usage.audio_ms <= 4000
    heard = samples(made.files[0].data).shape[1]
    assert heard == pytest.approx(made.usage.audio_ms * 48, abs=48)


def test_audio_is_rendered_from_the_notes(driver: Driver) -> None:
    driver.admit("heard")
    writer = driver.engine._running["heard"].writer  # type: ignore[index]
    driver.finish()

    heard = samples(driver.completed("heard").files[0].data)
    assert writer.head is not None
    played = render(replace(writer.head, bars=tuple(writer.bars))).T
    certain = heard.shape[1] - 24_000
    assert np.abs(heard[:, :certain] - played[:, :certain]).max() < 1e-4
    assert np.abs(heard[:, -1]).max() < 1e-3
    assert np.abs(heard).max() > 0.01


@pytest.mark.parametrize("format", AUDIO_TYPES)
@pytest.mark.parametrize("rate", [None, 16_000])
def test_every_format_can_be_decoded_and_has_the_reported_length(
    driver: Driver, format: str, rate: int | None
) -> None:
    made = driver.make(format=format, sample_rate=rate, stream=True)

    medium, score = made.output["media"]
    sound, notes = made.files
    stream = driver.streamed(f"alone-{len(driver.outcomes) - 1}")
    assert (medium.content_type, sound.content_type) == (AUDIO_TYPES[format],) * 2  # type: ignore[index]
    assert medium.sample_rate == encoded_rate(format, rate or 48_000)  # type: ignore[arg-type]
    assert (score.role, score.blob, notes.content_type) == ("score", 1, "audio/midi")
    for data in (sound.data, stream):
        if medium.content_type in UNMARKED:
            frame = 4 if format == "pcm" else 2
            assert len(data) / frame / medium.sample_rate == pytest.approx(3, abs=0.01)
        else:
            assert sniff(data[:64]) == medium.content_type
            # A codec works in whole frames, and some fill the first of them with silence.
            assert samples(data).shape[1] / 48_000 == pytest.approx(3, abs=0.2)
    assert medium.duration_ms == made.usage.audio_ms == 3000


def test_notes_open_in_any_sequencer(driver: Driver) -> None:
    made = driver.make(prompt="in 3/4", key="Eb major", tempo=150)

    file = mido.MidiFile(file=io.BytesIO(made.files[1].data))
    said = {message.type: message for message in file.tracks[0] if message.is_meta}
    assert said["key_signature"].key == "Eb"
    assert said["set_tempo"].tempo == 400_000
    assert 0 < file.length <= 3


def test_piece_is_streamed_while_it_is_generated(driver: Driver) -> None:
    driver.admit("first", stream=True, format="mp3", duration_ms=6000, prompt="at 180 bpm in 3/4")
    driver.finish()

    events = driver.events["first"]
    said = [event for event in events if isinstance(event, AudioChunk)]
    progress = [event for event in events if isinstance(event, Progress)]
    assert [(one.step, one.steps) for one in progress] == [(bar, 5) for bar in range(1, 6)]
    assert events.index(said[0]) < events.index(progress[1])
    assert max(len(event.data) for event in said) <= AUDIO_CHUNK_BYTES_MAX
    assert [one.duration_ms for one in said] == sorted(one.duration_ms for one in said)
    assert said[-1].duration_ms == driver.completed("first").usage.audio_ms
    assert {"preprocess", "transfer", "forward", "postprocess"} == set(driver.clock.names)


def test_unstreamed_audio_is_timed_too(driver: Driver) -> None:
    driver.admit("a")
    driver.finish()

    said = [event for event in driver.events["a"] if isinstance(event, AudioChunk)]
    assert said
    assert not any(event.data for event in said)


def test_cancelled_piece_is_charged_for_its_audio_so_far(driver: Driver) -> None:
    driver.admit("long", duration_ms=30_000, stream=True, seed=5)
    driver.admit("short", seed=6)
    while not any(isinstance(event, Progress) for event in driver.events["long"]):
        driver.step()

    driver.engine.cancel("long", "client")
    driver.step()

    ended = driver.outcomes["long"]
    assert isinstance(ended, Cancelled)
    assert ended.reason == "client"
    assert ended.usage.audio_ms == 1000
    driver.finish()
    assert driver.completed("short").files[1] == driver.make(seed=6).files[1]


def test_longer_piece_takes_a_larger_share_of_the_steps(driver: Driver) -> None:
    driver.shares.clear()
    driver.admit("short", seed=1)
    driver.admit("long", seed=1, duration_ms=8000)
    driver.finish()

    assert driver.shares["long"] > 1.5 * driver.shares["short"]


def test_request_without_a_free_slot_waits(driver: Driver) -> None:
    for place in range(3):
        assert driver.admit(f"{place}") == Admitted()

    assert driver.admit("late") == Wait()
    driver.finish()
    assert driver.admit("late") == Admitted()
    driver.finish()


def test_default_length_never_exceeds_the_hold(driver: Driver) -> None:
    made = driver.make(duration_ms=None, limits=Usage(requests=1, audio_ms=2500))

    assert 1000 < made.usage.audio_ms <= 2500


def test_non_finite_logits_fail_only_their_request(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.admit("bad", seed=1)
    driver.admit("good", seed=2)
    writer = driver.engine._running["bad"].writer  # type: ignore[index]
    sample = PieceWriter.sample
    monkeypatch.setattr(
        PieceWriter,
        "sample",
        lambda self, row: sample(self, row * torch.nan if self is writer else row),
    )

    driver.finish()

    failed = driver.outcomes["bad"]
    assert isinstance(failed, Failed)
    assert failed.code == "engine_error"
    assert isinstance(driver.outcomes["good"], Completed)


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"key": "H major"}, "key", "such as C major"),
        ({"key": "C"}, "key", "key is 'C'"),
        ({"tempo": 300}, "tempo", "tempo is 300; accepted are 40 to 200"),
        ({"tempo": 100.5}, "tempo", "whole beats"),
        ({"prompt": "at 320 bpm"}, "prompt", "The prompt names 320 bpm"),
        ({"mood": "blue"}, "mood", "accepted are happy, playful"),
        ({"duration_ms": 50_000}, "duration_ms", "at most 40000"),
        ({"duration_ms": 500}, "duration_ms", "0.5 seconds are too short for a bar"),
        ({"lyrics": "la la"}, "lyrics", "does not support lyrics"),
        ({"sample_rate": 4000}, "sample_rate", "8000 to 48000"),
        ({"parameters": {"cfg": 3}}, "cfg", "no parameter cfg"),
        ({"format": "ogg"}, None, "is not valid"),
        ({"task": "text-to-speech"}, None, "does not support text-to-speech"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    driver: Driver, asked: dict[str, Any], param: str | None, said: str
) -> None:
    refused = driver.admit("refused", **asked)

    assert isinstance(refused, Failed)
    assert said in refused.message
    assert refused.param == param


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("slots", 0, "at least 1"),
        ("threads", 0, "at least 1"),
        ("seconds", 0, "must be positive"),
        ("temperature", -1, "must be positive"),
        ("dtype", "float16", "float16"),
        ("voice", "ann", "options of the engine music are"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        MusicEngine(spec(tmp_path, **{option: value}))


def test_invalid_entry_is_not_loaded(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="supports text-to-music, not text-to-speech"):
        MusicEngine(spec(checkpoint, "text-to-speech")).load()
    with pytest.raises(ValueError, match=r"no config\.json"):
        MusicEngine(spec(tmp_path)).load()
    shutil.copytree(checkpoint, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace("<tune>", "<tale>"))
    with pytest.raises(ValueError, match="not a music checkpoint: its tokenizer lacks <tune>"):
        MusicEngine(spec(tmp_path / "other")).load()


def test_an_engine_can_be_loaded_again(driver: Driver) -> None:
    first = driver.make(seed=1).files[1]

    driver.engine.unload()
    driver.engine.load()

    assert driver.make(seed=1).files[1] == first


def test_its_packages_are_installed(tmp_path: Path) -> None:
    assert obstacle(spec(tmp_path)) is None

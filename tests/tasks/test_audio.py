"""Inputs of speech and music, as a worker or an upstream receives them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.catalog.schema import CatalogEntry
from gateway.errors import InvalidRequest
from gateway.files.sources import RemoteSource, Source
from gateway.tasks.prepared import Prepared
from gateway.tasks.registry import choose_task, parse, prepare
from workers.contract.jobs import Job, RequestId
from workers.contract.models import ModelSpec
from workers.upstreams import gmi_wire as wire

RECORDING = "https://example.com/voice.wav"
UPSTREAM = {"dialect": "gmi", "url": "https://queue.example", "credential": "KEY"}


def entry(task: str, *also: str, upstream: bool = False, **more: Any) -> CatalogEntry:
    route = {"upstream": UPSTREAM} if upstream else {"engine": "speech", "checkpoint": "x"}
    price = [{"unit": "request", "amount": "1"}]
    given = {"name": "model", "task": task, "also": also, "price": price, **route, **more}
    return CatalogEntry.model_validate(given)


def prepared(sold: CatalogEntry, **value: Any) -> tuple[str, Prepared]:
    read = parse(sold.task, value)
    task = choose_task(sold, read)
    return task, prepare(sold, read, task=task, prefix="input")


def test_recording_selects_voice_cloning() -> None:
    sold = entry("text-to-speech", "voice-clone")

    task, found = prepared(sold, text="Hello.", recording=RECORDING, transcript="I am Anna.")
    plain, without = prepared(sold, text="Hello.")

    assert (task, plain) == ("voice-clone", "text-to-speech")
    assert found.sources == (Source("audio", RemoteSource(RECORDING), "input.recording"),)
    assert (found.input["recording"], found.input["transcript"]) == (True, "I am Anna.")
    assert without.sources == ()


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"text": "Hello."}, "input.recording"),
        ({"text": "Hello.", "recording": RECORDING, "voice": "anna"}, "input.voice"),
        ({"text": "Hello.", "recording": "a voice"}, "input.recording"),
    ],
)
def test_ambiguous_voice_is_refused(value: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prepared(entry("voice-clone"), **value)

    assert refused.value.param == param


def test_regional_variants_of_a_supported_language_are_accepted() -> None:
    sold = entry("text-to-speech", options={"languages": ["en", "pt-BR"]})

    for tag in ("en", "en-GB", "PT", "pt_PT"):
        assert prepared(sold, text="x", language=tag)[1].input["language"] == tag
    with pytest.raises(InvalidRequest, match="its languages are en, pt-BR"):
        prepared(sold, text="x", language="de")


@pytest.mark.parametrize(
    ("value", "limits", "milliseconds"),
    [
        ({"text": "x" * 85}, {}, 100_000),
        ({"text": "x" * 85, "speed": 0.5}, {}, 200_000),
        ({"text": "x" * 85, "speed": 4}, {}, 25_000),
        ({"text": "x" * 85}, {"seconds": 30}, 30_000),
    ],
)
def test_hold_covers_the_longest_possible_speech(
    value: dict[str, Any], limits: dict[str, Any], milliseconds: int
) -> None:
    _, found = prepared(entry("text-to-speech", limits=limits), **value)

    assert (found.limits.audio_ms, found.limits.characters) == (milliseconds, 85)


def test_hold_covers_the_requested_duration_of_music() -> None:
    def longest(limits: dict[str, Any], defaults: dict[str, Any], **value: Any) -> int:
        sold = entry("text-to-music", limits=limits, default_parameters=defaults)
        return prepared(sold, prompt="a waltz", **value)[1].limits.audio_ms

    assert longest({"seconds": 60}, {"seconds": 8}, seconds=12.5) == 12_500
    assert longest({"seconds": 60}, {"seconds": 8}) == 8000
    assert longest({"seconds": 60}, {}) == 60_000
    assert longest({}, {}) == 600_000


def test_upstream_receives_only_the_requested_parameters() -> None:
    options = {"fields": {"voice": "voice_id", "sample_rate": "audio_sample_rate"}}

    def told(task: str, **value: Any) -> dict[str, Any]:
        sold = entry(task, upstream=True, options=options)
        done, found = prepared(sold, **value)
        spec = ModelSpec("model", done, options=options)
        job = Job(RequestId("r"), "a", "model", done, found.input)
        return wire.payload(job, wire.read_options(spec), wire.Sources())

    spoken = told(
        "text-to-speech", text="Hello.", voice="anna", speed=1.5, format="wav",
        sample_rate=16_000, parameters={"vol": 2},
    )  # fmt: skip
    cloned = told("voice-clone", text="Hello.", recording=RECORDING)
    music = told("text-to-music", prompt="a waltz", lyrics="la la", seconds=30, seed=7)

    assert spoken == {
        "text": "Hello.",
        "voice_id": "anna",
        "speed": 1.5,
        "format": "wav",
        "audio_sample_rate": 16_000,
        "vol": 2,
    }
    assert cloned == {"text": "Hello."}
    assert music == {"prompt": "a waltz", "lyrics": "la la", "duration": 30, "seed": 7}


@pytest.mark.parametrize(
    ("task", "value", "param"),
    [
        ("text-to-music", {"prompt": "a waltz", "lyrics": "la la"}, "lyrics"),
        ("text-to-speech", {"text": "Hello.", "instructions": "whisper"}, "instructions"),
    ],
)
def test_local_models_refuse_what_their_engines_cannot_do(
    task: str, value: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest, match="leave") as refused:
        prepared(entry(task), **value)

    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", f"input.{param}")

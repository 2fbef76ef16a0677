"""Inputs of talking heads, and the hold for them. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.gmi.models import model_view
from gateway.api.gmi.payloads import read_payload
from gateway.catalog.schema import CatalogEntry
from gateway.errors import InvalidRequest
from gateway.files.sources import RemoteSource, Source
from gateway.tasks.prepared import Prepared
from gateway.tasks.registry import parse, prepare
from gateway.tasks.visual import VideoTask, choose_dialect_task

FACE, VOICE = "https://example.com/face.png", "https://example.com/voice.mp3"
PRICE = [{"unit": "video_second", "amount": "0.002"}]


def entry(**more: Any) -> CatalogEntry:
    base = {"name": "head", "task": "talking-head", "engine": "echo", "price": PRICE}
    limits = {"seconds": 30, "fps": 30, **more.pop("limits", {})}
    return CatalogEntry.model_validate({**base, "limits": limits, **more})


def upstream() -> CatalogEntry:
    there = {"dialect": "gmi", "url": "https://example.com", "credential": "KEY"}
    price = [{"unit": "request", "amount": "0.02"}]
    found = {"name": "head", "task": "talking-head", "upstream": there, "price": price}
    return CatalogEntry.model_validate(found)


def prepared(sold: CatalogEntry, **value: Any) -> Prepared:
    return prepare(sold, parse("talking-head", value), prefix="input")


def test_portrait_and_recording_are_attached_and_the_maximum_duration_is_held() -> None:
    found = prepared(entry(), image=FACE, audio=VOICE)

    assert found.sources == (
        Source("image", RemoteSource(FACE), "input.image"),
        Source("audio", RemoteSource(VOICE), "input.audio"),
    )
    assert found.limits.video_ms == 30_000
    assert found.input == {}


def test_given_duration_reduces_the_hold() -> None:
    found = prepared(entry(), image=FACE, audio=VOICE, seconds=2.5, fps=30)

    assert found.limits.video_ms == 2500
    assert found.input == {"fps": 30}


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ({"image": FACE}, "missing_required_parameter", "input.audio"),
        ({"audio": VOICE}, "missing_required_parameter", "input.image"),
        ({"image": FACE, "text": "hello"}, "unsupported_parameter", "input.text"),
        (
            {"image": FACE, "audio": VOICE, "parameters": {"mood": 1}},
            "unsupported_parameter",
            "input.parameters",
        ),
        ({"image": FACE, "audio": VOICE, "seconds": 31}, "invalid_value", "input.seconds"),
        ({"image": FACE, "audio": VOICE, "fps": 31}, "invalid_value", "input.fps"),
        ({"image": FACE, "audio": VOICE, "prompt": "x"}, "unknown_parameter", "input.prompt"),
        ({"image": "face.png", "audio": VOICE}, "invalid_value", "input.image"),
    ],
)
def test_invalid_talking_head_input_is_refused_by_name(
    value: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepared(entry(), **value)

    assert (caught.value.code, caught.value.param) == (code, param)


def test_upstream_model_receives_text_and_its_own_parameters() -> None:
    found = prepared(upstream(), image=FACE, text="hello", parameters={"mood": "calm"})

    assert found.input == {"text": "hello", "parameters": {"mood": "calm"}}
    assert [source.kind for source in found.sources] == ["image"]


def test_video_endpoint_refuses_talking_head_models() -> None:
    with pytest.raises(InvalidRequest) as caught:
        choose_dialect_task(entry(), VideoTask(prompt="hello"), makes="video")

    assert caught.value.code == "task_not_supported"


def test_request_queue_lists_and_accepts_parameters_of_a_local_model() -> None:
    view = model_view(entry(), (), created_at=1, updated_at=2)
    meant = read_payload(entry(), {"image": FACE, "audio": VOICE})

    required = [one["name"] for one in view["parameters"] if one["required"]]
    assert required == ["image", "audio"]
    assert len(prepare(entry(), meant.input, task=meant.task).sources) == 2

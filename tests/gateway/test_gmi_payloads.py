"""Payloads of the request queue, as upstream models and audio models understand them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.gmi.models import model_view
from gateway.api.gmi.payloads import read_payload
from gateway.catalog.schema import CatalogEntry
from gateway.errors import InvalidRequest
from gateway.files.sources import RemoteSource, Source, UploadedSource
from gateway.tasks.registry import prepare

PICTURE = "https://example.com/a.png"
GMI = {"dialect": "gmi", "url": "https://queue.example", "credential": "KEY"}


def entry(task: str, *, options: dict[str, Any] | None = None, **more: Any) -> CatalogEntry:
    return CatalogEntry.model_validate(
        {
            "name": "model",
            "task": task,
            "upstream": GMI,
            "options": options or {},
            "price": [{"unit": "request", "amount": "1"}],
            **more,
        }
    )


def prepared(sold: CatalogEntry, **payload: Any) -> tuple[dict[str, Any], tuple[Source, ...]]:
    meant = read_payload(sold, payload)
    found = prepare(sold, meant.input, task=meant.task)
    return found.input, found.sources


def test_unknown_keys_are_passed_to_the_upstream_unchanged() -> None:
    given, sources = prepared(
        entry("text-to-image"),
        prompt="x",
        size="2K",
        num_inference_steps=30,
        guidance_scale="3.5",
        output_format="jpeg",
        watermark=False,
        num_images=1,
        seed=7,
    )

    assert given == {
        "prompt": "x",
        "seed": 7,
        "parameters": {
            "size": "2K",
            "num_inference_steps": 30,
            "guidance_scale": "3.5",
            "output_format": "jpeg",
            "watermark": False,
        },
    }
    assert sources == ()


def test_names_from_the_entrys_options_are_accepted() -> None:
    names = {"seconds": "clip_length", "negative_prompt": "avoid", "seed": None}
    sold = entry("image-to-video", options={"images": "start_image", "fields": names})

    given, sources = prepared(
        sold, prompt="x", start_image=PICTURE, clip_length="5", avoid="rain", cfg_scale=0.5
    )

    assert (given["duration_ms"], given["negative_prompt"]) == (5000, "rain")
    assert given["parameters"] == {"cfg_scale": 0.5}
    assert sources == (Source("image", RemoteSource(PICTURE), "images.0"),)


@pytest.mark.parametrize(
    ("sizes", "payload", "size", "left"),
    [
        ([], {"aspect_ratio": "16:9"}, None, {"aspect_ratio": "16:9"}),
        ([], {"size": "16:9"}, None, {"size": "16:9"}),
        ([], {"aspect_ratio": "auto"}, None, {"aspect_ratio": "auto"}),
        ([], {"size": "1024*768", "aspect_ratio": "4:3"}, (1024, 768), {}),
        (["832x480", "480x832"], {"aspect_ratio": "9:16"}, (480, 832), {}),
        (["832x480", "1280x720"], {"size": "16:9", "resolution": "720P"}, (1280, 720), None),
    ],
)
def test_ratio_becomes_the_closest_listed_size_or_is_passed_on(
    sizes: list[str],
    payload: dict[str, Any],
    size: tuple[int, int] | None,
    left: dict[str, Any] | None,
) -> None:
    given, _ = prepared(entry("text-to-video", sizes=sizes), prompt="x", **payload)

    found = (given["width"], given["height"]) if "width" in given else None
    assert found == size
    assert left is None or given.get("parameters", {}) == left


def test_ratio_without_a_matching_size_is_refused() -> None:
    sold = entry("text-to-video", sizes=["832x480"])

    with pytest.raises(InvalidRequest, match=r"aspect_ratio is '1:1'.*832x480"):
        prepared(sold, prompt="x", aspect_ratio="1:1")


def test_video_quality_affects_the_price_and_is_passed_on() -> None:
    sold = entry(
        "text-to-video",
        qualities={"low": {}, "high": {}},
        price=[
            {"unit": "request", "amount": "1"},
            {"unit": "request", "amount": "2", "when": {"quality": "high"}},
        ],
    )
    meant = read_payload(sold, {"prompt": "x", "quality": "high"})

    found = prepare(sold, meant.input, task=meant.task)

    assert found.limits.attributes["quality"] == "high"
    assert found.input["parameters"] == {"quality": "high"}


def test_speech_and_music_payloads_are_passed_to_the_upstream_unchanged() -> None:
    speech = {"text": "hello", "voice_id": "anna", "speed": "1.1", "vol": 1}
    music = {"lyrics": "la la", "prompt": "a waltz", "format": "mp3"}
    person = {"person_image.24": PICTURE, "text.1": "hello"}

    for task, payload in (
        ("text-to-speech", speech),
        ("text-to-music", music),
        ("talking-head", person),
    ):
        assert prepared(entry(task), **payload) == (payload, ())


def test_stored_voice_is_attached_and_url_is_passed_on() -> None:
    file_id = "file-" + "0" * 32
    ours = f"https://gate.example/v1/uploads/{file_id}.mp3"
    theirs = "https://example.com/voice.mp3"
    sold = entry("voice-clone")

    attached = prepared(sold, text="hello", source_audio=ours)
    named = prepared(sold, text="hello", source_audio=theirs)

    assert attached == (
        {"text": "hello"},
        (Source("audio", UploadedSource(file_id), "source_audio"),),
    )
    assert named == ({"text": "hello", "source_audio": theirs}, ())


def test_models_of_every_task_describe_themselves() -> None:
    for task, required in (
        ("text-to-image", ["prompt"]),
        ("image-edit", ["image"]),
        ("text-to-video", ["prompt"]),
        ("video-upscale", ["video_url"]),
        ("text-to-speech", ["text"]),
        ("voice-clone", ["text", "source_audio"]),
        ("text-to-music", []),
        ("talking-head", []),
    ):
        view = model_view(entry(task), (), created_at=1, updated_at=2)
        assert [one["name"] for one in view["parameters"] if one["required"]] == required
        assert view["available"] is False
        assert view["price_info"]["pricing_type"] == "request"


def local(task: str, **more: Any) -> CatalogEntry:
    return CatalogEntry.model_validate(
        {
            "name": "model",
            "task": task,
            "engine": "speech",
            "checkpoint": "there",
            "options": {"voices": {"ann": {}}, "languages": ["en", "de"]},
            "limits": {"characters": 500, "seconds": 60},
            "price": [{"unit": "request", "amount": "1"}],
            **more,
        }
    )


MINIMAX_SPEECH = {
    "text": "hello",
    "voice_id": "ann",
    "speed": "1.1",
    "vol": 1,
    "pitch": 0,
    "emotion": "neutral",
    "language_boost": "German",
    "format": "wav",
    "audio_sample_rate": "32000",
    "bitrate": 128000,
    "channel": "1",
    "vm_pitch": 0,
    "intensity": 0,
    "timbre": 0,
    "sound_effects": "",
}


def test_payload_of_another_speech_model_is_accepted() -> None:
    given, sources = prepared(local("text-to-speech"), **MINIMAX_SPEECH)

    assert given.pop("seed") >= 0
    assert given == {
        "text": "hello",
        "voice": "ann",
        "speed": 1.1,
        "language": "de",
        "format": "wav",
        "sample_rate": 32_000,
        "bitrate": 128_000,
    }
    assert sources == ()


@pytest.mark.parametrize("spelling", ["need_volumn_normalization", "need_volume_normalization"])
def test_payload_of_another_cloning_model_is_accepted(spelling: str) -> None:
    address = "https://example.com/voice.mp3"
    payload = {
        "text": "hello",
        "source_audio": address,
        "voice_id": "my-clone-1",
        "need_noise_reduction": False,
        spelling: "false",
    }

    given, sources = prepared(local("voice-clone"), **payload)

    assert (given["text"], given["recording"], "voice" in given) == ("hello", True, False)
    assert sources == (Source("audio", RemoteSource(address), "recording"),)
    with pytest.raises(InvalidRequest, match="does not support") as refused:
        prepared(local("voice-clone"), **{**payload, spelling: True})
    assert refused.value.param == spelling


def test_payload_of_another_music_model_is_accepted() -> None:
    given, _ = prepared(
        local("text-to-music"),
        prompt="a waltz",
        lyrics="[Intro]\n[Instrumental]",
        duration="12",
        sample_rate=44_100,
        bitrate=256_000,
        format="mp3",
        is_instrumental=True,
    )

    assert (given["prompt"], given["duration_ms"], "lyrics" in given) == ("a waltz", 12_000, False)
    assert (given["sample_rate"], given["bitrate"]) == (44_100, 256_000)


@pytest.mark.parametrize(
    ("payload", "code", "param"),
    [
        ({"vol": 2}, "unsupported_parameter", "vol"),
        ({"emotion": "happy"}, "unsupported_parameter", "emotion"),
        ({"colour": "red"}, "unknown_parameter", "colour"),
        ({"voice_id": "zoe"}, "invalid_value", "voice_id"),
        ({"language_boost": "French"}, "invalid_value", "language_boost"),
        ({"audio_sample_rate": 1}, "invalid_value", "audio_sample_rate"),
        ({"voice": "ann", "voice_id": "ann"}, "invalid_value", "voice_id"),
    ],
)
def test_unsupported_value_is_refused_under_the_clients_key(
    payload: dict[str, Any], code: str, param: str
) -> None:
    def order() -> None:
        meant = read_payload(local("text-to-speech"), {"text": "hello", **payload})
        try:
            prepare(local("text-to-speech"), meant.input, task=meant.task)
        except InvalidRequest as error:
            meant.rename(error)
            raise

    with pytest.raises(InvalidRequest) as refused:
        order()

    assert (refused.value.code, refused.value.param) == (code, param)

"""Results of GMI Cloud's request queue: every shape is read, and none that was paid for is lost."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest

from tests.workers import fake_gmi as fake
from tests.workers.fake_gmi import KEY, Fault
from tests.workers.test_gmi import calling
from workers.contract.attempts import UNREAD_CHARS_MAX
from workers.contract.jobs import Usage
from workers.upstreams import transfers


def in_base64(data: bytes) -> str:
    return b64encode(data).decode()


def candidates(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"parts": list(parts)}, **more}]}


async def test_base64_of_gemini_is_an_image() -> None:
    inline = {"mimeType": "image/png", "data": in_base64(fake.picture(9, 7))}
    async with calling() as (caller, service):
        service.outcome = lambda order: candidates({"text": "Here."}, {"inlineData": inline})
        caller.submit(prompt="x")

        outcome = await caller.completes()

    assert outcome.files[0].data == fake.picture(9, 7)
    assert outcome.usage == Usage(requests=1, images=1)


@pytest.mark.parametrize("name", ["audio_base64", "audio", "audio_url"])
async def test_base64_audio_is_audio(name: str) -> None:
    data = in_base64(fake.sound(0.5))
    async with calling("text-to-speech") as (caller, service):
        prefix = "data:audio/wav;base64," if name == "audio_url" else ""
        service.outcome = lambda order: {name: prefix + data, "duration_ms": 500}
        caller.submit(text="hello")

        outcome = await caller.completes()

    assert outcome.files[0].data == fake.sound(0.5)
    assert outcome.output.keys() == {"media", "duration_ms"}


async def test_outcome_that_arrives_after_the_end_is_waited_for() -> None:
    async with calling() as (caller, service):
        service.states = ["success"]
        service.polls_without_outcome = 2
        caller.submit(prompt="x")

        assert (await caller.completes()).usage.images == 1

    assert service.count("POST /requests") == 1


async def test_message_beside_a_result_does_not_discard_it() -> None:
    async with calling() as (caller, service):
        hosted = service.host(fake.picture(), "image/png")
        service.outcome = lambda order: {"image_url": hosted, "message": "success"}
        caller.submit(prompt="x")

        assert (await caller.completes()).usage.images == 1


async def test_video_comes_before_the_pictures_of_its_chain() -> None:
    async with calling("talking-head") as (caller, service):
        portrait = service.host(fake.picture(), "image/png")
        video = service.host(fake.clip(), "video/mp4")
        service.outcome = lambda order: {"media_urls": [{"url": portrait}, {"url": video}]}
        caller.submit(("image/png", b"png"), text="hello")

        outcome = await caller.completes()

    assert [(one.kind, one.index) for one in outcome.output["media"]] == [
        ("video", 0),
        ("image", 1),
    ]


UNREADABLE: dict[str, tuple[dict[str, Any], str, str]] = {
    # outcome, code, part of the message
    "nothing": ({"seed": 7}, "upstream_error", "it contains no image"),
    "refusal": (
        candidates({"text": "I cannot draw that."}),
        *("upstream_rejected", "I cannot draw that."),
    ),
    "reason": (candidates(finishReason="IMAGE_SAFETY"), "upstream_rejected", "IMAGE_SAFETY"),
    "base64": ({"b64_json": "!" * 50_000}, "upstream_error", "not valid base64"),
    "secret": ({"error": f"your key is {KEY}"}, "upstream_error", "***"),
}


@pytest.mark.parametrize("name", UNREADABLE)
async def test_result_that_cannot_be_read_is_kept_and_not_charged(name: str) -> None:
    result, code, words = UNREADABLE[name]
    async with calling() as (caller, service):
        service.outcome = lambda order: result
        caller.submit(prompt="a private prompt")

        failed = await caller.fails()

    assert (failed.code, words in failed.message) == (code, True), failed.message
    assert not failed.delivered
    assert failed.unread is not None
    assert (failed.unread.number, failed.unread.model) == ("r-0", "their-name")
    assert len(failed.unread.body) <= UNREAD_CHARS_MAX
    assert json.loads(failed.unread.body)["outcome"].keys() == result.keys()
    assert KEY not in failed.unread.body
    assert "a private prompt" not in failed.unread.body


async def test_part_of_a_result_that_is_missing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "ATTEMPTS", 1)
    async with calling() as (caller, service):
        picture = service.host(fake.picture(), "image/png")
        gone = f"{service.url}/gone"
        service.outcome = lambda order: {"media_urls": [{"url": gone}, {"url": picture}]}
        caller.submit(prompt="x", n=2)

        outcome = await caller.completes()

    assert outcome.usage.images == 1
    assert outcome.unread is not None
    assert outcome.unread.reason == "the response has status 404"
    assert gone in outcome.unread.body


async def test_unreadable_answer_to_a_submission_is_kept() -> None:
    async with calling() as (caller, service):
        service.faults.append(Fault("POST", "/requests", status=200, body=["not a record"]))
        caller.submit(prompt="x")

        failed = await caller.fails()

    assert failed.code == "upstream_error"
    assert failed.unread is not None
    assert "not a record" in failed.unread.body


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (422, "upstream_rejected", "Backend error (422): moderation"),
        (401, "upstream_unavailable", "denies access"),
        (404, "upstream_unavailable", "does not have this model"),
        (418, "upstream_error", "status 418"),
    ],
)
async def test_refusal_of_a_vendor_inside_a_500_is_understood(
    status: int, code: str, words: str
) -> None:
    async with calling() as (caller, service):
        body = {"error": f"Backend error ({status}): moderation"}
        service.faults.append(Fault("POST", "/requests", status=500, body=body))
        caller.submit(prompt="x")

        failed = await caller.fails()

    assert (failed.code, words in failed.message) == (code, True), failed.message
    assert service.count("POST /requests") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("Backend error (400): prompt was flagged", "upstream_rejected"),
        ("rate limit exceeded(RPM)", "upstream_unavailable"),
    ],
)
async def test_reason_of_a_failed_request_decides_its_code(error: str, code: str) -> None:
    async with calling() as (caller, service):
        service.states, service.error = ["failed"], error
        caller.submit(prompt="x")

        failed = await caller.fails()

    assert (failed.code, error in failed.message) == (code, True)
    assert failed.unread is None


async def test_request_that_stays_queued_is_given_up_and_cancelled() -> None:
    async with calling(options={"queued_timeout_s": 0.05}) as (caller, service):
        service.states = ["queued"]
        caller.submit(prompt="x")

        failed = await caller.fails()
        await service.until(lambda: service.deleted)

    assert failed.code == "upstream_timeout"
    assert "did not start it within 0.05 s" in failed.message

"""Market models through GMI Cloud's request queue, against a server with its wire format."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from tests.workers import fake_gmi as fake
from tests.workers import hosting
from tests.workers.fake_gmi import KEY, FakeGmi, Fault, fake_gmi
from tests.workers.hosting import running
from tests.workers.running import PATIENCE_S, Gateway
from workers.contract.blobs import Blobs
from workers.contract.jobs import (
    BlobRef,
    Cancelled,
    Completed,
    Job,
    Progress,
    RequestId,
    Usage,
)
from workers.contract.media import Medium, SpeechInput
from workers.contract.models import EndpointSpec, ModelSpec, UpstreamSpec, read_specs
from workers.protocol.ipc import JobHandoff
from workers.upstreams import endpoints, gmi, transfers
from workers.upstreams.dialects import obstacle

ID = RequestId(f"req_{1:032x}")
LIMITS = Usage(images=4, video_ms=60_000, audio_ms=60_000)


class Caller(hosting.Caller):
    def __init__(
        self, *services: FakeGmi, task: str, options: dict[str, Any], key: str = KEY, **spec: Any
    ) -> None:
        self.task = task
        places = tuple(EndpointSpec(service.url, "their-name") for service in services)
        entry = {"dialect": "gmi", "credential": "GMI_API_KEY", "endpoints": places} | spec
        options = {"poll_min_s": 0.001, "poll_max_s": 0.01} | options
        super().__init__(
            ModelSpec("ours", task, options=options, upstream=UpstreamSpec(**entry)),
            {"GMI_API_KEY": key},
        )

    def submit(
        self,
        *files: tuple[str, bytes],
        limits: Usage = LIMITS,
        deadline_ms: int = 0,
        **given: Any,
    ) -> None:
        job = Job(
            ID,
            "acc",
            "ours",
            self.task,
            given,
            limits=limits,
            stream=True,
            deadline_ms=deadline_ms,
            attachments=tuple(BlobRef("k", len(data), "", kind) for kind, data in files),
        )
        now_us = time.monotonic_ns() // 1000
        self.host.submit([JobHandoff(job, 7, now_us, files=tuple(data for _, data in files))])


@contextlib.asynccontextmanager
async def calling(
    task: str = "text-to-image", options: dict[str, Any] | None = None, **spec: Any
) -> AsyncIterator[tuple[Caller, FakeGmi]]:
    async with fake_gmi() as service:
        caller = Caller(service, task=task, options=options or {}, **spec)
        async with running(caller):
            yield caller, service


# --- Requests ------------------------------------------------------------------------------------


async def test_image_is_submitted_polled_and_fetched() -> None:
    async with calling() as (caller, service):
        caller.submit(prompt="a teal wall", width=1024, height=768, seed=2**31 + 7, n=1)

        outcome = await caller.completes()

    assert service.order.model == "their-name"
    assert service.order.payload == {"prompt": "a teal wall", "size": "1024x768", "seed": 7}
    assert outcome.output == {
        "media": [Medium("image", blob=0, content_type="image/png", width=48, height=32)]
    }
    assert [file.data for file in outcome.files] == [fake.picture()]
    assert outcome.usage == Usage(requests=1, images=1)
    assert caller.events == [Progress(1, 4), Progress(2, 4), Progress(3, 4)]
    assert (outcome.worker, outcome.timings.queue_us) == ("w1", 7)
    assert service.count("POST /requests") == 1
    assert service.deleted == []
    assert service.credentials == set()


async def test_request_that_ends_with_its_submission_is_not_polled() -> None:
    async with calling("text-to-speech") as (caller, service):
        service.states = ["success"]
        service.outcome = lambda order: {
            "audio_url": service.host(fake.sound(0.5), "audio/x-wav"),
            "voice_id": "voice-7",
        }
        limits = Usage(audio_ms=60_000, characters=5)
        given = {"text": "hello", "voice_id": "voice-7", "speed": "1.1", "format": "wav"}
        caller.submit(limits=limits, **given)

        outcome = await caller.completes()

    assert service.order.payload == given
    assert service.order.polls == 0
    assert outcome.output == {
        "voice_id": "voice-7",
        "media": [Medium("audio", blob=0, content_type="audio/wav", duration_ms=500)],
    }
    assert outcome.usage == Usage(requests=1, audio_ms=500, characters=5)


async def test_video_has_its_thumbnail() -> None:
    async with calling("text-to-video") as (caller, service):
        service.outcome = lambda order: {
            "thumbnail_image_url": service.host(fake.picture(), "image/png"),
            "video_url": f"{service.url}/media/1.mp4?signature=abc",
            "duration_ms": 5000,
        }
        service.hosted["/media/1.mp4?signature=abc"] = (
            "binary/octet-stream",
            fake.clip(12, 12),
            {},
        )
        caller.submit(prompt="waves", width=1280, height=720, duration_ms=5000, fps=None)

        outcome = await caller.completes()

    assert service.order.payload == {"prompt": "waves", "aspect_ratio": "16:9", "duration": 5}
    video, thumbnail = outcome.output["media"]
    assert (video.kind, video.role, video.content_type) == ("video", "output", "video/mp4")
    assert (video.width, video.height, video.fps, video.duration_ms) == (48, 32, 12, 1000)
    assert (thumbnail.kind, thumbnail.role, thumbnail.blob) == ("image", "thumbnail", 1)
    assert outcome.output["duration_ms"] == 5000
    assert outcome.usage == Usage(requests=1, video_ms=1000)


async def test_speech_fields_are_renamed_for_the_model() -> None:
    fields = {"voice": "voice_id", "language": "language_boost", "sample_rate": "audio_sample_rate"}
    options = {"fields": fields, "language": "name"}
    async with calling("text-to-speech", options=options) as (caller, service):
        service.outcome = lambda order: {"audio_url": service.host(fake.sound(0.5), "audio/x-wav")}
        given = SpeechInput(
            text="hallo", voice="anna", language="de-CH", sample_rate=32_000, bitrate=128_000
        )
        caller.submit(**msgspec.to_builtins(given))

        await caller.completes()

    assert service.order.payload == {
        "text": "hallo",
        "voice_id": "anna",
        "language_boost": "German",
        "audio_sample_rate": 32_000,
        "bitrate": 128_000,
    }


async def test_cloned_voice_can_be_the_only_output() -> None:
    async with calling("voice-clone") as (caller, service):
        service.outcome = lambda order: {"voice_id": "clone-1", "note": "https://secret/x"}
        caller.submit(("audio/mpeg", b"ID3 a voice"), text="hello")

        outcome = await caller.completes()

    assert service.order.payload == {
        "text": "hello",
        "source_audio": "https://files.example/upload/0.mp3",
    }
    assert service.uploads["/upload/0.mp3"] == ("audio/mp3", b"ID3 a voice")
    assert outcome.output == {"voice_id": "clone-1", "media": []}


async def test_usage_beyond_the_hold_is_not_counted() -> None:
    async with calling() as (caller, service):
        service.outcome = lambda order: {
            "media_urls": [service.host(fake.picture(n, n), "image/png") for n in (8, 9, 10)]
        }
        caller.submit(prompt="x", n=2, limits=Usage(images=2))

        outcome = await caller.completes()

    assert service.order.payload["n"] == 2
    assert [medium.index for medium in outcome.output["media"]] == [0, 1, 2]
    assert outcome.usage == Usage(requests=1, images=2)


async def test_parameters_are_passed_on_but_override_no_input() -> None:
    async with calling(options={"constants": {"watermark": False, "style": "none"}}) as (
        caller,
        service,
    ):
        parameters = {"prompt": "another", "n": 50, "style": "ink", "camera": {"zoom": 2}}
        caller.submit(prompt="mine", n=2, parameters=parameters)

        await caller.completes()

    assert service.order.payload == {
        "prompt": "mine",
        "n": 2,
        "style": "ink",
        "camera": {"zoom": 2},
        "watermark": False,
    }


# --- Sources -------------------------------------------------------------------------------------


async def test_sources_are_uploaded_with_the_signed_types() -> None:
    webp = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(webp, "WEBP")
    async with calling("image-edit") as (caller, service):
        files = [("image/jpeg", b"a jpeg"), ("image/webp", webp.getvalue()), ("image/png", b"mask")]
        caller.submit(*files, prompt="redder", images=2, mask=True)

        await caller.completes()

    assert service.order.payload == {
        "prompt": "redder",
        "image": ["https://files.example/upload/0.jpg", "https://files.example/upload/1.png"],
        "mask": "https://files.example/upload/2.png",
    }
    assert service.uploads["/upload/0.jpg"] == ("image/jpg", b"a jpeg")
    converted = service.uploads["/upload/1.png"][1]
    assert converted is not None
    assert Image.open(io.BytesIO(converted)).size == (8, 8)
    assert service.credentials == set()


@pytest.mark.parametrize(
    ("task", "options", "files", "expected"),
    [
        ("image-to-video", {}, ["image/png"], {"image": 0}),
        ("image-to-video", {"images": "image_url"}, ["image/png"], {"image_url": 0}),
        ("image-blend", {"images": "images"}, ["image/png"] * 2, {"images": [0, 1]}),
        ("image-relight", {"list": False}, ["image/png"], {"image": 0}),
        ("video-upscale", {"video": "video_url"}, ["video/mp4"], {"video_url": 0, "scale": 2}),
        ("talking-head", {}, ["image/png", "audio/wav"], {"image": 0, "audio": 1}),
    ],
)
async def test_source_fields_have_the_names_of_the_entry(
    task: str, options: dict[str, Any], files: list[str], expected: dict[str, Any]
) -> None:
    async with calling(task, options) as (caller, service):
        scale = {"scale": 2} if task == "video-upscale" else {}
        caller.submit(*[(kind, b"bytes") for kind in files], prompt="go", **scale)
        await caller.ends()

        addresses = [f"https://files.example{path}" for path in service.uploads]

    sent = service.order.payload
    assert sent.pop("prompt") == "go"
    assert sent == {
        key: [addresses[n] for n in place]
        if isinstance(place, list)
        else (place if key == "scale" else addresses[place])
        for key, place in expected.items()
    }


async def test_fields_can_be_renamed_and_omitted() -> None:
    options = {"fields": {"seconds": "length", "seed": None}, "size": "width_height"}
    async with calling("text-to-video", options) as (caller, service):
        caller.submit(prompt="x", seed=3, duration_ms=2500, width=640, height=480)
        await caller.ends()

    assert service.order.payload == {"prompt": "x", "length": 2.5, "width": 640, "height": 480}


async def test_source_of_an_unsupported_type_is_invalid_input() -> None:
    async with calling("video-upscale") as (caller, service):
        caller.submit(("video/webm", b"webm"), video=True)

        failed = await caller.fails()

    assert failed.code == "invalid_input"
    assert "video/webm" in failed.message
    assert service.calls == []


async def test_failed_upload_ends_the_job_before_its_submission() -> None:
    async with calling("image-edit") as (caller, service):
        service.faults.append(Fault("PUT", "/upload/", status=403))
        caller.submit(("image/png", b"png"), prompt="x")

        failed = await caller.fails()

    assert failed.code == "upstream_unavailable"
    assert "could not be uploaded to the upstream" in failed.message
    assert service.orders == {}


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "code", "words"),
    [
        (400, {"error": "duration must be 5 or 10"}, "upstream_rejected", "duration must be 5"),
        (422, {"error": {"message": "prompt?"}}, "upstream_rejected", "prompt?"),
        (401, {"error": f"bad key {KEY}"}, "upstream_unavailable", "operator"),
        (402, {"error": "Insufficient credits."}, "upstream_unavailable", "out of credit"),
        (403, {"error": "no"}, "upstream_unavailable", "operator"),
        (404, {"error": "model not found"}, "upstream_unavailable", "does not have this model"),
        (500, {"error": "boom"}, "upstream_error", "status 500"),
        (400, {"error": f"you sent {KEY}"}, "upstream_rejected", "you sent ***"),
    ],
)
async def test_refusal_names_the_party_that_must_act(
    status: int, body: Any, code: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling() as (caller, service):
        service.faults.append(Fault("POST", "/requests", status=status, body=body))
        caller.submit(prompt="x")

        failed = await caller.fails()

    assert (failed.code, words in failed.message) == (code, True), failed.message
    assert KEY not in failed.message
    assert all(KEY not in str(vars(record)) for record in caplog.records)
    assert service.count("POST /requests") == 1
    assert service.count("DELETE") == 0


async def test_busy_upstream_is_retried_and_then_given_up() -> None:
    async with calling() as (caller, service):
        busy = Fault("POST", "/requests", status=429, headers={"Retry-After": "0"})
        service.faults += [busy, busy]
        caller.submit(prompt="x")
        await caller.completes()
        assert service.count("POST /requests") == 3

        caller.outcomes.clear()
        service.faults += [busy] * 9
        caller.submit(prompt="x")
        failed = await caller.fails()

    assert failed.code == "upstream_unavailable"
    assert "429" in failed.message


async def test_failed_request_contains_the_upstreams_reason() -> None:
    async with calling() as (caller, service):
        service.states = ["queued", "failed"]
        caller.submit(prompt="x")

        failed = await caller.fails()

    assert failed.code == "upstream_error"
    assert failed.message.endswith("the model ran out of ideas")


async def test_request_cancelled_by_the_upstream_has_failed() -> None:
    async with calling() as (caller, service):
        service.states = ["queued", "cancelled"]
        caller.submit(prompt="x")

        assert (await caller.fails()).message == "The upstream cancelled the request."


async def test_success_with_an_error_message_is_a_failure() -> None:
    async with calling() as (caller, service):
        service.outcome = lambda order: {"error": "flagged"}
        caller.submit(prompt="x")

        assert "flagged" in (await caller.fails()).message


# --- Lost connections ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_taken", [True, False])
async def test_request_in_an_unknown_state_is_never_submitted_twice(is_taken: bool) -> None:
    async with calling() as (caller, service):
        service.faults.append(Fault("POST", "/requests", hangs_up=True, is_taken=is_taken))
        caller.submit(prompt="x")

        failed = await caller.fails()

    assert failed.code == "upstream_error"
    assert "unknown whether it was accepted" in failed.message
    assert "nothing is charged" in failed.message
    assert service.count("POST /requests") == 1


async def test_submission_that_times_out_is_cancelled_when_it_is_answered() -> None:
    async with calling(options={"submit_timeout_s": 0.05}) as (caller, service):
        late = asyncio.Event()
        service.faults.append(Fault("POST", "/requests", waits=late))
        caller.submit(prompt="x")
        failed = await caller.fails()

        late.set()
        await service.until(lambda: service.deleted)

    assert failed.code == "upstream_timeout"
    assert service.count("POST /requests") == 1


async def test_polls_can_fail_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PROBE_MIN_S", 0.05)
    async with calling(idle_timeout_s=0.2) as (caller, service):
        service.faults += [
            Fault("GET", "/requests/", hangs_up=True),
            Fault("GET", "/requests/", status=502, body="<html>"),
            Fault("GET", "/requests/", status=404, body={"error": "request not found"}),
            Fault("GET", "/requests/", status=429, headers={"Retry-After": "0"}),
        ]
        caller.submit(prompt="x")
        await caller.completes()

        caller.outcomes.clear()
        service.faults += [Fault("GET", "/requests/", status=500)] * 10_000
        caller.submit(prompt="x")
        failed = await caller.fails()
        await service.until(lambda: service.deleted == ["r-1"])

    assert failed.code == "upstream_error"
    assert "cannot be polled: status 500" in failed.message


async def test_another_endpoint_accepts_what_the_first_refused() -> None:
    async with fake_gmi() as service:
        nobody = EndpointSpec("http://127.0.0.1:1", "other-name")
        places = (nobody, EndpointSpec(service.url, "their-name"))
        caller = Caller(task="text-to-image", options={}, endpoints=places)
        async with running(caller):
            caller.submit(prompt="x")

            outcome = await caller.completes()

    assert service.order.model == "their-name"
    assert outcome.output["served_by"] == "their-name"


async def test_endpoint_that_is_down_is_probed_until_it_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "PROBE_MIN_S", 0.02)
    async with calling() as (caller, service):
        service.faults += [Fault("POST", "/requests", status=500)] * 3
        service.faults.append(Fault("GET", "/models", status=503))
        for _ in range(3):
            caller.submit(prompt="x")
            await caller.fails()
            caller.outcomes.clear()
        assert caller.host.down == {"ours"}
        caller.submit(prompt="x")
        assert (await caller.fails()).message == "No upstream endpoint is available."

        await service.until(lambda: service.count("GET /models") == 2)
        async with asyncio.timeout(PATIENCE_S):
            while caller.host.down:  # noqa: ASYNC110  # there is no event to await
                await asyncio.sleep(0.01)
        caller.outcomes.clear()
        caller.submit(prompt="x")
        await caller.completes()


# --- Cancelling ----------------------------------------------------------------------------------


async def test_cancelled_job_is_cancelled_at_the_upstream() -> None:
    async with calling() as (caller, service):
        service.states = ["processing"]
        caller.submit(prompt="x")
        await service.until(lambda: service.orders and service.order.polls)

        caller.host.cancel(ID, "client")
        outcome = await caller.ends()
        await service.until(lambda: service.deleted)

    assert isinstance(outcome, Cancelled)
    assert (outcome.reason, outcome.usage, outcome.worker) == ("client", Usage(), "w1")
    assert outcome.details is not None
    assert outcome.details.endpoint.startswith("127.0.0.1:")
    assert service.deleted == [service.order.id]


async def test_job_cancelled_during_its_submission_is_cancelled_at_the_upstream() -> None:
    async with calling() as (caller, service):
        answered = asyncio.Event()
        service.faults.append(Fault("POST", "/requests", waits=answered))
        caller.submit(prompt="x")
        await service.until(lambda: not service.faults)

        caller.host.cancel(ID, "client")
        assert isinstance(await caller.ends(), Cancelled)
        answered.set()
        await service.until(lambda: service.deleted)

    assert service.count("POST /requests") == 1


async def test_worker_that_ends_leaves_its_request_to_the_next_one() -> None:
    async with calling() as (caller, service):
        service.states = ["processing"]
        caller.submit(prompt="x")
        await service.until(lambda: service.orders and service.order.polls)

    assert service.deleted == []


async def test_deadline_ends_a_job_and_its_upstream_request() -> None:
    async with calling() as (caller, service):
        service.states = ["processing"]
        caller.submit(prompt="x", deadline_ms=int(time.time() * 1000) + 300)

        outcome = await caller.ends()
        await service.until(lambda: service.deleted)

    assert isinstance(outcome, Cancelled)
    assert outcome.reason == "deadline"


async def test_request_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gmi, "RUN_MAX_S", 0.2)
    async with calling() as (caller, service):
        service.states = ["processing"]
        caller.submit(prompt="x")

        failed = await caller.fails()
        await service.until(lambda: service.deleted)

    assert failed.code == "upstream_timeout"


# --- Fetching ------------------------------------------------------------------------------------


async def test_redirects_are_followed_and_lost_connections_are_retried() -> None:
    async with calling() as (caller, service):
        address = service.host(fake.picture(), "application/octet-stream")
        service.outcome = lambda order: {
            "image_url": service.host(b"", "text/plain", status="302", Location=address)
        }
        service.faults += [
            Fault("GET", "/media/0", hangs_up=True),
            Fault("GET", "/media/0", status=503),
        ]
        caller.submit(prompt="x")

        outcome = await caller.completes()

    assert outcome.files[0].content_type == "image/png"
    assert outcome.files[0].data == fake.picture()


@pytest.mark.parametrize(
    ("content_type", "address", "words"),
    [
        ("text/html", None, "it is text/html"),
        ("image/svg+xml", None, "it is image/svg+xml"),
        (None, "ftp://127.0.0.1/x", "has the scheme 'ftp'"),
        (None, "http://[", "its URL is invalid"),
        (None, "http://no-such-host.invalid/x", "cannot be resolved"),
    ],
)
async def test_result_that_is_not_media_is_refused(
    content_type: str | None,
    address: str | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "ATTEMPTS", 1)
    async with calling() as (caller, service):
        service.outcome = lambda order: {
            "image_url": address or service.host(b"<script>", content_type or "")
        }
        caller.submit(prompt="x")

        failed = await caller.fails()

    assert failed.code == "upstream_error"
    assert words in failed.message
    assert "127.0.0.1" not in failed.message


async def test_missing_output_does_not_affect_the_others() -> None:
    async with calling() as (caller, service):
        service.outcome = lambda order: {
            "media_urls": [
                {"id": "0", "url": f"{service.url}/gone"},
                {"id": "1", "url": service.host(fake.picture(), "image/png")},
            ]
        }
        caller.submit(prompt="x", n=2)

        outcome = await caller.completes()

    gone, there = outcome.output["media"]
    assert (gone.index, gone.blob) == (0, None)
    assert "status 404" in gone.error
    assert (there.index, there.blob) == (1, 0)
    assert outcome.usage == Usage(requests=1, images=1)


async def test_download_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers.ByteBudget, "__init__", _small_budget)
    async with calling() as (caller, _):
        caller.submit(prompt="x")

        failed = await caller.fails()

    assert "exceeds the limit" in failed.message


def _small_budget(budget: transfers.ByteBudget) -> None:
    budget.left = 10


async def test_private_urls_of_an_upstream_are_not_called() -> None:
    async with fake_gmi() as service:
        client = transfers.Transfers(connect_timeout_s=1.0)
        budget = transfers.ByteBudget()
        inside = f"https://127.0.0.1:{service.port}/media/0"
        for address, words in (
            (inside, "not public"),
            ("https://169.254.169.254/latest/meta-data", "not public"),
            ("https://[::ffff:10.0.0.1]/x", "not public"),
            (f"{service.url}/media/0", "not https"),
        ):
            with pytest.raises(transfers.TransferError, match=words):
                await client.fetch(address, budget, plain_allowed=False)
        await client.close()

    assert service.calls == []


# --- Entries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("text-generation", {}, "does not support 'text-generation'; it supports text-to-image, "),
        ("text-to-image", {"image": "x"}, "unknown field `image`"),
        ("text-to-image", {"size": "small"}, "Invalid enum value 'small'"),
        (
            "text-to-image",
            {"fields": {"colour": "color"}},
            "unknown field 'colour'; known fields are",
        ),
        ("text-to-image", {"poll_min_s": 0}, "poll_min_s must be above 0"),
        ("text-to-image", {"poll_min_s": 20}, "at most poll_max_s"),
    ],
)
def test_invalid_options_have_a_clear_error(task: str, options: dict[str, Any], words: str) -> None:
    upstream = UpstreamSpec("https://example.com", dialect="gmi")

    said = obstacle(ModelSpec("ours", task, options=options, upstream=upstream), {})

    assert said is not None
    assert words in said


def test_every_market_model_needs_only_the_credential() -> None:
    market = [
        spec
        for spec in read_specs(Path("catalog.yaml"))
        if spec.upstream is not None and spec.upstream.dialect == "gmi"
    ]

    assert len(market) == 23
    assert {obstacle(spec, {}) for spec in market} == {"GMI_API_KEY is not set"}
    assert {obstacle(spec, {"GMI_API_KEY": "k"}) for spec in market} == {None}


# --- As a worker ---------------------------------------------------------------------------------


async def test_a_worker_serves_a_market_model_from_blob_to_blob(gateway: Gateway) -> None:
    gateway.models = ("seedream-5.0-lite",)
    blobs = Blobs(gateway.blob_url)
    source = await blobs.put("acc/in/n/0", fake.picture(8, 8), content_type="image/png")
    async with fake_gmi() as service:
        entry = {
            "name": "seedream-5.0-lite",
            "task": "text-to-image",
            "upstream": {"dialect": "gmi", "url": service.url, "credential": "GMI_API_KEY"},
            "options": {"poll_min_s": 0.01},
        }
        async with gateway.worker(entry, environ={"GMI_API_KEY": KEY}):
            job = Job(
                ID,
                "acc",
                "seedream-5.0-lite",
                "image-to-image",
                {"prompt": "as a poster", "images": 1},
                limits=Usage(requests=1, images=1),
                attachments=(source,),
            )
            gateway.jobs[ID] = job
            await gateway.enqueue(ID)

            outcome = await gateway.outcome(ID)

    assert isinstance(outcome, Completed), outcome
    assert service.order.payload["image"] == ["https://files.example/upload/0.png"]
    assert service.uploads["/upload/0.png"][1] == fake.picture(8, 8)
    assert await blobs.get(outcome.blobs[0]) == fake.picture()
    assert outcome.output["media"][0]["content_type"] == "image/png"

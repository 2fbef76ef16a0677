"""Files of jobs in a worker: attachments and outputs, with failures of the blob store."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from tests.workers.running import Gateway, echo, expire_leases
from workers.agent.attachments import Attachments, Fetched
from workers.agent.outbox import LeasedJob
from workers.contract.blobs import Blobs
from workers.contract.jobs import (
    AudioChunk,
    BlobRef,
    Cancelled,
    Choice,
    Completed,
    Event,
    Failed,
    Job,
    Outcome,
    Preview,
    Progress,
    RequestId,
    Sketch,
    Started,
    TokenLogprob,
    Tokens,
    Usage,
)
from workers.contract.media import File

PICTURE = os.urandom(3_000_000)


def blobs_of(gateway: Gateway) -> Blobs:
    return Blobs(gateway.blob_url)


def left_in(home: Path) -> set[str]:
    return {path.name for path in home.rglob("*") if path.is_file()}


# --- Through a worker ----------------------------------------------------------------------------


async def test_attachments_reach_the_engine_and_outputs_the_blob_store(gateway: Gateway) -> None:
    blobs = blobs_of(gateway)
    attached = [
        await blobs.put("acc/in/n/0", PICTURE, content_type="image/png"),
        await blobs.put("acc/in/n/1", b"a mask", content_type="image/webp"),
    ]
    async with gateway.worker():
        request_id = await gateway.submit("draw", attachments=tuple(attached))

        outcome = await gateway.outcome(request_id)

    assert isinstance(outcome, Completed), outcome
    assert outcome.files == ()
    assert [blob.content_type for blob in outcome.blobs] == ["image/png", "image/webp"]
    assert [await blobs.get(blob) for blob in outcome.blobs] == [PICTURE, b"a mask"]
    assert all(blob.key.startswith(f"acc/{request_id}/") for blob in outcome.blobs)


async def test_sketch_is_streamed_as_a_preview_in_order(gateway: Gateway) -> None:
    blobs = blobs_of(gateway)
    attached = await blobs.put("acc/in/n/0", PICTURE, content_type="image/png")
    async with gateway.worker(echo(tokens_per_step=1)):
        request_id = await gateway.submit("one two three", stream=True, attachments=(attached,))

        outcome = await gateway.outcome(request_id)
        await gateway.until(lambda: len(gateway.events.get(request_id, [])) == 5)

    assert isinstance(outcome, Completed)
    started, preview, *tokens = gateway.events_of(request_id)
    assert isinstance(started, Started)
    assert isinstance(preview, Preview)
    assert await blobs.get(preview.blob) == PICTURE
    assert [event.text for event in tokens if isinstance(event, Tokens)] == [
        "one ",
        "two ",
        "three",
    ]
    assert preview.blob.key != outcome.blobs[0].key


async def test_missing_or_damaged_attachment_is_invalid_input(
    gateway: Gateway,
) -> None:
    blobs = blobs_of(gateway)
    gone = BlobRef("acc/in/n/9", 3, "0" * 64)
    damaged = msgspec.structs.replace(await blobs.put("acc/in/n/0", b"abc"), sha256="0" * 64)
    async with gateway.worker():
        ids = [await gateway.submit("draw", attachments=(ref,)) for ref in (gone, damaged)]

        outcomes = [await gateway.outcome(request_id) for request_id in ids]

    assert [outcome.code for outcome in outcomes if isinstance(outcome, Failed)] == [
        "invalid_input",
        "invalid_input",
    ]
    assert [outcome.message for outcome in outcomes if isinstance(outcome, Failed)] == [
        "Input file 0 does not exist.",
        "Input file 0 is damaged: it differs from what was uploaded.",
    ]


async def test_a_cancelled_stream_leaves_no_previews_behind(gateway: Gateway) -> None:
    attached = await blobs_of(gateway).put("acc/in/n/0", b"a picture")
    async with gateway.worker(echo(tokens_per_step=1, step_us=5_000)):
        request_id = await gateway.submit("word " * 5000, stream=True, attachments=(attached,))
        await gateway.until(
            lambda: any(isinstance(event, Preview) for event in gateway.events_of(request_id))
        )

        await gateway.queue().cancel(request_id)
        outcome = await gateway.outcome(request_id)
        left = gateway.home / "blobs" / "acc" / request_id
        async with asyncio.timeout(20):
            while left.exists():  # noqa: ASYNC110  # another process deletes it
                await asyncio.sleep(0.02)

    assert isinstance(outcome, Cancelled)


async def test_only_the_attempt_that_ends_the_job_leaves_blobs(gateway: Gateway) -> None:
    attached = await blobs_of(gateway).put("acc/in/n/0", b"a picture")
    catalog = echo(tokens_per_step=1, step_us=10_000)
    async with gateway.worker(catalog, name="one") as first:
        request_id = await gateway.submit("word " * 200, stream=True, attachments=(attached,))
        await gateway.until(
            lambda: any(isinstance(event, Preview) for event in gateway.events_of(request_id))
        )
        first.signal(signal.SIGSTOP)
        async with gateway.worker(catalog, name="two"):
            await expire_leases(gateway)
            await gateway.until(lambda: gateway.events[request_id][-1].attempt == 2)
            first.signal(signal.SIGCONT)

            outcome = await gateway.outcome(request_id)
            directory = gateway.home / "blobs" / "acc" / request_id
            async with asyncio.timeout(20):
                while len(list(directory.iterdir())) > 1:  # noqa: ASYNC110  # another process
                    await asyncio.sleep(0.02)

    assert isinstance(outcome, Completed)
    assert await blobs_of(gateway).get(outcome.blobs[0]) == b"a picture"


async def test_job_with_files_survives_a_crash_of_its_engine(gateway: Gateway) -> None:
    attached = await blobs_of(gateway).put("acc/in/n/0", PICTURE)
    async with gateway.worker(echo(tokens_per_step=1, step_us=5_000)) as worker:
        request_id = await gateway.submit("word " * 100, stream=True, attachments=(attached,))
        await gateway.until(lambda: request_id in gateway.events)

        os.kill(worker.engine_pid(), signal.SIGKILL)
        outcome = await gateway.outcome(request_id)

    assert isinstance(outcome, Completed)
    assert gateway.deliveries[request_id][0].attempt == 2
    assert await blobs_of(gateway).get(outcome.blobs[0]) == PICTURE


async def test_worker_without_a_blob_store_fails_jobs_with_files(gateway: Gateway) -> None:
    attached = await blobs_of(gateway).put("acc/in/n/0", b"a picture")
    async with gateway.worker(environ={"BLOB_URL": ""}):
        request_id = await gateway.submit("draw", attachments=(attached,))
        plain = await gateway.submit("as ever")

        outcome = await gateway.outcome(request_id)
        other = await gateway.outcome(plain)

    assert isinstance(outcome, Failed)
    assert (outcome.code, "no blob store" in outcome.message) == ("engine_error", True)
    assert isinstance(other, Completed)


# --- Separately ----------------------------------------------------------------------------------


class Desk:
    """Replaces the outbox, with a store in a separate directory."""

    def __init__(self, home: Path, *, patience_s: float = 20.0) -> None:
        self.home = home
        self.blobs = Blobs(home.as_uri())
        self.events: list[tuple[RequestId, Event]] = []
        self.ended: dict[RequestId, Outcome] = {}
        self.fetched: dict[RequestId, Fetched] = {}
        self.files = Attachments(
            self.blobs, send_event=self._send_event, end=self._end, patience_s=patience_s
        )

    def leased(self, name: str, *attachments: BlobRef, deadline_ms: int = 0) -> LeasedJob:
        job = Job(
            RequestId(name),
            "acc",
            "echo",
            "text-to-image",
            {},
            attachments=attachments,
            deadline_ms=deadline_ms,
        )
        return LeasedJob(job, "echo", "token", 1, "")

    def fetch(self, leased: LeasedJob) -> None:
        def keep(fetched: Fetched) -> None:
            self.fetched[leased.job.request_id] = fetched

        self.files.fetch(leased, keep)

    def block(self, name: str) -> Path:
        """Make the store fail for one request by a file in place of its directory."""
        path = self.home / "acc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"in the way")
        return path

    async def until_idle(self) -> None:
        async with asyncio.timeout(20):
            files = self.files
            while tasks := {*files._fetching.values(), *files._storing.values(), *files._deleting}:
                await asyncio.wait(tasks)

    def _send_event(self, leased: LeasedJob, event: Event) -> None:
        self.events.append((leased.job.request_id, event))

    def _end(self, leased: LeasedJob, outcome: Outcome) -> None:
        self.ended[leased.job.request_id] = outcome


@asynccontextmanager
async def open_desk(home: Path, *, patience_s: float = 20.0) -> AsyncIterator[Desk]:
    desk = Desk(home / "store", patience_s=patience_s)
    task = asyncio.create_task(desk.files.run())
    await asyncio.sleep(0)
    try:
        yield desk
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def made(*files: bytes) -> Completed:
    return Completed(Usage(images=len(files)), files=tuple(File("image/png", f) for f in files))


async def test_outputs_are_stored_in_order_under_the_leases_token(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        desk.files.end(desk.leased("req_1"), made(b"one", b"two", b"three"))
        await desk.until_idle()

        outcome = desk.ended[RequestId("req_1")]
        assert isinstance(outcome, Completed)
        assert [blob.key for blob in outcome.blobs] == [f"acc/req_1/token/{n}" for n in range(3)]
        assert [await desk.blobs.get(blob) for blob in outcome.blobs] == [b"one", b"two", b"three"]


async def test_slow_files_of_a_job_do_not_delay_other_jobs(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        slow, quick = desk.leased("req_slow"), desk.leased("req_quick")
        obstacle = desk.block("req_slow")

        desk.files.end(slow, made(b"picture"))
        desk.files.send_event(quick, Progress(1, 2))
        desk.files.end(quick, Completed(Usage()))

        assert desk.events == [(RequestId("req_quick"), Progress(1, 2))]
        assert list(desk.ended) == ["req_quick"]
        await asyncio.sleep(0.1)
        obstacle.unlink()
        await desk.until_idle()
        assert isinstance(desk.ended[RequestId("req_slow")], Completed)


async def test_events_of_one_job_stay_in_order(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        leased = desk.leased("req_1")
        desk.files.send_event(leased, Progress(1, 3))
        desk.files.send_event(leased, Sketch(0, 0, File("image/webp", b"a first look")))
        desk.files.send_event(leased, Progress(2, 3))
        desk.files.end(leased, made(b"picture"))
        await desk.until_idle()

    kinds = [type(event) for _, event in desk.events]
    assert kinds == [Progress, Preview, Progress]
    assert isinstance(desk.ended[RequestId("req_1")], Completed)


async def test_unreachable_store_fails_the_job_and_drops_previews(
    tmp_path: Path,
) -> None:
    async with open_desk(tmp_path, patience_s=0.3) as desk:
        leased = desk.leased("req_1")
        desk.block("req_1")
        desk.files.send_event(leased, Sketch(0, 0, File("image/webp", b"a first look")))
        desk.files.end(leased, made(b"picture"))
        await desk.until_idle()

    assert desk.events == []
    outcome = desk.ended[RequestId("req_1")]
    assert isinstance(outcome, Failed)
    assert outcome.code == "engine_error"
    assert outcome.message == "The output was produced but could not be stored."


async def test_output_over_the_limit_of_the_store_is_too_large(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        desk.blobs._bytes_max = 10
        desk.files.end(desk.leased("req_1"), made(b"fits", b"does not fit"))
        await desk.until_idle()

    outcome = desk.ended[RequestId("req_1")]
    assert isinstance(outcome, Failed)
    assert outcome.code == "output_too_large"
    assert left_in(desk.home) == set()


@pytest.mark.parametrize("outcome", [Failed("engine_error", "no"), Cancelled("client")])
async def test_unsuccessful_job_leaves_no_blobs_behind(tmp_path: Path, outcome: Outcome) -> None:
    async with open_desk(tmp_path) as desk:
        leased = desk.leased("req_1")
        desk.files.send_event(leased, Sketch(0, 0, File("image/webp", b"a first look")))
        desk.files.end(leased, outcome)
        await desk.until_idle()

    assert desk.ended[RequestId("req_1")] == outcome
    assert left_in(desk.home) == set()


async def test_lost_lease_stops_storing_and_deletes_stored_blobs(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        leased = desk.leased("req_1")
        desk.files.send_event(leased, Sketch(0, 0, File("image/webp", b"a first look")))
        await desk.until_idle()
        desk.files.end(leased, made(*[os.urandom(1_000_000)] * 8))
        await asyncio.sleep(0)

        assert desk.files.is_pending(leased)
        desk.files.drop(leased)
        await desk.until_idle()

    assert not desk.ended
    assert left_in(desk.home) == set()


async def test_dropped_fetch_is_not_reported(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        leased = desk.leased("req_1", await desk.blobs.put("acc/in/n/0", b"source"))
        desk.fetch(leased)
        assert desk.files.is_fetching(leased)

        desk.files.drop(leased)
        await desk.until_idle()

    assert not desk.fetched


async def test_deadline_or_unreachable_store_ends_a_fetch(tmp_path: Path) -> None:
    async with open_desk(tmp_path, patience_s=0.3) as desk:
        desk.block("in")
        unreachable = BlobRef("acc/in/n/0", 6, "0" * 64)
        past_ms = int(time.time() * 1000) - 1
        desk.fetch(desk.leased("req_late", unreachable, deadline_ms=past_ms))
        desk.fetch(desk.leased("req_1", unreachable))
        await desk.until_idle()

    assert desk.fetched[RequestId("req_late")] == Cancelled("deadline")
    failed = desk.fetched[RequestId("req_1")]
    assert isinstance(failed, Failed)
    assert failed.code == "engine_error"


async def test_large_answer_keeps_its_text_if_it_cannot_be_stored(tmp_path: Path) -> None:
    async with open_desk(tmp_path, patience_s=0.3) as desk:
        leased = desk.leased("req_1")
        desk.block("req_1")
        logprobs = tuple(TokenLogprob("word", -1.0, (("other", -2.0),) * 20) for _ in range(4000))
        output = {"choices": [Choice(0, "word " * 4000, "stop", logprobs)]}
        desk.files.store_output(leased, Completed(Usage(output_tokens=4000), output=output))
        await desk.until_idle()

    outcome = desk.ended[RequestId("req_1")]
    assert isinstance(outcome, Completed)
    (choice,) = outcome.output["choices"]
    assert (choice["text"], choice["logprobs"]) == ("word " * 4000, None)


async def test_streamed_audio_counts_as_delivered_even_if_its_file_cannot_be_stored(
    tmp_path: Path,
) -> None:
    async with open_desk(tmp_path, patience_s=0.3) as desk:
        leased = desk.leased("req_1")
        desk.block("req_1")
        leased.tally.record(AudioChunk(0, 0, b"streamed", 1500, 20))
        desk.files.end(leased, made(b"sound"))
        await desk.until_idle()

    outcome = desk.ended[RequestId("req_1")]
    assert isinstance(outcome, Failed)
    assert outcome.delivered
    assert (outcome.usage.audio_ms, outcome.usage.characters) == (1500, 20)


async def test_last_full_preview_of_a_cancelled_image_is_delivered_and_kept(
    tmp_path: Path,
) -> None:
    async with open_desk(tmp_path) as desk:
        leased = desk.leased("req_1")
        for index in range(2):
            file = File("image/png", b"look %d" % index)
            desk.files.send_event(leased, Sketch(0, index, file, full=True))
        desk.files.send_event(leased, Sketch(1, 0, File("image/webp", b"thumbnail")))
        desk.files.end(leased, Cancelled("client", usage=Usage(requests=1, images=2, steps=9)))
        await desk.until_idle()
        await desk.files.deleted()

        outcome = desk.ended[RequestId("req_1")]
        assert isinstance(outcome, Cancelled)
        assert outcome.delivered
        assert (outcome.usage.images, outcome.usage.steps) == (1, 9)
        (blob,) = outcome.blobs
        assert await desk.blobs.get(blob) == b"look 1"
        assert outcome.output["media"][0]["role"] == "preview"

"""A worker without a model: it follows the contract, and tests see the jobs it was given.

It leases jobs, reads what is attached, writes outputs into the store and completes. The prompt may
ask for what can go wrong: ``!fail`` fails the job, ``!slow`` takes its time until it is cancelled,
``!second`` fails the second picture alone, ``!unread`` returns what an upstream charges but nobody
can read, ``!flaky`` fails whoever asks for it first. It writes as well: a text is answered by
itself, by the model ``say-yes`` with ``yes``, and by the model ``broken`` not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import TimeoutError as RedisTimeout

from workers.contract.announcements import Announcement, Workers
from workers.contract.attempts import UnreadResult
from workers.contract.blobs import Blobs, blob_key
from workers.contract.jobs import (
    BlobRef,
    Cancelled,
    ChatInput,
    Choice,
    Completed,
    Event,
    Failed,
    Job,
    Outcome,
    Preview,
    Progress,
    SentEvent,
    Started,
    Timings,
    Usage,
    decode_job,
    encode,
)
from workers.contract.media import ImageInput, Medium, MusicInput, SpeechInput, VideoInput
from workers.contract.queue import Completion, Lease, Queue, wait_for_work
from workers.contract.redis import connect
from workers.contract.streams import LogEntry, publish
from workers.media.pixels import MediaError
from workers.media.recordings import read_audio

SLOW_S = 20.0
SPOKEN_MAX_S = 5
"""Of a recording to speak like."""
STEP_US = 20_000
"""What it says that a step took."""


def png(width: int, height: int, shade: int = 0) -> bytes:
    """Return a grey image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    rows = (b"\0" + bytes([shade % 256]) * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", head),
            chunk(b"IDAT", zlib.compress(rows)),
            chunk(b"IEND", b""),
        ]
    )


def mp4(size: int = 3000) -> bytes:
    """Nothing that plays, but what begins like it."""
    return b"\0\0\0\x18ftypisom\0\0\2\0isomiso2" + bytes(size)


def wav(duration_ms: int) -> bytes:
    """Silence."""
    data = bytes(duration_ms * 16)
    head = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 8000, 16000, 2, 16)
    body = b"WAVE" + head + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body


@dataclass
class Artist:
    models: tuple[str, ...]
    redis_url: str
    namespace: str
    blobs: Blobs
    jobs: list[Job] = field(default_factory=list)
    attached: dict[str, list[bytes]] = field(default_factory=dict)
    """What each request brought, by its id."""

    async def work(self, stop: threading.Event) -> None:
        client = connect(self.redis_url)
        tasks: set[asyncio.Task[None]] = set()
        queues = {model: Queue(client, model, namespace=self.namespace) for model in self.models}
        announced = Announcement("artist", models=self.models, loaded=self.models)
        while not stop.is_set():
            # Other tests of this process can stop this thread for longer than a command may take.
            with contextlib.suppress(RedisTimeout):
                await Workers(client, namespace=self.namespace).announce(announced)
                await wait_for_work(client, list(self.models), 0.2, namespace=self.namespace)
                for queue in queues.values():
                    for lease in await queue.lease("artist", 16, lease_ms=60_000):
                        task = asyncio.create_task(self._serve(client, queue, lease))
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()
        await client.aclose()

    async def _serve(self, client: Redis, queue: Queue, lease: Lease) -> None:
        job = decode_job(lease.payload)
        self.jobs.append(job)
        self.attached[job.request_id] = [await self.blobs.get(ref) for ref in job.attachments]
        seq = 0

        async def say(event: Event) -> None:
            nonlocal seq
            seq += 1
            data = encode((SentEvent(job.request_id, lease.attempt, seq, event),))
            entry = LogEntry(id=job.request_id, attempt=lease.attempt, seq=seq, data=data)
            await publish(client, {lease.reply: data}, [entry], namespace=self.namespace)

        await say(Started("artist", lease.attempt))
        outcome = await self._run(queue, lease, job, say)
        status = {"Completed": "ok", "Failed": "failed", "Cancelled": "cancelled"}
        await queue.complete(
            [
                Completion(
                    lease.id,
                    lease.token,
                    status[type(outcome).__name__],  # type: ignore[arg-type]
                    encode(outcome),
                )
            ]
        )

    async def _run(self, queue: Queue, lease: Lease, job: Job, say: Any) -> Outcome:
        if job.task == "text-generation":
            return _write(job)
        prompt = job.input.get("prompt") or job.input.get("text", "")
        if (
            "!flaky" in prompt
            and [each.input.get("prompt") for each in self.jobs].count(prompt) < 2
        ):
            return Failed("upstream_unavailable", "The brush slipped.")
        if "!fail" in prompt:
            return Failed("engine_error", "The brush broke.")
        if "!unread" in prompt:
            result = UnreadResult("it contains no image", "r-7", "their-name", "host", '{"a":[1]}')
            usage = Usage(requests=1)
            return Failed("upstream_error", "It was no image.", usage=usage, unread=result)
        if "!slow" in prompt:
            deadline = time.monotonic() + SLOW_S
            while time.monotonic() < deadline:
                beat = await queue.heartbeat([(lease.id, lease.token)])
                if lease.id in beat.cancelled:
                    return Cancelled("client")
                await say(Progress(1, 4))
                await asyncio.sleep(0.1)
        await say(Progress(1, 2))
        number = 0

        async def put(data: bytes, content_type: str) -> BlobRef:
            nonlocal number
            owner = job.stored_under or job.request_id
            key = blob_key(job.account_id, owner, lease.token, number)
            number += 1
            return await self.blobs.put(key, data, content_type=content_type)

        if job.task in ("text-to-speech", "voice-clone"):
            recordings = self.attached[job.request_id]
            return await self._speak(msgspec.convert(job.input, SpeechInput), recordings, put)
        if job.task == "text-to-music":
            return await self._play(msgspec.convert(job.input, MusicInput), put)
        if job.task == "text-to-speech":
            return await self._play(MusicInput(prompt), put)
        if "video" in job.task or job.task == "talking-head":
            return await self._film(msgspec.convert(job.input, VideoInput), put, say)
        return await self._draw(msgspec.convert(job.input, ImageInput), put, say)

    async def _draw(self, asked: ImageInput, put: Any, say: Any) -> Completed:
        width, height = (asked.width or 64) * asked.scale, (asked.height or 64) * asked.scale
        for index in range(asked.n):
            for preview in range(asked.previews):
                blob = await put(png(8, 8, preview), "image/png")
                await say(Preview(index, blob, preview))
        media: list[Medium] = []
        blobs: list[BlobRef] = []
        for index in range(asked.n):
            if index == 1 and "!second" in asked.prompt:
                media.append(Medium("image", index, error="The brush broke."))
                continue
            blobs.append(await put(png(width, height, asked.seed + index), "image/png"))
            media.append(
                Medium(
                    "image",
                    index,
                    blob=len(blobs) - 1,
                    content_type="image/png",
                    width=width,
                    height=height,
                    seed=asked.seed + index,
                )
            )
        usage = Usage(requests=1, images=len(blobs), steps=len(blobs) * (asked.steps or 4))
        return Completed(
            usage,
            Timings(forward_us=STEP_US * usage.steps),
            output=_output(media),
            blobs=tuple(blobs),
            worker="artist",
        )

    async def _film(self, asked: VideoInput, put: Any, say: Any) -> Completed:
        for preview in range(asked.previews):
            await say(Preview(0, await put(png(8, 8, preview), "image/png"), preview))
        duration_ms = asked.duration_ms or 2000
        width, height = asked.width or 64, asked.height or 64
        blobs = (await put(mp4(), "video/mp4"), await put(png(8, 8), "image/png"))
        media = [
            Medium(
                "video",
                blob=0,
                content_type="video/mp4",
                width=width,
                height=height,
                duration_ms=duration_ms,
                fps=asked.fps or 8,
                seed=asked.seed,
            ),
            Medium("image", blob=1, role="thumbnail", content_type="image/png", width=8, height=8),
        ]
        usage = Usage(requests=1, video_ms=duration_ms, steps=asked.steps or 4)
        return Completed(usage, output=_output(media), blobs=blobs, worker="artist")

    async def _speak(
        self, asked: SpeechInput, recordings: Sequence[bytes], put: Any
    ) -> Completed | Failed:
        """As long as the recording, or a second."""
        duration_ms = 1000
        if asked.recording:
            try:
                heard = read_audio(recordings[-1], rate=8000, seconds_max=SPOKEN_MAX_S)
            except MediaError as error:
                return Failed("invalid_input", str(error), param="recording")
            duration_ms = round(heard.seconds * 1000)
        blobs = (await put(wav(duration_ms), "audio/wav"),)
        medium = Medium(
            "audio", blob=0, content_type="audio/wav", duration_ms=duration_ms, sample_rate=8000
        )
        usage = Usage(requests=1, audio_ms=duration_ms, characters=len(asked.text))
        return Completed(usage, output=_output([medium]), blobs=blobs, worker="artist")

    async def _play(self, asked: MusicInput, put: Any) -> Completed:
        duration_ms = asked.duration_ms or 1000
        blobs = (await put(wav(duration_ms), "audio/wav"),)
        medium = Medium(
            "audio",
            blob=0,
            content_type="audio/wav",
            duration_ms=duration_ms,
            sample_rate=8000,
            seed=asked.seed,
        )
        usage = Usage(requests=1, audio_ms=duration_ms, characters=len(asked.prompt))
        return Completed(usage, output=_output([medium]), blobs=blobs, worker="artist")


def _write(job: Job) -> Outcome:
    asked = msgspec.convert(job.input, ChatInput)
    text = asked.messages[-1].content
    if "!fail" in text or job.model == "broken":
        return Failed("engine_error", "The pen broke.")
    if job.model.startswith("say-"):
        text = job.model.removeprefix("say-")
    usage = Usage(requests=1, input_tokens=len(text.split()), output_tokens=len(text.split()))
    choice = Choice(0, text, "stop")
    return Completed(usage, output={"choices": [msgspec.to_builtins(choice)]}, worker="artist")


def _output(media: Sequence[Medium]) -> dict[str, Any]:
    return {"media": [msgspec.to_builtins(medium) for medium in media]}


@contextlib.contextmanager
def at_work(
    models: Sequence[str], redis_url: str, namespace: str, blob_url: str
) -> Iterator[Artist]:
    artist = Artist(tuple(models), redis_url, namespace, Blobs(blob_url))
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(artist.work(stop)))
    thread.start()
    try:
        yield artist
    finally:
        stop.set()
        thread.join()

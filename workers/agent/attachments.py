"""Files of jobs: attachments are read before a job is handed over, outputs stored before its end.

Between a lease and its host, and between a host and the queue, a job with files passes through
here; any other is let through at once. Each job has a task of its own, so a slow store keeps nobody
waiting but those whose files it holds, and what is said of one job stays in order. What an attempt
has stored is deleted again unless the attempt is what counts in the end. Knows no queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import msgspec

from workers.agent.outbox import OUTCOME_BYTES_MAX, LeasedJob, end_badly
from workers.contract.blobs import (
    BlobDamaged,
    BlobError,
    BlobMissing,
    Blobs,
    BlobTooLarge,
    BlobUnavailable,
    blob_key,
)
from workers.contract.delivered import chargeable, preview_media
from workers.contract.jobs import (
    VALUE_TYPE,
    BlobRef,
    Cancelled,
    Completed,
    Event,
    Failed,
    Job,
    Outcome,
    Preview,
    Sketch,
    Usage,
    pack_value,
    unpack_value,
)
from workers.contract.media import File

log = logging.getLogger(__name__)

PATIENCE_S: Final = 30.0
"""With a store that does not answer, for what a job cannot do without."""
PREVIEW_S: Final = 5.0
"""The same for a preview, which is better left out than late."""
TRANSFERS_MAX: Final = 16
"""Reads and writes of the store at a time."""
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class AttachmentSet:
    """A job, whole, and the attachments that it came with."""

    job: Job
    files: tuple[bytes, ...]


Fetched: TypeAlias = AttachmentSet | Failed | Cancelled


class Attachments:
    """For all jobs of a worker; ``say`` and ``end`` are the outbox's.

    Without a store (``blobs`` is None) a job with files fails.
    """

    def __init__(
        self,
        blobs: Blobs | None,
        *,
        say: Callable[[LeasedJob, Event], None],
        end: Callable[[LeasedJob, Outcome], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._blobs = blobs
        self._say = say
        self._end = end
        self._patience_s = patience_s
        self._tasks = asyncio.TaskGroup()
        self._transfers = asyncio.Semaphore(TRANSFERS_MAX)
        self._fetching: dict[LeasedJob, asyncio.Task[None]] = {}
        self._lines: dict[LeasedJob, deque[Event | Outcome | _Large]] = {}
        self._storing: dict[LeasedJob, asyncio.Task[None]] = {}
        self._deleting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Own the tasks of all jobs, for ever; when cancelled, end them."""
        async with self._tasks:
            await asyncio.Event().wait()

    def holds(self, held: LeasedJob) -> bool:
        """Whether something of this job is still under way here."""
        return held in self._fetching or held in self._lines

    # --- In ---------------------------------------------------------------------------------------

    def fetch(self, held: LeasedJob, then: Callable[[Fetched], None]) -> None:
        """Read a job's attachments and pass them on, or the outcome that they lead to.

        ``then`` is not called if the job is dropped meanwhile.
        """
        self._fetching[held] = self._tasks.create_task(self._fetch(held, then))

    def is_fetching(self, held: LeasedJob) -> bool:
        return held in self._fetching

    async def _fetch(self, held: LeasedJob, then: Callable[[Fetched], None]) -> None:
        deadline_ms = held.job.deadline_ms
        left_s = deadline_ms / 1000 - time.time() if deadline_ms else None
        fetched: Fetched
        try:
            async with asyncio.timeout(left_s):
                fetched = await self._read(held)
        except TimeoutError:
            fetched = Cancelled("deadline")
        except Exception as error:
            log.exception("attachments not read", extra={"request_id": held.job.request_id})
            fetched = Failed("engine_error", f"The files cannot be read ({type(error).__name__}).")
        finally:
            self._fetching.pop(held, None)
        then(fetched)

    async def _read(self, held: LeasedJob) -> AttachmentSet | Failed:
        if self._blobs is None:
            return _no_store()
        give_up_s = time.monotonic() + self._patience_s
        try:
            async with asyncio.TaskGroup() as group:
                reads = [
                    group.create_task(self._read_one(self._blobs, place, ref, give_up_s))
                    for place, ref in enumerate(_brought(held.job))
                ]
        except ExceptionGroup as group:
            first = _first(group)
            if isinstance(first, _Unusable):
                return first.failure
            raise
        job, files = held.job, tuple(read.result() for read in reads)
        if job.stored_input is None:
            return AttachmentSet(job, files)
        try:
            given = unpack_value(files[-1])
        except msgspec.DecodeError:
            return Failed("invalid_input", "The stored input of the request cannot be read.")
        whole = msgspec.structs.replace(job, input=given, stored_input=None)
        return AttachmentSet(whole, files[:-1])

    async def _read_one(self, blobs: Blobs, place: int, ref: BlobRef, give_up_s: float) -> bytes:
        delay_s = RETRY_MIN_S
        while True:
            try:
                async with asyncio.timeout(max(0.0, give_up_s - time.monotonic())):
                    async with self._transfers:
                        return await blobs.get(ref)
            except BlobMissing:
                failure = Failed("invalid_input", f"Input file {place} is not there.")
                raise _Unusable(failure) from None
            except BlobDamaged:
                message = f"Input file {place} is damaged: it is not what was uploaded."
                raise _Unusable(Failed("invalid_input", message)) from None
            except (BlobUnavailable, TimeoutError) as error:
                log.warning("attachment not read", extra={"error": str(error)})
                if time.monotonic() + delay_s > give_up_s:
                    message = "The files of the request cannot be read at present."
                    raise _Unusable(Failed("engine_error", message)) from None
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    # --- Out --------------------------------------------------------------------------------------

    def say(self, held: LeasedJob, event: Event) -> None:
        """Pass an event on, a sketch as the preview that it becomes."""
        if held in self._lines or isinstance(event, Sketch):
            self._queue(held, event)
        else:
            self._say(held, event)

    def end(self, held: LeasedJob, outcome: Outcome) -> None:
        """Pass an outcome on once everything that was said and made is stored."""
        made = isinstance(outcome, Completed) and outcome.files
        if held in self._lines or made or held.stored:
            self._queue(held, outcome)
        else:
            self._end(held, outcome)

    def keep_output(self, held: LeasedJob, outcome: Outcome) -> None:
        """Store the output of an outcome that is too large for the queue, then end the job."""
        self._queue(held, _Large(outcome))

    def drop(self, held: LeasedJob) -> None:
        """Forget a job whose lease is lost, and delete what was stored for it."""
        tasks = [
            task
            for task in (self._fetching.pop(held, None), self._storing.pop(held, None))
            if task is not None
        ]
        self._lines.pop(held, None)
        for task in tasks:
            task.cancel()
        self._discard(held, tasks)

    async def stored(self) -> None:
        """Wait until what is being stored now has been passed on."""
        if self._storing:
            await asyncio.wait(self._storing.values())

    async def deleted(self) -> None:
        """Wait until what is being deleted now is gone."""
        if self._deleting:
            await asyncio.wait(self._deleting)

    def _queue(self, held: LeasedJob, item: Event | Outcome | _Large) -> None:
        line = self._lines.get(held)
        if line is None:
            self._lines[held] = deque((item,))
            self._storing[held] = self._tasks.create_task(self._work_off(held, self._lines[held]))
        else:
            line.append(item)

    async def _work_off(self, held: LeasedJob, line: deque[Event | Outcome | _Large]) -> None:
        while line:
            match line[0]:
                case Sketch() as sketch:
                    await self._preview(held, sketch)
                case _Large(outcome=large):
                    self._end(held, await self._with_stored_output(held, large))
                case Completed() as completed:
                    outcome = await self._store(held, completed)
                    if isinstance(outcome, Failed):
                        outcome = _with_previews(held, outcome)
                        self._discard(held)
                    self._end(held, outcome)
                case Failed() | Cancelled() as outcome:
                    outcome = _with_previews(held, outcome)
                    self._discard(held)
                    self._end(held, outcome)
                case event:
                    self._say(held, event)
            line.popleft()
        del self._lines[held], self._storing[held]

    async def _preview(self, held: LeasedJob, sketch: Sketch) -> None:
        if self._blobs is None:
            return
        try:
            ref = await self._put(self._blobs, held, sketch.file, min(PREVIEW_S, self._patience_s))
        except Exception as error:
            log.warning("preview not stored", extra={"error": type(error).__name__})
            return
        if sketch.full:
            held.shown[sketch.output] = ref
        self._say(held, Preview(sketch.output, ref, sketch.index, sketch.full))

    async def _store(self, held: LeasedJob, completed: Completed) -> Outcome:
        if not completed.files:
            return completed
        if self._blobs is None:
            return end_badly(held, completed, _no_store())
        try:
            async with asyncio.TaskGroup() as group:
                puts = [
                    group.create_task(self._put(self._blobs, held, file, self._patience_s))
                    for file in completed.files
                ]
        except ExceptionGroup as group:
            first = _first(group)
            if isinstance(first, BlobTooLarge):
                failure = Failed("output_too_large", f"An output is too large: {first}.")
            else:
                extra = {"request_id": held.job.request_id}
                log.error("output not stored", extra=extra, exc_info=first)
                failure = Failed("engine_error", "The output was made but could not be stored.")
            return end_badly(held, completed, failure)
        blobs = (*completed.blobs, *(put.result() for put in puts))
        return msgspec.structs.replace(completed, blobs=blobs, files=())

    async def _with_stored_output(self, held: LeasedJob, outcome: Outcome) -> Outcome:
        """An answer is never lost for its size: if it cannot be stored, it does without its log
        probabilities, and only what is still too large then fails."""
        if self._blobs is not None:
            packed = File(VALUE_TYPE, pack_value(outcome.output))
            try:
                ref = await self._put(self._blobs, held, packed, self._patience_s)
                return msgspec.structs.replace(outcome, output={}, stored=ref)
            except (BlobError, TimeoutError) as error:
                log.error("large output not stored", extra={"error": type(error).__name__})
        choices = msgspec.to_builtins(outcome.output.get("choices", ()))
        if not choices or len(pack_value(outcome.output)) <= OUTCOME_BYTES_MAX:
            return outcome
        plain = [{**choice, "logprobs": None} for choice in choices]
        return msgspec.structs.replace(outcome, output={**outcome.output, "choices": plain})

    async def _put(self, blobs: Blobs, held: LeasedJob, file: File, patience_s: float) -> BlobRef:
        """Raise ``BlobError`` or ``TimeoutError`` if it was in vain."""
        job = held.job
        key = blob_key(
            job.account_id, job.stored_under or job.request_id, held.token, len(held.stored)
        )
        # Noted first: what is broken off may have been written all the same.
        held.stored.append(key)
        delay_s = RETRY_MIN_S
        give_up_s = time.monotonic() + patience_s
        while True:
            try:
                async with asyncio.timeout(max(0.0, give_up_s - time.monotonic())):
                    async with self._transfers:
                        return await blobs.put(key, file.data, content_type=file.content_type)
            except (BlobUnavailable, TimeoutError) as error:
                log.warning("blob not stored", extra={"error": str(error)})
                if time.monotonic() + delay_s > give_up_s:
                    raise
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    def _discard(self, held: LeasedJob, after: Sequence[asyncio.Task[None]] = ()) -> None:
        """Delete what an attempt has stored once these tasks have ended."""
        if self._blobs is not None and held.stored:
            keys, held.stored = held.stored, []
            task = self._tasks.create_task(self._delete(self._blobs, keys, after))
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

    async def _delete(
        self, blobs: Blobs, keys: Sequence[str], after: Sequence[asyncio.Task[None]]
    ) -> None:
        """As well as can be: what stays behind goes when all of the request does."""
        if after:
            await asyncio.wait(after)
        try:
            async with asyncio.timeout(self._patience_s), self._transfers:
                await blobs.delete(keys)
        except (BlobError, TimeoutError) as error:
            log.warning("blobs not deleted", extra={"error": type(error).__name__})


@dataclass(frozen=True, slots=True)
class _Large:
    """An outcome whose output is to be stored."""

    outcome: Outcome


class _Unusable(Exception):
    """An attachment that a job cannot be run without."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _brought(job: Job) -> tuple[BlobRef, ...]:
    """What a job needs from the store: its attachments, and last its input if that lies there."""
    if job.stored_input is None:
        return job.attachments
    return (*job.attachments, job.stored_input)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


_Ended = TypeVar("_Ended", bound=Failed | Cancelled)


def _with_previews(held: LeasedJob, outcome: _Ended) -> _Ended:
    """Add to an outcome that is not a success the pictures that were shown before it: they are
    charged for, and kept as its output."""
    if not held.shown:
        return outcome
    media, blobs = preview_media(held.shown)
    kept = {blob.key for blob in blobs}
    held.stored = [key for key in held.stored if key not in kept]
    shown = Usage(requests=1, images=len(blobs))
    usage = chargeable(outcome.usage, shown)
    return msgspec.structs.replace(
        outcome, delivered=True, usage=usage, output={"media": media}, blobs=blobs
    )


def _no_store() -> Failed:
    return Failed("engine_error", "This worker has no store for files; its operator has to set it.")

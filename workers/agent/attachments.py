"""Files of jobs: reads attachments before a job is submitted and stores outputs before it ends.

Jobs with files pass through this module between their lease and their host, and again between host
and queue; other jobs are passed on immediately. Each job has a separate task, so a slow blob store
delays only jobs with files, and the events of one job stay in order. Blobs of an attempt are
deleted unless that attempt ends the job. Knows no queue.
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

from workers.agent.outbox import OUTCOME_BYTES_MAX, LeasedJob, replace_by_failure
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
"""Time to keep retrying an unresponsive blob store for files that a job requires."""
PREVIEW_S: Final = 5.0
"""The same for previews: a late preview is dropped."""
TRANSFERS_MAX: Final = 16
"""Maximum number of concurrent reads and writes of the blob store."""
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class AttachmentSet:
    """A job with its complete input, and the contents of its attachments."""

    job: Job
    files: tuple[bytes, ...]


Fetched: TypeAlias = AttachmentSet | Failed | Cancelled


class Attachments:
    """The files of all jobs of a worker; ``send_event`` and ``end`` are methods of the outbox.

    Without a blob store (``blobs`` is None) a job with files fails.
    """

    def __init__(
        self,
        blobs: Blobs | None,
        *,
        send_event: Callable[[LeasedJob, Event], None],
        end: Callable[[LeasedJob, Outcome], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._blobs = blobs
        self._send_event = send_event
        self._end = end
        self._patience_s = patience_s
        self._tasks = asyncio.TaskGroup()
        self._transfers = asyncio.Semaphore(TRANSFERS_MAX)
        self._fetching: dict[LeasedJob, asyncio.Task[None]] = {}
        self._unsent: dict[LeasedJob, deque[Event | Outcome | _Large]] = {}
        self._storing: dict[LeasedJob, asyncio.Task[None]] = {}
        self._deleting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Own the tasks of all jobs until cancelled."""
        async with self._tasks:
            await asyncio.Event().wait()

    def is_pending(self, leased: LeasedJob) -> bool:
        """Whether files, events or the outcome of this job are still being processed here."""
        return leased in self._fetching or leased in self._unsent

    # --- In ---------------------------------------------------------------------------------------

    def fetch(self, leased: LeasedJob, on_fetched: Callable[[Fetched], None]) -> None:
        """Read a job's attachments and pass them to ``on_fetched``, or the outcome if that fails.

        ``on_fetched`` is not called if the job is dropped meanwhile.
        """
        self._fetching[leased] = self._tasks.create_task(self._fetch(leased, on_fetched))

    def is_fetching(self, leased: LeasedJob) -> bool:
        return leased in self._fetching

    async def _fetch(self, leased: LeasedJob, on_fetched: Callable[[Fetched], None]) -> None:
        deadline_ms = leased.job.deadline_ms
        left_s = deadline_ms / 1000 - time.time() if deadline_ms else None
        fetched: Fetched
        try:
            async with asyncio.timeout(left_s):
                fetched = await self._read(leased)
        except TimeoutError:
            fetched = Cancelled("deadline")
        except Exception as error:
            log.exception("could not read attachments", extra={"request_id": leased.job.request_id})
            fetched = Failed("engine_error", f"Could not read the files ({type(error).__name__}).")
        finally:
            self._fetching.pop(leased, None)
        on_fetched(fetched)

    async def _read(self, leased: LeasedJob) -> AttachmentSet | Failed:
        if self._blobs is None:
            return _no_blob_store()
        give_up_s = time.monotonic() + self._patience_s
        try:
            async with asyncio.TaskGroup() as group:
                reads = [
                    group.create_task(self._read_one(self._blobs, place, ref, give_up_s))
                    for place, ref in enumerate(_blob_refs(leased.job))
                ]
        except ExceptionGroup as group:
            first = _first_error(group)
            if isinstance(first, _Unusable):
                return first.failure
            raise
        job, files = leased.job, tuple(read.result() for read in reads)
        if job.stored_input is None:
            return AttachmentSet(job, files)
        try:
            given = unpack_value(files[-1])
        except msgspec.DecodeError:
            return Failed("invalid_input", "The stored input of the request could not be decoded.")
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
                failure = Failed("invalid_input", f"Input file {place} does not exist.")
                raise _Unusable(failure) from None
            except BlobDamaged:
                message = f"Input file {place} is damaged: it differs from what was uploaded."
                raise _Unusable(Failed("invalid_input", message)) from None
            except (BlobUnavailable, TimeoutError) as error:
                log.warning("could not read an attachment", extra={"error": str(error)})
                if time.monotonic() + delay_s > give_up_s:
                    message = "The files of the request are currently unavailable."
                    raise _Unusable(Failed("engine_error", message)) from None
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    # --- Out --------------------------------------------------------------------------------------

    def send_event(self, leased: LeasedJob, event: Event) -> None:
        """Send an event; a sketch is stored and sent as a preview."""
        if leased in self._unsent or isinstance(event, Sketch):
            self._queue(leased, event)
        else:
            self._send_event(leased, event)

    def end(self, leased: LeasedJob, outcome: Outcome) -> None:
        """Complete a job once all its events are sent and its files stored."""
        made = isinstance(outcome, Completed) and (outcome.files or outcome.unread)
        if leased in self._unsent or made or leased.stored:
            self._queue(leased, outcome)
        else:
            self._end(leased, outcome)

    def store_output(self, leased: LeasedJob, outcome: Outcome) -> None:
        """Store an output that is too large for the queue, then complete the job."""
        self._queue(leased, _Large(outcome))

    def drop(self, leased: LeasedJob) -> None:
        """Forget a job whose lease was lost, and delete its blobs."""
        tasks = [
            task
            for task in (self._fetching.pop(leased, None), self._storing.pop(leased, None))
            if task is not None
        ]
        self._unsent.pop(leased, None)
        for task in tasks:
            task.cancel()
        self._discard(leased, tasks)

    async def stored(self) -> None:
        """Wait until all files being stored now have been passed on."""
        if self._storing:
            await asyncio.wait(self._storing.values())

    async def deleted(self) -> None:
        """Wait until the current deletions have ended."""
        if self._deleting:
            await asyncio.wait(self._deleting)

    def _queue(self, leased: LeasedJob, item: Event | Outcome | _Large) -> None:
        queue = self._unsent.get(leased)
        if queue is None:
            self._unsent[leased] = deque((item,))
            self._storing[leased] = self._tasks.create_task(
                self._send_all(leased, self._unsent[leased])
            )
        else:
            queue.append(item)

    async def _send_all(self, leased: LeasedJob, queue: deque[Event | Outcome | _Large]) -> None:
        while queue:
            match queue[0]:
                case Sketch() as sketch:
                    await self._store_preview(leased, sketch)
                case _Large(outcome=large):
                    self._end(leased, await self._with_stored_output(leased, large))
                case Completed() as completed:
                    outcome = await self._store_files(leased, completed)
                    if isinstance(outcome, Failed):
                        outcome = _with_previews(leased, outcome)
                        self._discard(leased)
                    self._end(leased, outcome)
                case Failed() | Cancelled() as outcome:
                    outcome = _with_previews(leased, outcome)
                    self._discard(leased)
                    self._end(leased, outcome)
                case event:
                    self._send_event(leased, event)
            queue.popleft()
        del self._unsent[leased], self._storing[leased]

    async def _store_preview(self, leased: LeasedJob, sketch: Sketch) -> None:
        if self._blobs is None:
            return
        try:
            ref = await self._put(
                self._blobs, leased, sketch.file, min(PREVIEW_S, self._patience_s)
            )
        except Exception as error:
            log.warning("could not store a preview", extra={"error": type(error).__name__})
            return
        if sketch.full:
            leased.previews[sketch.output] = ref
        self._send_event(leased, Preview(sketch.output, ref, sketch.index, sketch.full))

    async def _store_files(self, leased: LeasedJob, completed: Completed) -> Outcome:
        if not completed.files:
            return _without_read(completed)
        if self._blobs is None:
            return _not_stored(leased, completed, _no_blob_store())
        # Each ends by itself: a cancelled write may still reach the store, after the deletion.
        stored = await asyncio.gather(
            *(self._put(self._blobs, leased, file, self._patience_s) for file in completed.files),
            return_exceptions=True,
        )
        refs = tuple(each for each in stored if isinstance(each, BlobRef))
        if len(refs) < len(stored):
            first = next(each for each in stored if isinstance(each, BaseException))
            if isinstance(first, BlobTooLarge):
                failure = Failed("output_too_large", f"An output is too large: {first}.")
            else:
                extra = {"request_id": leased.job.request_id}
                log.error("could not store an output", extra=extra, exc_info=first)
                failure = Failed("engine_error", "The output was produced but could not be stored.")
            return _not_stored(leased, completed, failure)
        blobs = (*completed.blobs, *refs)
        return _without_read(msgspec.structs.replace(completed, blobs=blobs, files=()))

    async def _with_stored_output(self, leased: LeasedJob, outcome: Outcome) -> Outcome:
        """Store a large output. If that fails, drop its log probabilities; only an output that is
        still too large makes the request fail."""
        if self._blobs is not None:
            packed = File(VALUE_TYPE, pack_value(outcome.output))
            try:
                ref = await self._put(self._blobs, leased, packed, self._patience_s)
                return msgspec.structs.replace(outcome, output={}, stored=ref)
            except (BlobError, TimeoutError) as error:
                log.error("could not store a large output", extra={"error": type(error).__name__})
        choices = msgspec.to_builtins(outcome.output.get("choices", ()))
        if not choices or len(pack_value(outcome.output)) <= OUTCOME_BYTES_MAX:
            return outcome
        plain = [{**choice, "logprobs": None} for choice in choices]
        return msgspec.structs.replace(outcome, output={**outcome.output, "choices": plain})

    async def _put(self, blobs: Blobs, leased: LeasedJob, file: File, patience_s: float) -> BlobRef:
        """Store a file, with retries. Raise ``BlobError`` or ``TimeoutError`` if they all fail."""
        job = leased.job
        key = blob_key(
            job.account_id, job.stored_under or job.request_id, leased.token, len(leased.stored)
        )
        # Recorded first: an interrupted write may have succeeded.
        leased.stored.append(key)
        delay_s = RETRY_MIN_S
        give_up_s = time.monotonic() + patience_s
        while True:
            try:
                async with asyncio.timeout(max(0.0, give_up_s - time.monotonic())):
                    async with self._transfers:
                        return await blobs.put(key, file.data, content_type=file.content_type)
            except (BlobUnavailable, TimeoutError) as error:
                log.warning("could not store a blob", extra={"error": str(error)})
                if time.monotonic() + delay_s > give_up_s:
                    raise
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    def _discard(self, leased: LeasedJob, after: Sequence[asyncio.Task[None]] = ()) -> None:
        """Delete the blobs of an attempt once these tasks have ended."""
        if self._blobs is not None and leased.stored:
            keys, leased.stored = leased.stored, []
            task = self._tasks.create_task(self._delete(self._blobs, keys, after))
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

    async def _delete(
        self, blobs: Blobs, keys: Sequence[str], after: Sequence[asyncio.Task[None]]
    ) -> None:
        """Delete blobs, best effort: those that remain are deleted with the request."""
        if after:
            await asyncio.wait(after)
        try:
            async with asyncio.timeout(self._patience_s), self._transfers:
                await blobs.delete(keys)
        except (BlobError, TimeoutError) as error:
            log.warning("could not delete blobs", extra={"error": type(error).__name__})


@dataclass(frozen=True, slots=True)
class _Large:
    """An outcome whose output must be stored."""

    outcome: Outcome


class _Unusable(Exception):
    """A required attachment could not be read; ``failure`` is the outcome of the job."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _blob_refs(job: Job) -> tuple[BlobRef, ...]:
    """Return the blobs that a job needs: its attachments and, last, its input if that is stored."""
    if job.stored_input is None:
        return job.attachments
    return (*job.attachments, job.stored_input)


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_error(first) if isinstance(first, BaseExceptionGroup) else first


_OutcomeT = TypeVar("_OutcomeT", bound=Failed | Cancelled)


def _with_previews(leased: LeasedJob, outcome: _OutcomeT) -> _OutcomeT:
    """Add the delivered previews to the outcome of a request that did not succeed: they are charged
    and kept as its output."""
    if not leased.previews:
        return outcome
    media, blobs = preview_media(leased.previews)
    kept = {blob.key for blob in blobs}
    leased.stored = [key for key in leased.stored if key not in kept]
    previews = Usage(requests=1, images=len(blobs))
    usage = chargeable(outcome.usage, previews)
    return msgspec.structs.replace(
        outcome, delivered=True, usage=usage, output={"media": media}, blobs=blobs
    )


def _without_read(completed: Completed) -> Completed:
    """Drop an upstream's result that was read and stored completely."""
    if completed.unread is None or completed.unread.reason:
        return completed
    return msgspec.structs.replace(completed, unread=None)


def _not_stored(leased: LeasedJob, completed: Completed, failure: Failed) -> Failed:
    """Return the failure of a job whose outputs could not be stored; an upstream's result is kept
    for the operator."""
    failed = replace_by_failure(leased, completed, failure)
    if completed.unread is None:
        return failed
    unread = msgspec.structs.replace(completed.unread, reason=failure.message)
    return msgspec.structs.replace(failed, unread=unread)


def _no_blob_store() -> Failed:
    return Failed("engine_error", "This worker has no blob store; its operator must configure one.")

"""Runs one batch, from the check of its file to its last line, in the gateway that has its lease.

Each line becomes one ordinary request, with an idempotency key made of batch, line and attempt. If
the gateway crashes, the next one finds the request by its key, so that it is charged once. The
result of a line is recorded before another line takes its slot. No other state is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import IO, Any, Final, TypeVar

from sqlalchemy import Connection

from gateway import metrics
from gateway.accounts.keys import KeyInfo, key_by_id
from gateway.batches import store
from gateway.batches.check import Check, lines_of, mistake
from gateway.batches.endpoint import BatchEndpoint
from gateway.batches.lines import (
    BatchLine,
    LineResult,
    completed_result,
    read_checked,
    read_line,
    refused_result,
    unrun_result,
)
from gateway.batches.names import EarlierAttempt, last_attempts, prefix_of, submission_of
from gateway.batches.store import Batch, LeaseLost, Status
from gateway.batches.stored import StoredOutputs
from gateway.errors import (
    RequestFailed,
    TollgateError,
    TooManyRequests,
    Unavailable,
    rename,
)
from gateway.failpoints import reach
from gateway.files.store import File, FileGone, Files, read_input
from gateway.group_commit import GroupCommit
from gateway.ledger.closed import ClosedRequest
from gateway.ledger.settle import BATCH_RETENTION
from gateway.requests.caller import Caller
from gateway.requests.service import Requests
from gateway.requests.ticket import Ticket
from gateway.settings import Settings, in_days
from gateway.sql.database import Database
from gateway.sql.outages import OUTAGE
from gateway.tasks.submission import Submission
from workers.contract.blobs import BlobDamaged, BlobMissing
from workers.contract.jobs import RequestId

log = logging.getLogger(__name__)

T = TypeVar("T")

BEAT_S: Final = 1.0
"""Maximum interval at which a running batch renews its lease and checks for a cancellation."""
PAUSES_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before a line that was refused for lack of capacity is submitted again; the last one
repeats."""
SMALL_BYTES: Final = 64 * 1024
"""Size of a line above which it is parsed in a thread."""
PAGE: Final = 500
"""Number of results read at a time."""

_STOPS: Final = {
    "cancelling": RequestFailed(
        "batch_cancelled", "This request was not run: the batch was cancelled before."
    ),
    "expired": RequestFailed(
        "batch_expired",
        "This request could not be run before the completion window expired.",
    ),
}


class Run:
    def __init__(
        self,
        batch: Batch,
        key: KeyInfo,
        endpoint: BatchEndpoint,
        *,
        database: Database,
        files: Files,
        requests: Requests,
        stored: StoredOutputs,
        settings: Settings,
    ) -> None:
        self._batch = batch
        self._key = key
        self._endpoint = endpoint
        self._database = database
        self._files = files
        self._requests = requests
        self._stored = stored
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.batch_in_flight)
        self._in_flight: set[RequestId] = set()
        self._stopping = asyncio.Event()
        self._stop: TollgateError | None = None

        async def write(results: Sequence[LineResult]) -> list[None]:
            await self._write(lambda connection: store.record(connection, batch, results))
            return [None] * len(results)

        self._results = GroupCommit(write)

    async def run(self) -> None:
        """Run the batch to its end.

        Raise ``LeaseLost`` if another gateway has claimed it. After any other exception it can be
        run again, and continues where it stopped.
        """
        async with asyncio.TaskGroup() as group:
            beat = group.create_task(self._beat())
            with tempfile.TemporaryFile() as copy:
                await self._advance(copy)
            beat.cancel()

    async def _advance(self, copy: IO[bytes]) -> None:
        batch = self._batch
        self._check_stop(batch.status)
        status = batch.status
        try:
            if batch.ending is None:
                await self._fetch(copy)
            if status == "validating":
                status = await self._validate(copy)
        except (BlobMissing, BlobDamaged, FileGone) as error:
            log.error("could not read the input of %s: %s", batch.id, error)
            await self._finalize(
                "failed", [mistake(None, "file_damaged", "The input file cannot be read.")]
            )
            return
        if status == "failed":
            return
        if batch.ending is None and (batch.total or status == "in_progress"):
            await self._execute(copy)
        await self._finalize("expired" if self._stop is _STOPS["expired"] else "completed")

    # --- The check of the file -------------------------------------------------------------------

    async def _fetch(self, copy: IO[bytes]) -> None:
        """Copy the input to a local file, because a batch can run for a day."""
        found = await self._database.read(
            lambda connection: read_input(connection, self._batch.input_file_id)
        )
        async for chunk in self._files.content(found):
            await asyncio.to_thread(copy.write, chunk)

    async def _validate(self, copy: IO[bytes]) -> Status:
        """Check every line before any is run. Return the batch's next status."""
        check = Check(self._batch, self._endpoint, requests=self._requests, settings=self._settings)
        checked = await check.file(copy, self._stopping)
        if self._stop is not None:
            return "cancelling"
        if checked.mistakes:
            await self._finalize("failed", checked.mistakes)
            return "failed"
        now = datetime.now(UTC)
        return await self._write(
            lambda connection: store.begin(
                connection,
                self._batch,
                total=checked.total,
                model=checked.model,
                most_nanos=checked.most_nanos,
                now=now,
            )
        )

    # --- The lines -------------------------------------------------------------------------------

    async def _execute(self, copy: IO[bytes]) -> None:
        """Run every line that has not ended; once stopped, only await those already submitted."""
        while True:
            done = await self._database.read(
                lambda connection: store.ended_lines(connection, self._batch.id)
            )
            placed = await self._placed()
            async with asyncio.TaskGroup() as group:
                async for page in lines_of(copy):
                    for line in page:
                        if line.number in done:
                            continue
                        await self._slots.acquire()
                        if self._stop is None or line.number in placed:
                            group.create_task(self._line(line, placed.get(line.number)))
                        else:
                            self._slots.release()
            if self._stop is None:
                return
            # A commit that was in doubt when the batch was stopped may have succeeded.
            if not set(await self._placed()) - await self._database.read(
                lambda connection: store.ended_lines(connection, self._batch.id)
            ):
                break
        await self._close_rest(copy)

    async def _placed(self) -> dict[int, EarlierAttempt]:
        """Return the lines that were submitted before, so that they are not submitted again."""
        batch = self._batch
        names = await self._database.read(
            lambda connection: store.placed_requests(
                connection, batch.account_id, prefix_of(batch.id)
            )
        )
        return last_attempts(batch.id, names)

    async def _line(self, line: BatchLine, earlier: EarlierAttempt | None) -> None:
        try:
            result = await self._result(line, earlier)
            if result is not None:
                await self._persist(lambda: self._results.submit(result))
                metrics.BATCH_LINES.labels("succeeded" if result.succeeded else "failed").inc()
                reach("batch_line_recorded")
                await self._forget(line, result)
        finally:
            self._slots.release()

    async def _forget(self, line: BatchLine, result: LineResult) -> None:
        """Delete an output that may not be kept outside the batch's files."""
        closed = result.closed
        if closed is not None and self._endpoint.forgets(read_checked(line)[1]):
            await self._persist(lambda: self._requests.forget(closed.account_id, closed.request_id))

    async def _result(self, line: BatchLine, earlier: EarlierAttempt | None) -> LineResult | None:
        """Run one line to its end; None if the batch was stopped before it was accepted."""
        batch = self._batch
        attempt, in_doubt = 0, False
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            try:
                ticket = await self._ticket(line, attempt, earlier)
            except (TooManyRequests, Unavailable, *OUTAGE) as error:
                log.debug("line %d of %s waits: %s", line.number, batch.id, type(error).__name__)
                in_doubt = in_doubt or isinstance(error, OUTAGE)
            except TollgateError as error:
                # An earlier submission that was in doubt may have been accepted.
                earlier = (await self._placed()).get(line.number) if in_doubt else None
                if earlier is None:
                    rename(error, self._endpoint.names)
                    return refused_result(batch.id, line, error)
                in_doubt = False
                continue
            else:
                closed = await self._ended(ticket)
                if closed.was_queued or self._stop is not None:
                    return await self._to_result(line, closed)
                attempt = (earlier.attempt if earlier else attempt) + 1
                earlier = None
            if self._stop is not None:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
        raise AssertionError

    async def _ticket(
        self, line: BatchLine, attempt: int, earlier: EarlierAttempt | None
    ) -> Ticket:
        """Submit a line, or resume its earlier request. Raise ``TollgateError``."""
        batch = self._batch
        if earlier is not None:
            return self._requests.resume(batch.account_id, earlier.request_id, earlier.accepted_at)
        submission = await _off_loop(line, lambda: self._submission(line, attempt))
        return await self._requests.submit(Caller(self._key), submission)

    def _submission(self, line: BatchLine, attempt: int) -> Submission:
        bytes_max = self._endpoint.body_bytes_max(self._settings)
        checked = read_line(line, self._endpoint, self._requests.quotes.find, bytes_max=bytes_max)
        return submission_of(self._batch, self._endpoint, checked, line.number, attempt)

    async def _ended(self, ticket: Ticket) -> ClosedRequest:
        self._in_flight.add(ticket.request_id)
        try:
            with ticket:
                return await self._persist(ticket.ended)
        finally:
            self._in_flight.discard(ticket.request_id)

    async def _to_result(self, line: BatchLine, closed: ClosedRequest) -> LineResult:
        if closed.status == "expired":
            # The request's deadline is that of the batch; the queue noticed it first.
            self._end_with(_STOPS["expired"])
        if self._stop is not None and closed.status in ("cancelled", "expired"):
            return unrun_result(self._batch.id, line, self._stop, closed=closed)
        return await _off_loop(
            line, lambda: completed_result(self._batch.id, line, closed, self._endpoint)
        )

    async def _close_rest(self, copy: IO[bytes]) -> None:
        """Record why the remaining lines were not run."""
        assert self._stop is not None
        stop = self._stop
        done = await self._database.read(
            lambda connection: store.ended_lines(connection, self._batch.id)
        )
        async for page in lines_of(copy):
            rest = [
                unrun_result(self._batch.id, line, stop) for line in page if line.number not in done
            ]
            if rest:
                await self._write(functools.partial(store.record, batch=self._batch, results=rest))

    # --- The end ---------------------------------------------------------------------------------

    async def _finalize(
        self, ending: Status, mistakes: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Write the files; they become visible together with the end of the batch."""
        now = datetime.now(UTC)
        batch = await self._write(
            lambda connection: store.finalize(
                connection, self._batch, ending=ending, mistakes=mistakes, now=now
            )
        )
        made = []
        for file_id, kind in ((batch.output_file_id, "output"), (batch.error_file_id, "error")):
            if file_id is not None:
                made.append(await self._write_file(batch, file_id, kind))
        reach("batch_files_written")
        ended_at = datetime.now(UTC)
        await self._write(lambda connection: store.finish(connection, batch, made, now=ended_at))
        metrics.BATCHES.labels(batch.ending).inc()

    async def _write_file(self, batch: Batch, file_id: str, kind: str) -> File:
        # Bytes left by a gateway that crashed while it wrote this file.
        await self._files.delete_bytes(batch.account_id, file_id)
        content_type = "application/jsonl"
        blob = await self._files.write(
            batch.account_id,
            file_id,
            self._written(succeeded=kind == "output"),
            content_type=content_type,
        )
        now = datetime.now(UTC)
        kept = in_days(self._settings.file_retention_days)
        if batch.output_expires_s:
            kept = timedelta(seconds=batch.output_expires_s)
        return File(
            id=file_id,
            account_id=batch.account_id,
            purpose="batch_output",
            filename=f"{batch.id}_{kind}.jsonl",
            blob=blob,
            created_at=now,
            expires_at=None if kept is None else now + kept,
        )

    async def _written(self, *, succeeded: bool) -> AsyncIterator[bytes]:
        last = 0
        writer = self._stored.writer(self._batch.expires_at + BATCH_RETENTION)
        while True:
            rows = await self._database.read(
                functools.partial(
                    store.results_after,
                    batch_id=self._batch.id,
                    line=last,
                    succeeded=succeeded,
                    limit=PAGE,
                )
            )
            if not rows:
                return
            last = rows[-1][0]
            if not succeeded or not self._endpoint.brings_files:
                yield b"".join(text + b"\n" for _, text in rows)
                continue
            for _, text in rows:
                yield await writer.write(text) + b"\n"

    # --- The lease -------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Renew the lease, read the key's limits again; cancel running requests after a
        cancellation or the window's end."""
        lease_s = self._settings.batch_lease_s
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(min(BEAT_S, lease_s / 4))
            try:
                status, self._key = await self._write(self._renew)
                self._check_stop(status)
                renewed = time.monotonic()
            except OUTAGE as error:
                if time.monotonic() - renewed > lease_s:
                    raise LeaseLost(self._batch.id) from None
                log.warning("could not renew %s: %s", self._batch.id, type(error).__name__)
            if self._stop is not None:
                await self._stop_running()

    def _renew(self, connection: Connection) -> tuple[Status, KeyInfo]:
        until = datetime.now(UTC) + timedelta(seconds=self._settings.batch_lease_s)
        status = store.renew(connection, self._batch, until=until)
        return status, key_by_id(connection, self._key.id)

    def _check_stop(self, status: Status) -> None:
        """Stop if the batch was cancelled or its window is over."""
        if status == "cancelling":
            self._end_with(_STOPS["cancelling"])
        elif datetime.now(UTC) >= self._batch.expires_at:
            self._end_with(_STOPS["expired"])

    def _end_with(self, reason: TollgateError) -> None:
        if self._stop is None:
            self._stop = reason
            self._stopping.set()

    async def _stop_running(self) -> None:
        for request_id in tuple(self._in_flight):
            with contextlib.suppress(*OUTAGE):
                await self._requests.cancel(self._batch.account_id, request_id)

    async def _persist(self, do: Callable[[], Awaitable[T]]) -> T:
        """Repeat an action until no outage prevents it, however long that takes."""
        while True:
            try:
                return await do()
            except OUTAGE as error:
                log.warning("%s is waiting: %s", self._batch.id, type(error).__name__)
                await asyncio.sleep(BEAT_S)

    async def _write(self, function: Callable[[Connection], T]) -> T:
        return await self._database.write(function)


async def _off_loop(line: BatchLine, read: Callable[[], T]) -> T:
    """Parse a line, in a thread if it is long, so as not to block the event loop."""
    if line.text is not None and len(line.text) > SMALL_BYTES:
        return await asyncio.to_thread(read)
    return read()

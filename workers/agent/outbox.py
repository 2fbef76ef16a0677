"""Sends what a worker returns: events to the gateways that stream them, and outcomes.

Messages that arrive during one round trip are sent in the next. So one frame per gateway and one
completion call per model carry everything that a step has produced, however many jobs it concerns.
The events of a job are sent before its outcome. Knows no engine. While Redis is unreachable,
messages are kept and then sent; events can be lost with the server, outcomes cannot.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from workers.contract.delivered import Tally, chargeable
from workers.contract.jobs import (
    BlobRef,
    Cancelled,
    Completed,
    Event,
    Failed,
    Job,
    Outcome,
    RequestId,
    SentEvent,
    Started,
    encode,
)
from workers.contract.queue import Completion, CompletionResult, Queue
from workers.contract.streams import EVENTS_S, LogEntry, publish

log = logging.getLogger(__name__)

LOG_EVENTS: Final = 10
"""Number of events of a job after which a log entry is written before ``LOG_S`` has passed."""
LOG_S: Final = 0.25
INLINE_BYTES_MAX: Final = 64 * 1024
"""Maximum size of an outcome in the queue; the output of a larger one becomes a blob."""
OUTCOME_BYTES_MAX: Final = 1024 * 1024
"""The same limit if the output cannot be stored."""

NOTE_RETRY_S: Final = 1.0
"""Interval of attempts to keep a note for a job that the server does not know."""
RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 2.0

_T = TypeVar("_T")
_STATUS: Final[dict[type[Outcome], Literal["ok", "failed", "cancelled"]]] = {
    Completed: "ok",
    Failed: "failed",
    Cancelled: "cancelled",
}


@dataclass(slots=True, eq=False)
class LeasedJob:
    """A job leased by this worker, until the queue has accepted its outcome."""

    job: Job
    model: str
    token: str
    attempt: int
    reply: str
    """Mailbox of the waiting gateway."""
    seq: int = 0
    unlogged: list[SentEvent] = field(default_factory=list)
    ended: bool = False
    """Whether its host has reported the outcome."""
    lost: bool = False
    """Whether its lease was lost or released."""
    stored: list[str] = field(default_factory=list)
    """Keys of blobs that this attempt has written or started to write."""
    leased_s: float = field(default_factory=time.monotonic)
    previews: dict[int, BlobRef] = field(default_factory=dict)
    """Last full-size preview sent, by output."""
    tally: Tally = field(default_factory=Tally)
    """What this attempt has delivered."""
    stores_output: bool = False
    """Whether its output is too large for the queue."""

    def can_continue(self, attempt: int) -> bool:
        """Whether a job that is leased again to the worker running it can continue.

        This happens after the queue was wiped and refilled. A streamed job must restart, because
        each attempt has to send its events from the beginning.
        """
        return self.ended or not self.job.stream or self.attempt == attempt


async def retry_forever(what: str, call: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat an idempotent call until Redis answers."""
    delay_s = RETRY_MIN_S
    while True:
        try:
            return await call()
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("%s failed, retrying", what, extra={"error": type(error).__name__})
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
        delay_s = min(delay_s * 2, RETRY_MAX_S)


class Outbox:
    """The outbox of all models of a worker; ``done`` is called with the queue's answer."""

    def __init__(
        self,
        redis: Redis,
        queues: Mapping[str, Queue],
        *,
        namespace: str,
        worker: str,
        done: Callable[[LeasedJob, CompletionResult], None],
    ) -> None:
        self.on_too_large: Callable[[LeasedJob, Outcome], None] | None = None
        """Called with an outcome too large for the queue; it must end the job with a smaller
        one."""
        self.events_s = EVENTS_S
        """Retention of event logs after their last event."""
        self._redis = redis
        self._queues = queues
        self._namespace = namespace
        self._worker = worker
        self._on_completed = done
        self._frames: dict[str, list[SentEvent]] = {}
        self._unlogged: dict[RequestId, LeasedJob] = {}
        self._due: dict[RequestId, LeasedJob] = {}
        self._ends: list[tuple[LeasedJob, Outcome]] = []
        self._flushes: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()

    def send_event(self, leased: LeasedJob, event: Event) -> None:
        """Send an event to the mailbox and the event log of a job."""
        if leased.seq == 0 and not isinstance(event, Started):
            self.send_event(leased, Started(self._worker, leased.attempt))
        leased.seq += 1
        sent = SentEvent(leased.job.request_id, leased.attempt, leased.seq, event)
        if leased.reply:
            self._frames.setdefault(leased.reply, []).append(sent)
        leased.tally.record(event)
        leased.unlogged.append(sent)
        if len(leased.unlogged) >= LOG_EVENTS:
            self._due[sent.request_id] = leased
        if not self._unlogged:
            asyncio.get_running_loop().call_later(LOG_S, self._log_all)
        self._unlogged[sent.request_id] = leased
        self._wake.set()

    def end(self, leased: LeasedJob, outcome: Outcome) -> None:
        """Send an outcome, after all events of the job."""
        leased.ended = True
        if leased.unlogged:
            self._due[leased.job.request_id] = leased
        self._ends.append((leased, outcome))
        self._wake.set()

    async def keep_note(self, leased: LeasedJob, note: str) -> bool:
        """Store a note for the job's next holder. Return False if another worker holds the job
        now."""
        queue = self._queues[leased.model]
        while not (leased.ended or leased.lost):
            token = leased.token
            keep = functools.partial(queue.keep_note, leased.job.request_id, token, note)
            answer = await retry_forever("keeping a note", keep)
            if answer == "kept" or (answer == "fenced" and leased.token == token):
                return answer == "kept"
            # The server was wiped; a gateway has the note and will enqueue the job again.
            await asyncio.sleep(NOTE_RETRY_S)
        return False

    async def flushed(self) -> None:
        """Wait until everything so far has been sent to Redis."""
        flush = asyncio.get_running_loop().create_future()
        self._flushes.append(flush)
        self._wake.set()
        await flush

    async def run(self) -> None:
        """Send messages until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            flushes, self._flushes = self._flushes, []
            await self._flush()
            for flush in flushes:
                if not flush.done():
                    flush.set_result(None)

    def _log_all(self) -> None:
        if self._unlogged:
            self._due |= self._unlogged
            self._wake.set()

    async def _flush(self) -> None:
        frames = {mailbox: encode(tuple(events)) for mailbox, events in self._frames.items()}
        entries = [_log_entry(leased) for leased in self._due.values() if leased.unlogged]
        for request_id in self._due:
            self._unlogged.pop(request_id, None)
        self._frames, self._due = {}, {}
        ends, self._ends = self._ends, []
        if frames or entries:
            await retry_forever("sending events", lambda: self._publish(frames, entries))
        by_model: dict[str, list[tuple[LeasedJob, Outcome]]] = {}
        for leased, outcome in ends:
            by_model.setdefault(leased.model, []).append((leased, outcome))
        for model, batch in by_model.items():
            await self._complete(self._queues[model], batch)

    async def _publish(self, frames: Mapping[str, bytes], entries: list[LogEntry]) -> None:
        try:
            await publish(
                self._redis,
                frames,
                entries,
                namespace=self._namespace,
                events_s=self.events_s,
            )
        except ResponseError as error:
            # Retrying would not help, and outcomes must not wait.
            log.error("Redis refused events", extra={"error": type(error).__name__})

    async def _complete(self, queue: Queue, batch: list[tuple[LeasedJob, Outcome]]) -> None:
        ended, done = [], []
        for leased, outcome in batch:
            data = encode(outcome)
            large = len(data) > INLINE_BYTES_MAX and not leased.stores_output
            if large and self.on_too_large is not None:
                leased.stores_output = True
                self.on_too_large(leased, outcome)
                continue
            ended.append(leased)
            done.append(_completion(leased, outcome, data))
        results = await retry_forever("completing", lambda: queue.complete(done)) if done else []
        for leased, result in zip(ended, results, strict=True):
            if result in ("fenced", "unknown"):
                log.warning(
                    "the queue has no lease for an outcome",
                    extra={"request_id": leased.job.request_id, "answer": result},
                )
            self._on_completed(leased, result)


def _completion(leased: LeasedJob, outcome: Outcome, data: bytes) -> Completion:
    if len(data) > OUTCOME_BYTES_MAX:
        log.warning("outcome is too large", extra={"request_id": leased.job.request_id})
        message = f"The output of {len(data)} bytes could not be stored."
        outcome = replace_by_failure(leased, outcome, Failed("output_too_large", message))
        data = encode(outcome)
    return Completion(leased.job.request_id, leased.token, _STATUS[type(outcome)], data)


def replace_by_failure(leased: LeasedJob, outcome: Outcome, failed: Failed) -> Failed:
    """Return the failure to report instead of an outcome. What was streamed stays delivered."""
    usage, delivered = outcome.usage, leased.tally.has_delivered
    return msgspec.structs.replace(
        failed,
        usage=chargeable(usage, leased.tally.usage()) if delivered else usage,
        timings=outcome.timings,
        worker=outcome.worker,
        delivered=delivered,
        details=outcome.details,
    )


def _log_entry(leased: LeasedJob) -> LogEntry:
    events, leased.unlogged = leased.unlogged, []
    return LogEntry(
        id=leased.job.request_id, attempt=leased.attempt, seq=leased.seq, data=encode(tuple(events))
    )

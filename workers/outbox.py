"""Everything that a worker sends back: events to whoever reads along, and how jobs ended.

What gathers while one round trip is under way goes out in the next, so one frame per gateway and
one completion call per model carry whatever a step has produced, however many jobs it concerned.
Events of a job are sent before its end. Knows no engine. While Redis is away everything waits here
and is sent when it is back: events may be lost with the server, ends may not.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from workers.contract.jobs import (
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
from workers.contract.streams import LogEntry, publish

log = logging.getLogger(__name__)

LOG_EVENTS: Final = 10
"""Events of a job that make one entry of its log, if they come faster than ``LOG_S``."""
LOG_S: Final = 0.25
OUTCOME_BYTES_MAX: Final = 1024 * 1024
"""What may travel through the queue: a long answer with all its log probabilities, but no media."""

RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 2.0

_T = TypeVar("_T")
_STATUS: Final[dict[type[Outcome], Literal["ok", "failed", "cancelled"]]] = {
    Completed: "ok",
    Failed: "failed",
    Cancelled: "cancelled",
}


@dataclass(slots=True, eq=False)
class Held:
    """A job on which this worker holds a lease, until the queue knows how it ended."""

    job: Job
    model: str
    token: str
    attempt: int
    reply: str
    """Mailbox of the gateway that waits."""
    seq: int = 0
    unlogged: list[SentEvent] = field(default_factory=list)
    ended: bool = False
    """Its host has done with it."""
    stored: list[str] = field(default_factory=list)
    """Keys of the blobs that this attempt has written, or begun to."""


async def insist(what: str, call: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat an idempotent call until Redis answers."""
    delay_s = RETRY_MIN_S
    while True:
        try:
            return await call()
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("%s failed, trying again", what, extra={"error": type(error).__name__})
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
        delay_s = min(delay_s * 2, RETRY_MAX_S)


class Outbox:
    """One for all models of a worker; ``done`` hears what the queue says to each end."""

    def __init__(
        self,
        redis: Redis,
        queues: Mapping[str, Queue],
        *,
        namespace: str,
        worker: str,
        done: Callable[[Held, CompletionResult], None],
    ) -> None:
        self._redis = redis
        self._queues = queues
        self._namespace = namespace
        self._worker = worker
        self._done = done
        self._frames: dict[str, list[SentEvent]] = {}
        self._unlogged: dict[RequestId, Held] = {}
        self._due: dict[RequestId, Held] = {}
        self._ends: list[tuple[Held, Outcome]] = []
        self._flushes: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()

    def say(self, held: Held, event: Event) -> None:
        """Send an event of a job to whoever reads along."""
        if held.seq == 0 and not isinstance(event, Started):
            self.say(held, Started(self._worker, held.attempt))
        held.seq += 1
        sent = SentEvent(held.job.request_id, held.attempt, held.seq, event)
        if held.reply:
            self._frames.setdefault(held.reply, []).append(sent)
        held.unlogged.append(sent)
        if len(held.unlogged) >= LOG_EVENTS:
            self._due[sent.request_id] = held
        if not self._unlogged:
            asyncio.get_running_loop().call_later(LOG_S, self._log_all)
        self._unlogged[sent.request_id] = held
        self._wake.set()

    def end(self, held: Held, outcome: Outcome) -> None:
        """Tell the queue how a job ended, after what was said of it."""
        held.ended = True
        if held.unlogged:
            self._due[held.job.request_id] = held
        self._ends.append((held, outcome))
        self._wake.set()

    async def flushed(self) -> None:
        """Wait until Redis has everything that was said so far."""
        flush = asyncio.get_running_loop().create_future()
        self._flushes.append(flush)
        self._wake.set()
        await flush

    async def run(self) -> None:
        """Send what there is, for ever."""
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
        entries = [_log_entry(held) for held in self._due.values() if held.unlogged]
        for request_id in self._due:
            self._unlogged.pop(request_id, None)
        self._frames, self._due = {}, {}
        ends, self._ends = self._ends, []
        if frames or entries:
            await insist("sending events", lambda: self._publish(frames, entries))
        by_model: dict[str, list[tuple[Held, Outcome]]] = {}
        for held, outcome in ends:
            by_model.setdefault(held.model, []).append((held, outcome))
        for model, batch in by_model.items():
            await self._complete(self._queues[model], batch)

    async def _publish(self, frames: Mapping[str, bytes], entries: list[LogEntry]) -> None:
        try:
            await publish(self._redis, frames, entries, namespace=self._namespace)
        except ResponseError as error:
            # Not a question of time, and ends must not wait for it.
            log.error("events refused", extra={"error": type(error).__name__})

    async def _complete(self, queue: Queue, batch: list[tuple[Held, Outcome]]) -> None:
        done = [_completion(held, outcome) for held, outcome in batch]
        results = await insist("completing", lambda: queue.complete(done))
        for (held, _), result in zip(batch, results, strict=True):
            if result in ("fenced", "unknown"):
                log.warning(
                    "the queue had no lease for an outcome",
                    extra={"request_id": held.job.request_id, "answer": result},
                )
            self._done(held, result)


def _completion(held: Held, outcome: Outcome) -> Completion:
    data = encode(outcome)
    if len(data) > OUTCOME_BYTES_MAX:
        log.warning("outcome too large", extra={"request_id": held.job.request_id})
        outcome = Failed(
            "output_too_large",
            f"The output is {len(data)} bytes long; at most {OUTCOME_BYTES_MAX} can be delivered.",
            usage=outcome.usage,
            timings=outcome.timings,
            worker=outcome.worker,
        )
        data = encode(outcome)
    return Completion(held.job.request_id, held.token, _STATUS[type(outcome)], data)


def _log_entry(held: Held) -> LogEntry:
    events, held.unlogged = held.unlogged, []
    return LogEntry(
        id=held.job.request_id, attempt=held.attempt, seq=held.seq, data=encode(tuple(events))
    )

"""The worker's agent: holds leases, renews them, hands jobs to their hosts, accounts for crashes.

One per device, or one on the CPU. Everything here is asyncio and short: heartbeats share neither a
thread nor an interpreter with a forward pass. It owns no tensor and knows no price. The invariant:
a job that was leased is completed, given back or, if the agent itself dies, left to its lease; and
what is still produced under a lost lease is never heard of.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from workers.agent.attachments import Attachments, AttachmentSet, Fetched
from workers.agent.engine_supervisor import EngineSupervisor
from workers.agent.outbox import LeasedJob, Outbox, insist
from workers.agent.room import ServedModel, serve_here
from workers.contract.blobs import Blobs
from workers.contract.jobs import Cancelled, Event, Failed, Job, Outcome, RequestId, decode_job
from workers.contract.models import ModelSpec
from workers.contract.queue import (
    LEASE_MS,
    Completion,
    CompletionResult,
    Lease,
    Queue,
    new_nonce,
    wait_for_work,
)
from workers.contract.streams import Announcement, Workers, hints
from workers.protocol.engine import CancelReason
from workers.protocol.ipc import JobHandoff
from workers.upstreams.host import UpstreamHost

log = logging.getLogger(__name__)

WAIT_S: Final = 2.0
"""Between two looks at a queue that has not called."""
REAP_S: Final = 1.0
ANNOUNCE_S: Final = 4.0
HINT_PAUSE_S: Final = 0.02
"""After a heartbeat; what is asked for meanwhile is answered by the next one, together."""
RETRY_S: Final = 0.5
SILENT_S: Final = 5 * WAIT_S
"""A model is not served any more if no lease call has succeeded for so long, though it could."""
HAND_OVER_S: Final = 2.0
"""For upstreams to say under which number an order runs that was just placed."""
GIVE_BACK_S: Final = 3.0
"""For Redis to take back what is left at the end; otherwise the leases lapse by themselves."""

_UNAVAILABLE: Final = (RedisError, OSError, TimeoutError)


class Agent:
    """Serves ``specs`` until it is told to end."""

    def __init__(
        self,
        redis: Redis,
        specs: Sequence[ModelSpec],
        *,
        blobs: Blobs | None,
        name: str,
        namespace: str,
        unavailable: Mapping[str, str],
        environ: Mapping[str, str],
        device: str,
        threads: int | None,
        preload: bool,
        drain_s: float,
        account_share: float = 1.0,
        ready: Callable[[str], None],
    ) -> None:
        self.worker = f"{name}-{secrets.token_hex(3)}"
        """Names this process for the time of its life, so that nobody inherits its leases."""
        self._redis = redis
        self._namespace = namespace
        self._unavailable = dict(unavailable)
        self._device = device
        self._drain_s = drain_s
        self._account_share = account_share
        self._say_ready = ready
        self._workers = Workers(redis, namespace=namespace)
        self._held: dict[RequestId, LeasedJob] = {}
        self._draining = asyncio.Event()
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._hinted = asyncio.Event()
        self._changed = asyncio.Event()
        self._withdrawn: asyncio.Queue[Collection[RequestId]] = asyncio.Queue()

        queues = {spec.name: Queue(redis, spec.name, namespace=namespace) for spec in specs}
        self._outbox = Outbox(
            redis, queues, namespace=namespace, worker=self.worker, done=self._done
        )
        self._files = Attachments(blobs, say=self._outbox.say, end=self._outbox.end)
        self._outbox.too_large = self._files.keep_output
        local = [spec for spec in specs if spec.engine is not None]
        self._engines = EngineSupervisor(
            local,
            worker=self.worker,
            preload=preload,
            threads=threads,
            report=self._hear,
            crashed=self._give_back_crashed,
            changed=self._change,
            withdrawn=self._withdrawn.put_nowait,
        )
        remote = [spec for spec in specs if spec.upstream is not None]
        self._upstreams = UpstreamHost(
            remote, worker=self.worker, environ=environ, report=self._hear, keep=self._keep
        )
        self._served = {
            spec.name: serve_here(spec, queues[spec.name], self._engines) for spec in local
        } | {
            spec.name: ServedModel(
                spec.name, queues[spec.name], self._upstreams, spec.upstream.concurrency
            )
            for spec in remote
            if spec.upstream is not None
        }

    def end(self) -> None:
        """Take nothing new, finish what runs, then end; asked again, give the rest back now."""
        if self._draining.is_set():
            self._stopping.set()
        self._draining.set()

    async def run(self) -> None:
        """Serve until drained. Raises only what nobody expected."""
        async with asyncio.TaskGroup() as group:
            start = group.create_task
            others = [
                start(self._upstreams.run()),
                start(self._outbox.run()),
                start(self._files.run()),
                start(self._beat()),
                start(self._listen()),
                start(self._reap()),
                start(self._announce()),
            ]
            if self._engine_models:
                others.append(start(self._engines.run()))
            serving = {model: start(self._serve(served)) for model, served in self._served.items()}
            self._change()
            await self._draining.wait()
            await self._drain(serving)
            for task in others:
                task.cancel()

    # --- Leasing ----------------------------------------------------------------------------------

    async def _serve(self, served: ServedModel) -> None:
        """Lease jobs of one model as long as there is room, and wait for more."""
        while True:
            await served.open.wait()
            try:
                async with served.leasing:
                    more = served.open.is_set() and await self._lease(served)
                if not more:
                    await wait_for_work(
                        self._redis, (served.model,), WAIT_S, namespace=self._namespace
                    )
            except _UNAVAILABLE as error:
                log.warning("no lease", extra={"error": type(error).__name__})
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))

    async def _lease(self, served: ServedModel) -> bool:
        """Take what fits and hand it over; say whether there may be more at once."""
        if not (wanted := served.wanted):
            self._reopen(served)
            return False
        served.nonce = served.nonce or new_nonce()
        leases = await served.queue.lease(
            self.worker, wanted, account_share=self._account_share, nonce=served.nonce
        )
        served.nonce = None
        served.asked_s = time.monotonic()
        if leases:
            leased_us = time.monotonic_ns() // 1000
            accepted = []
            for lease in leases:
                held = self._accept(served, lease)
                if held is None:
                    continue
                note = lease.note or held.job.note
                handed = JobHandoff(held.job, lease.queued_us, leased_us, lease.attempt, note=note)
                if held.job.attachments or held.job.stored_input is not None:
                    self._files.fetch(held, functools.partial(self._fetched, held, handed))
                else:
                    accepted.append(handed)
            if accepted:
                served.host.submit(accepted)
            self._reopen(served)
        return len(leases) == wanted

    def _fetched(self, held: LeasedJob, handed: JobHandoff, fetched: Fetched) -> None:
        match fetched:
            case AttachmentSet(job, files):
                handed = msgspec.structs.replace(handed, job=job, files=files)
                self._served[held.model].host.submit((handed,))
            case ended:
                self._hear((), ((held.job.request_id, ended),))

    def _accept(self, served: ServedModel, lease: Lease) -> LeasedJob | None:
        """Note a lease as held; return it if its job has to be run for that."""
        request_id = RequestId(lease.id)
        readable = True
        try:
            job = decode_job(lease.payload)
        except msgspec.DecodeError:
            readable = False
            job = Job(request_id, lease.account, served.model, task="", input={})
        known = self._held.get(request_id)
        if known is not None and known.can_go_on(lease.attempt):
            known.token, known.attempt, known.reply = lease.token, lease.attempt, lease.reply
            return None
        if known is not None:
            self._lose(known)
        held = LeasedJob(job, served.model, lease.token, lease.attempt, lease.reply)
        self._held[request_id] = held
        served.running += 1
        if not readable or job.model != served.model:
            log.error("job cannot be read", extra={"request_id": request_id})
            failure = Failed(code="invalid_input", message="The job could not be read.")
            self._hear((), ((request_id, failure),))
            return None
        return held

    def _reopen(self, served: ServedModel) -> None:
        """Open or close a model for leasing, whatever has changed."""
        ready = served.host is self._upstreams or (
            self._engines.ready and served.model not in self._engines.problems
        )
        if not ready or served.running >= served.capacity or self._draining.is_set():
            served.open.clear()
        elif not served.open.is_set():
            served.asked_s = time.monotonic()
            served.open.set()

    def _change(self) -> None:
        for served in self._served.values():
            self._reopen(served)
        self._changed.set()

    # --- What hosts report ------------------------------------------------------------------------

    def _hear(
        self,
        events: Sequence[tuple[RequestId, Event]],
        outcomes: Sequence[tuple[RequestId, Outcome]],
    ) -> None:
        for request_id, event in events:
            held = self._held.get(request_id)
            if held is not None and not held.ended:
                self._files.say(held, event)
        for request_id, outcome in outcomes:
            held = self._held.get(request_id)
            if held is not None and not held.ended:
                held.ended = True
                self._files.end(held, outcome)
                self._served[held.model].note(time.monotonic() - held.leased_s)
                self._make_room(held)

    async def _keep(self, request_id: RequestId, note: str) -> bool:
        held = self._held.get(request_id)
        return held is not None and await self._outbox.keep(held, note)

    def _make_room(self, held: LeasedJob) -> None:
        served = self._served[held.model]
        served.running -= 1
        if not served.open.is_set():
            self._reopen(served)

    def _done(self, held: LeasedJob, result: CompletionResult) -> None:
        """The queue has answered how a job ended."""
        if result == "fenced":
            self._files.drop(held)
        if self._held.get(held.job.request_id) is held:
            del self._held[held.job.request_id]
        if not self._held:
            self._idle.set()

    def _lose(self, held: LeasedJob) -> None:
        """Somebody else has the job now: stop, and say nothing more about it."""
        del self._held[held.job.request_id]
        held.lost = True
        self._files.drop(held)
        if not held.ended:
            self._served[held.model].host.abandon(held.job.request_id)
            self._make_room(held)

    # --- Leases, cancels and the queue's upkeep ---------------------------------------------------

    async def _beat(self) -> None:
        """Renew all leases every third of their length, and whenever a hint asks for news."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE_MS / 3000):
                    await self._hinted.wait()
            self._hinted.clear()
            try:
                await self._beat_once()
                await asyncio.sleep(HINT_PAUSE_S)
            except _UNAVAILABLE as error:
                log.warning("no heartbeat", extra={"error": type(error).__name__})
                self._hinted.set()
                await asyncio.sleep(RETRY_S)

    async def _beat_once(self) -> None:
        by_model: dict[str, list[tuple[str, str]]] = {}
        for request_id, held in self._held.items():
            by_model.setdefault(held.model, []).append((request_id, held.token))
        for model, pairs in by_model.items():
            news = await self._served[model].queue.heartbeat(pairs)
            if not (news.lost or news.cancelled or news.replies):
                continue
            tokens = dict(pairs)
            for held in self._still_held(news.lost, tokens):
                log.warning("lease lost", extra={"request_id": held.job.request_id})
                self._lose(held)
            for held in self._still_held(news.replies, tokens):
                held.reply = news.replies[held.job.request_id]
            for held in self._still_held(news.cancelled, tokens):
                reason = cast(CancelReason, news.cancelled[held.job.request_id])
                if self._files.is_fetching(held):
                    self._files.drop(held)
                    self._hear((), ((held.job.request_id, Cancelled(reason)),))
                else:
                    self._served[model].host.cancel(held.job.request_id, reason)

    def _still_held(self, ids: Iterable[str], tokens: Mapping[str, str]) -> list[LeasedJob]:
        """Of these jobs, those that still run under the lease that the heartbeat asked about."""
        found = [self._held.get(RequestId(request_id)) for request_id in ids]
        return [
            held
            for held in found
            if held
            and not (held.ended and not self._files.holds(held))
            and held.token == tokens[held.job.request_id]
        ]

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in hints(self._redis, self.worker, namespace=self._namespace):
                    self._hinted.set()
            except _UNAVAILABLE as error:
                log.warning("no hints", extra={"error": type(error).__name__})
                await asyncio.sleep(RETRY_S)

    async def _reap(self) -> None:
        while True:
            for served in self._served.values():
                try:
                    await served.queue.reap()
                except _UNAVAILABLE as error:
                    log.warning("not reaped", extra={"error": type(error).__name__})
                    break
            await asyncio.sleep(REAP_S)

    async def _announce(self) -> None:
        """Say what is served here and what is not, again and again, and at once after a change."""
        said = False
        while True:
            self._changed.clear()
            ready = self._engines.ready or not self._engine_models
            await insist("announcing", lambda: self._workers.announce(self._announcement()))
            if ready and not said:
                said = True
                self._say_ready(self.worker)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANNOUNCE_S):
                    await self._changed.wait()

    def _announcement(self) -> Announcement:
        unavailable = dict(self._unavailable)
        if not self._engines.available:
            unavailable |= dict.fromkeys(self._engine_models, self._engines.state)
        for model in self._engines.problems:
            unavailable[model] = "its engine could not be loaded; the worker's log says why"
        for model in self._upstreams.down:
            unavailable[model] = "its upstream does not answer; the worker asks it again and again"
        silent_s = time.monotonic() - SILENT_S
        for model, served in self._served.items():
            if served.open.is_set() and served.asked_s < silent_s:
                unavailable[model] = "its queue refuses to lease; the worker's log says why"
        return Announcement(
            worker=self.worker,
            models=tuple(model for model in self._served if model not in unavailable),
            loaded=tuple(self._engines.loaded),
            unavailable=unavailable,
            device=self._device,
            running=len(self._held),
            draining=self._draining.is_set(),
        )

    # --- Ends -------------------------------------------------------------------------------------

    @property
    def _engine_models(self) -> list[str]:
        return [model for model, served in self._served.items() if served.host is self._engines]

    async def _give_back_crashed(self, unharmed: Collection[RequestId]) -> None:
        """Give back the jobs of a dead engine; those it had not been given yet are not blamed."""
        for _ in range(2):  # flushing may find an outcome whose output is to be stored first
            await self._files.stored()  # for their leases are taken back with the others
            await self._outbox.flushed()
        for model in self._engine_models:
            served = self._served[model]
            async with served.leasing:
                returned = []
                for held in list(self._held.values()):
                    if held.model == model and not held.ended:
                        del self._held[held.job.request_id]
                        if held.job.request_id in unharmed or self._files.is_fetching(held):
                            returned.append(Completion(held.job.request_id, held.token, "retry"))
                        self._files.drop(held)
                served.running = 0
                complete = functools.partial(served.queue.complete, returned)
                await insist("giving back", complete)
                release = functools.partial(served.queue.release_worker, self.worker, crashed=True)
                await insist("giving back", release)
        if not self._held:
            self._idle.set()

    async def _drain(self, serving: Mapping[str, asyncio.Task[None]]) -> None:
        """Lease no more, let what runs come to its end for a while, then give back the rest."""
        log.info("draining", extra={"running": len(self._held)})
        self._change()
        await self._stop_leasing(serving)
        if self._held:
            self._idle.clear()
            fetching = filter(self._files.is_fetching, self._held.values())
            self._withdrawn.put_nowait([held.job.request_id for held in fetching])
            self._engines.withdraw()
            handing = asyncio.create_task(self._hand_back())
            waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._stopping)]
            await asyncio.wait(waits, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in (*waits, handing):
                wait.cancel()
        await self._upstreams.settled(HAND_OVER_S)
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self._give_back()
        except _UNAVAILABLE as error:
            log.warning("not given back", extra={"error": type(error).__name__})

    async def _hand_back(self) -> None:
        """Put what has not begun back to its place in the queue, where others can lease it."""
        while True:
            for request_id in await self._withdrawn.get():
                held = self._held.get(request_id)
                if held is not None and not held.ended:
                    del self._held[request_id]
                    self._files.drop(held)
                    served = self._served[held.model]
                    served.running -= 1
                    back = [Completion(request_id, held.token, "retry")]
                    await insist("handing back", functools.partial(served.queue.complete, back))
            if not self._held:
                self._idle.set()

    async def _stop_leasing(self, serving: Mapping[str, asyncio.Task[None]]) -> None:
        """Not in the midst of a call, or nobody would know what it has leased; if Redis answers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S):
                for model, task in serving.items():
                    async with self._served[model].leasing:
                        task.cancel()
        for task in serving.values():
            task.cancel()

    async def _give_back(self) -> None:
        for held in list(self._held.values()):
            if not held.ended or self._files.holds(held):
                self._lose(held)
        await self._outbox.flushed()
        for served in self._served.values():
            await served.queue.release_worker(self.worker, crashed=False)
        await self._workers.withdraw(self.worker)
        await self._files.deleted()

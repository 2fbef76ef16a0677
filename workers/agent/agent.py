"""The worker's agent: leases jobs, renews the leases, passes jobs to hosts and handles crashes.

One agent per device, or one on the CPU. All of it is asyncio and short: heartbeats share neither a
thread nor an interpreter with a forward pass. The agent knows neither tensors nor prices.
Invariant: a leased job is completed, requeued or, if the agent itself is killed, reclaimed when its
lease expires; whatever is still produced under a lost lease is discarded.
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
from redis.exceptions import RedisError

from workers.agent.announcer import Announcer, State
from workers.agent.attachments import Attachments, AttachmentSet, Fetched
from workers.agent.capacity import ServedModel
from workers.agent.catalog_file import Assignment, CatalogFile
from workers.agent.engine_supervisor import EngineSupervisor
from workers.agent.environment import allowed_environment
from workers.agent.lineup import Lineup
from workers.agent.outbox import LeasedJob, Outbox, retry_forever
from workers.contract.announcements import Wishes, Workers
from workers.contract.blobs import Blobs
from workers.contract.jobs import Cancelled, Event, Failed, Job, Outcome, RequestId, decode_job
from workers.contract.queue import (
    LEASE_MS,
    Completion,
    CompletionResult,
    Lease,
    Queue,
    new_nonce,
    wait_for_work,
)
from workers.contract.redis import QueueClient
from workers.contract.streams import EVENTS_S, notifications
from workers.protocol.engine import CancelReason
from workers.protocol.ipc import JobHandoff
from workers.upstreams.host import UpstreamHost

log = logging.getLogger(__name__)

WAIT_S: Final = 2.0
"""Longest wait for a wake marker before the queue is polled."""
RECLAIM_S: Final = 1.0
HEARTBEAT_PAUSE_S: Final = 0.02
"""Pause after a heartbeat; the next one answers all notifications that arrive meanwhile."""
RETRY_S: Final = 0.5
HANDOVER_S: Final = 2.0
"""Time for upstreams to return the number of a request that was just submitted."""
REQUEUE_S: Final = 3.0
"""Time to requeue the remaining jobs at the end; if it is exceeded, their leases expire."""

_UNAVAILABLE: Final = (RedisError, OSError, TimeoutError)


class Agent:
    """Serves the models of ``catalog``, first ``assignment``, until ``end`` is called."""

    def __init__(
        self,
        redis: QueueClient,
        catalog: CatalogFile,
        assignment: Assignment,
        *,
        blobs: Blobs | None,
        name: str,
        namespace: str,
        environ: Mapping[str, str],
        device: str,
        server_devices: Sequence[str] = (),
        threads: int | None,
        preload: bool,
        drain_s: float,
        budget_bytes: int | None = None,
        account_share: float = 1.0,
        events_s: int = EVENTS_S,
        ready: Callable[[str], None],
    ) -> None:
        self.worker = f"{name}-{secrets.token_hex(3)}"
        """Unique name of this process, so that no later process inherits its leases."""
        self._redis = redis
        self._namespace = namespace
        self._catalog = catalog
        self._device = device
        self._drain_s = drain_s
        self._account_share = account_share
        self._workers = Workers(redis, namespace=namespace)
        self._leased: dict[RequestId, LeasedJob] = {}
        self._draining, self._stopping = asyncio.Event(), asyncio.Event()
        self._idle = asyncio.Event()
        self._notified = asyncio.Event()
        self._paused = False
        """Whether an operator wishes that it drains."""
        self._loads: dict[str, str] = {}
        """The last wish to load each model."""
        self._withdrawn: asyncio.Queue[Collection[RequestId]] = asyncio.Queue()
        self._queues: dict[str, Queue] = {}
        outbox = self._outbox = Outbox(
            redis, self._queues, namespace=namespace, worker=self.worker, done=self._on_completed
        )
        outbox.events_s = events_s
        self._attachments = Attachments(blobs, send_event=outbox.send_event, end=outbox.end)
        outbox.on_too_large = self._attachments.store_output
        specs = assignment.specs
        self._engines = EngineSupervisor(
            [spec for spec in specs if spec.upstream is None],
            worker=self.worker,
            preload=preload,
            threads=threads,
            budget_bytes=budget_bytes,
            report=self._on_report,
            crashed=self._requeue_crashed,
            changed=self._update_all,
            withdrawn=self._withdrawn.put_nowait,
        )
        self._upstreams = UpstreamHost(
            [spec for spec in specs if spec.upstream is not None],
            worker=self.worker,
            environ=environ,
            report=self._on_report,
            keep_note=self._keep_note,
            server_environ=allowed_environment(environ),
            server_devices=server_devices,
            changed=self._update_all,
        )
        self._lineup = Lineup(
            assignment,
            self._engines,
            self._upstreams,
            new_queue=functools.partial(Queue, redis, namespace=namespace),
            queues=self._queues,
            leased=self._leased,
            lease=self._serve,
            changed=self._update_all,
        )
        self._served = self._lineup.served
        self._announcer = Announcer(
            self._workers,
            self.worker,
            device=device,
            engines=self._engines,
            upstreams=self._upstreams,
            lineup=self._lineup,
            catalog=catalog,
            state=self._state,
            obey=self._obey,
            ready=ready,
        )

    def end(self) -> None:
        """Stop leasing, finish running jobs, then stop. A second call requeues the rest."""
        if self._draining.is_set():
            self._stopping.set()
        self._draining.set()

    async def run(self) -> None:
        """Serve until drained. Raises only on unexpected errors."""
        async with asyncio.TaskGroup() as group:
            start = group.create_task
            others = [
                start(self._upstreams.run()),
                start(self._outbox.run()),
                start(self._attachments.run()),
                start(self._send_heartbeats()),
                start(self._listen()),
                start(self._reclaim()),
                start(self._announcer.run()),
                start(self._engines.run()),
                start(self._catalog.follow(self._on_catalog)),
            ]
            self._lineup.start(group)
            self._update_all()
            await self._draining.wait()
            await self._drain()
            for task in others:
                task.cancel()

    # --- Leasing ----------------------------------------------------------------------------------

    async def _serve(self, served: ServedModel) -> None:
        """Lease jobs of one model while there is room; wait for more."""
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
                log.warning("lease call failed", extra={"error": type(error).__name__})
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))

    async def _lease(self, served: ServedModel) -> bool:
        """Lease the jobs that fit and pass them on. Return whether more may be queued."""
        if not (wanted := served.wanted):
            self._update_leasing(served)
            return False
        served.nonce = served.nonce or new_nonce()
        leases = await served.queue.lease(
            self.worker, wanted, account_share=self._account_share, nonce=served.nonce
        )
        served.nonce = None
        served.answered_s = time.monotonic()
        if leases:
            leased_us = time.monotonic_ns() // 1000
            accepted = []
            for lease in leases:
                leased = self._accept(served, lease)
                if leased is None:
                    continue
                job, note = leased.job, lease.note or leased.job.note
                handoff = JobHandoff(job, lease.queued_us, leased_us, lease.attempt, note=note)
                if job.attachments or job.stored_input is not None:
                    on_fetched = functools.partial(self._fetched, leased, handoff)
                    self._attachments.fetch(leased, on_fetched)
                else:
                    accepted.append(handoff)
            if accepted:
                served.host.submit(accepted)
            self._update_leasing(served)
        return len(leases) == wanted

    def _fetched(self, leased: LeasedJob, handoff: JobHandoff, fetched: Fetched) -> None:
        match fetched:
            case AttachmentSet(job, files):
                handoff = msgspec.structs.replace(handoff, job=job, files=files)
                self._served[leased.model].host.submit((handoff,))
            case ended:
                self._on_report((), ((leased.job.request_id, ended),))

    def _accept(self, served: ServedModel, lease: Lease) -> LeasedJob | None:
        """Record a lease. Return its job if it must be run."""
        request_id = RequestId(lease.id)
        readable = True
        try:
            job = decode_job(lease.payload)
        except msgspec.DecodeError:
            readable = False
            job = Job(request_id, lease.account, served.model, task="", input={})
        known = self._leased.get(request_id)
        if known is not None and known.can_continue(lease.attempt):
            known.token, known.attempt, known.reply = lease.token, lease.attempt, lease.reply
            return None
        if known is not None:
            self._drop(known)
        leased = LeasedJob(job, served.model, lease.token, lease.attempt, lease.reply)
        self._leased[request_id] = leased
        served.running += 1
        if not readable or job.model != served.model:
            log.error("job could not be decoded", extra={"request_id": request_id})
            failure = Failed(code="invalid_input", message="The job could not be read.")
            self._on_report((), ((request_id, failure),))
            return None
        return leased

    def _update_leasing(self, served: ServedModel) -> None:
        """Open or close a model for leasing."""
        host = self._upstreams if served.host is self._upstreams else self._engines
        ready = host.takes(served.model)
        served.is_cold = served.model in self._engines.cold
        full = served.running >= served.capacity
        if not ready or full or served.retired or self._paused or self._draining.is_set():
            served.open.clear()
        elif not served.open.is_set():
            served.answered_s = time.monotonic()
            served.open.set()

    def _on_catalog(self, assignment: Assignment | None) -> None:
        if assignment is not None:
            self._lineup.follow(assignment)
        self._announcer.hurry()

    def _update_all(self) -> None:
        for served in self._served.values():
            self._update_leasing(served)
        self._announcer.hurry()

    def _state(self) -> State:
        ending = self._draining.is_set()
        return State(len(self._leased), draining=ending or self._paused, ending=ending)

    # --- What hosts report ------------------------------------------------------------------------

    def _on_report(
        self,
        events: Sequence[tuple[RequestId, Event]],
        outcomes: Sequence[tuple[RequestId, Outcome]],
    ) -> None:
        for request_id, event in events:
            leased = self._leased.get(request_id)
            if leased is not None and not leased.ended:
                self._attachments.send_event(leased, event)
        for request_id, outcome in outcomes:
            leased = self._leased.get(request_id)
            if leased is not None and not leased.ended:
                leased.ended = True
                self._attachments.end(leased, outcome)
                self._served[leased.model].record_duration(time.monotonic() - leased.leased_s)
                self._free_slot(leased)

    async def _keep_note(self, request_id: RequestId, note: str) -> bool:
        leased = self._leased.get(request_id)
        return leased is not None and await self._outbox.keep_note(leased, note)

    def _free_slot(self, leased: LeasedJob) -> None:
        served = self._served[leased.model]
        served.running -= 1
        if not served.open.is_set():
            self._update_leasing(served)

    def _on_completed(self, leased: LeasedJob, result: CompletionResult) -> None:
        """Forget a job whose end the queue has answered."""
        if result == "fenced":
            self._attachments.drop(leased)
        if self._leased.get(leased.job.request_id) is leased:
            del self._leased[leased.job.request_id]
        if not self._leased:
            self._idle.set()

    def _drop(self, leased: LeasedJob) -> None:
        """Stop a job whose lease was lost or given up, and discard what it still produces."""
        del self._leased[leased.job.request_id]
        leased.lost = True
        self._attachments.drop(leased)
        if not leased.ended:
            self._served[leased.model].host.abandon(leased.job.request_id)
            self._free_slot(leased)

    # --- Leases, cancellations and maintenance of the queue ---------------------------------------

    async def _send_heartbeats(self) -> None:
        """Renew all leases every third of their duration and after each notification."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE_MS / 3000):
                    await self._notified.wait()
            self._notified.clear()
            try:
                await self._heartbeat()
                await asyncio.sleep(HEARTBEAT_PAUSE_S)
            except _UNAVAILABLE as error:
                log.warning("heartbeat failed", extra={"error": type(error).__name__})
                self._notified.set()
                await asyncio.sleep(RETRY_S)

    async def _heartbeat(self) -> None:
        by_model: dict[str, list[tuple[str, str]]] = {}
        for request_id, leased in self._leased.items():
            by_model.setdefault(leased.model, []).append((request_id, leased.token))
        for model, pairs in by_model.items():
            news = await self._queues[model].heartbeat(pairs)
            if not (news.lost or news.cancelled or news.replies):
                continue
            tokens = dict(pairs)
            for leased in self._still_leased(news.lost, tokens):
                log.warning("lease lost", extra={"request_id": leased.job.request_id})
                self._drop(leased)
            for leased in self._still_leased(news.replies, tokens):
                leased.reply = news.replies[leased.job.request_id]
            for leased in self._still_leased(news.cancelled, tokens):
                reason = cast(CancelReason, news.cancelled[leased.job.request_id])
                if self._attachments.is_fetching(leased):
                    self._attachments.drop(leased)
                    self._on_report((), ((leased.job.request_id, Cancelled(reason)),))
                else:
                    self._served[model].host.cancel(leased.job.request_id, reason)

    def _still_leased(self, ids: Iterable[str], tokens: Mapping[str, str]) -> list[LeasedJob]:
        """Return those of the jobs that still run under the lease that the heartbeat renewed."""
        found = [self._leased.get(RequestId(request_id)) for request_id in ids]
        return [
            leased
            for leased in found
            if leased
            and not (leased.ended and not self._attachments.is_pending(leased))
            and leased.token == tokens[leased.job.request_id]
        ]

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in notifications(self._redis, self.worker, namespace=self._namespace):
                    self._notified.set()
                    self._announcer.hurry()
            except _UNAVAILABLE as error:
                log.warning("no notifications", extra={"error": type(error).__name__})
                await asyncio.sleep(RETRY_S)

    async def _reclaim(self) -> None:
        while True:
            for served in list(self._served.values()):
                try:
                    await served.queue.reclaim()
                except _UNAVAILABLE as error:
                    log.warning("could not reclaim leases", extra={"error": type(error).__name__})
                    break
            await asyncio.sleep(RECLAIM_S)

    def _obey(self, wishes: Wishes) -> None:
        """Do what operators wish: drain or resume, unload models or load them."""
        if wishes.drain != self._paused:
            log.info("an operator drains it" if wishes.drain else "an operator resumes it")
            self._paused = wishes.drain
            self._update_all()
        self._lineup.withhold(wishes.unloaded)
        for model, wish in wishes.loads.items():
            if self._loads.get(model) != wish:
                self._loads[model] = wish
                self._lineup.load(model)

    # --- Ends -------------------------------------------------------------------------------------

    async def _requeue_crashed(self, unharmed: Collection[RequestId]) -> None:
        """Requeue the jobs of a crashed engine process; a crash is not counted for ``unharmed``."""
        # Twice: the flush can find an outcome whose output must be stored first. Jobs that have
        # ended must complete before the leases of this worker are released.
        for _ in range(2):
            await self._attachments.stored()
            await self._outbox.flushed()
        for served in self._lineup.local:
            async with served.leasing:
                returned = []
                for request_id, leased in list(self._leased.items()):
                    if leased.model == served.model and not leased.ended:
                        del self._leased[request_id]
                        if request_id in unharmed or self._attachments.is_fetching(leased):
                            returned.append(Completion(request_id, leased.token, "retry"))
                        self._attachments.drop(leased)
                served.running = 0
                complete = functools.partial(served.queue.complete, returned)
                await retry_forever("requeueing", complete)
                release = functools.partial(served.queue.release_worker, self.worker, crashed=True)
                await retry_forever("releasing leases", release)
        if not self._leased:
            self._idle.set()

    async def _drain(self) -> None:
        """Lease nothing more, give running jobs some time to end, then requeue the rest."""
        log.info("draining", extra={"running": len(self._leased)})
        self._update_all()
        await self._lineup.stop(REQUEUE_S)
        if self._leased:
            self._idle.clear()
            fetching = filter(self._attachments.is_fetching, self._leased.values())
            self._withdrawn.put_nowait([leased.job.request_id for leased in fetching])
            self._engines.withdraw()
            handing = asyncio.create_task(self._requeue_withdrawn())
            waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._stopping)]
            await asyncio.wait(waits, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in (*waits, handing):
                wait.cancel()
        await self._upstreams.handover_ready(HANDOVER_S)
        try:
            async with asyncio.timeout(REQUEUE_S):
                await self._requeue_rest()
        except _UNAVAILABLE as error:
            log.warning("could not requeue jobs", extra={"error": type(error).__name__})

    async def _requeue_withdrawn(self) -> None:
        """Return jobs that have not started to their place in the queue, for other workers."""
        while True:
            for request_id in await self._withdrawn.get():
                leased = self._leased.get(request_id)
                if leased is not None and not leased.ended:
                    del self._leased[request_id]
                    self._attachments.drop(leased)
                    served = self._served[leased.model]
                    served.running -= 1
                    back = [Completion(request_id, leased.token, "retry")]
                    complete = functools.partial(served.queue.complete, back)
                    await retry_forever("requeueing", complete)
            if not self._leased:
                self._idle.set()

    async def _requeue_rest(self) -> None:
        for leased in list(self._leased.values()):
            if not leased.ended or self._attachments.is_pending(leased):
                self._drop(leased)
        await self._outbox.flushed()
        for served in self._served.values():
            await served.queue.release_worker(self.worker, crashed=False)
        await self._workers.withdraw(self.worker)
        await self._attachments.deleted()

"""The parts of a request's life in one process, wired and running; what the dialects call.

``submit`` accepts and queues, a ``Ticket`` waits, ``find`` and ``cancel`` work for any request of
the account on any gateway. Background tasks belong to ``running`` and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from redis.asyncio import Redis

from gateway import metrics
from gateway.accounts.cancelled import CancelledTime
from gateway.accounts.rates import Rates
from gateway.aside import Aside
from gateway.catalog.availability import availability
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.store import LiveCatalog
from gateway.catalog.tasks import Task
from gateway.checks.public_urls import check_public_url
from gateway.dispatch.enqueue import Dispatch, weights
from gateway.dispatch.follow import FollowedEvent, follow, latest_progress, logged_soon
from gateway.dispatch.health import QueueHealth
from gateway.dispatch.outputs import with_output
from gateway.dispatch.waiters import Waiters, read_mailbox
from gateway.errors import InvalidRequest, NotFound, TollgateError
from gateway.failpoints import reach
from gateway.files.fetch import Fetcher
from gateway.files.retention import MediaStore
from gateway.group_commit import GroupCommit
from gateway.ids import new_request_id
from gateway.ledger.closed import NOT_QUEUED, ClosedRequest
from gateway.ledger.concurrency import Defaults
from gateway.ledger.extend import (
    Ended,
    ExtendAnswer,
    Extended,
    Extension,
    cut_reason,
    extend,
    mark_cut,
)
from gateway.ledger.holds import HoldAnswer, HoldRequest, delete_output, hold
from gateway.ledger.prices import LIST
from gateway.ledger.receipts import Receipt, read_receipt
from gateway.ledger.settle import Settlement
from gateway.requests.admit import Admission, Admitted, Quoted
from gateway.requests.attachments import Attachments
from gateway.requests.caller import Caller
from gateway.requests.doubt import Doubts
from gateway.requests.incremental_holds import IncrementalHold
from gateway.requests.lookup import Lookup, RequestFilter, RequestPage, Summary
from gateway.requests.reconnect import Reconnects
from gateway.requests.settle import Settler, released
from gateway.requests.sweep import Sweeper
from gateway.requests.ticket import Ticket, not_entered
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.sql.outages import OUTAGE, QUEUE_OUTAGE, SQL_OUTAGE, outage_name
from gateway.supervision import Supervisor
from gateway.tasks.registry import OtherTask
from gateway.tasks.submission import Idempotency, OpenRequest, Submission
from gateway.voices.store import Voices
from gateway.webhooks.sender import Webhooks
from gateway.workflows.runner import WorkflowRunner
from workers.contract.jobs import Progress, RequestId, SentEvent
from workers.contract.streams import EventLog, Mailbox, check_cursor

log = logging.getLogger(__name__)


class Requests:
    """Every request of this process, from order to receipt."""

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        redis: Redis,
        live: LiveCatalog,
        rates: Rates,
        gateway: str,
        pepper: bytes,
        media: MediaStore,
        fetcher: Fetcher,
        voices: Voices,
        view: Callable[[OpenRequest | ClosedRequest], Mapping[str, Any]],
    ) -> None:
        namespace = settings.namespace
        self._settings = settings
        self._database = database
        self._redis = redis
        self._log = EventLog(redis, namespace=namespace)
        self.retries = Reconnects(redis, namespace=namespace, window_s=settings.retry_window_s)
        self._live = live
        self._mailbox = Mailbox(redis, gateway, namespace=namespace)
        self.waiters = Waiters()
        self.watch = QueueHealth(redis, namespace=namespace, weight=weights(settings))

        concurrent = Defaults(settings.account_concurrent, settings.key_concurrent)

        async def write(batch: Sequence[HoldRequest]) -> list[HoldAnswer]:
            return await database.write(
                lambda connection: hold(connection, batch, concurrent=concurrent)
            )

        async def write_more(batch: Sequence[Extension]) -> list[ExtendAnswer]:
            return await database.write(lambda connection: extend(connection, batch))

        self._holds = GroupCommit(write)
        self._extensions = GroupCommit(write_more)
        self._aside = Aside(database)
        self._dispatch = Dispatch(redis, self._mailbox.name, settings=settings)
        self._doubts = Doubts(self._cancel)
        limit_s = settings.cancelled_seconds_per_hour
        cancelled = CancelledTime(redis, namespace=namespace, default_s=limit_s)
        self._admission = Admission(
            doubts=self._doubts,
            live=live,
            watch=self.watch,
            holds=self._holds,
            rates=rates,
            cancelled=cancelled,
            intake=Attachments(media, fetcher),
            voices=voices,
            settings=settings,
        )
        self.media = media
        self._flows = WorkflowRunner(
            database=database,
            redis=redis,
            live=live,
            dispatch=self._dispatch,
            waiters=self.waiters,
            aside=self._aside,
            namespace=namespace,
            blobs=media.blobs,
            close=self._close,
        )
        self.waiters.on_step_event = self._flows.on_step_event
        self._settler = Settler(
            database=database,
            redis=redis,
            live=live,
            rates=rates,
            cancelled=cancelled,
            waiters=self.waiters,
            gateway=gateway,
            namespace=namespace,
            retention_hours=settings.output_retention_hours,
            flows=self._flows,
            media=media,
            aside=self._aside,
        )
        self._lookup = Lookup(database, redis, media.blobs, namespace=namespace)
        self._sweeper = Sweeper(
            database=database,
            redis=redis,
            dispatch=self._dispatch,
            settler=self._settler,
            flows=self._flows,
            aside=self._aside,
            settings=settings,
        )
        self._webhooks = Webhooks(
            database=database,
            find=functools.partial(self._lookup.find, whole=False),
            view=view,
            pepper=pepper,
            private_allowed=settings.webhook_private_addresses,
        )
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self, supervisor: Supervisor) -> AsyncIterator[None]:
        """Run the background loops; on leaving, let the clients that have just gone be noted."""
        mailbox = functools.partial(read_mailbox, self._redis, self._mailbox, self.waiters)
        for name, loop in (
            ("watch", self.watch.run),
            ("mailbox", mailbox),
            ("settler", self._settler.run),
            ("sweeper", self._sweeper.run),
            ("webhooks", self._webhooks.run),
            ("prices", self._live.keep_fresh),
            ("doubts", self._doubts.run),
        ):
            supervisor.start(name, loop)
        self._flows.start(supervisor)
        try:
            yield
        finally:
            self._stopping.set()
            if self._leaving:
                await asyncio.wait(self._leaving, timeout=2.0)

    def order(
        self,
        model: str,
        value: Mapping[str, Any],
        *,
        task: Task | None = None,
        webhook: str | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotency: Idempotency | None = None,
    ) -> Submission:
        """Make an order of the native API: nobody waits, everybody may follow."""
        if webhook is not None:
            private = self._settings.webhook_private_addresses
            check_public_url(webhook, param="webhook", private_allowed=private)
        return Submission(
            model=model,
            input=self._admission.read_input(model, value, task),
            task=task,
            within="input",
            stream=True,
            waits=False,
            webhook=webhook,
            metadata=metadata,
            idempotency=idempotency,
        )

    def entry(self, model: str, account_id: int = LIST) -> CatalogEntry:
        """An entry at an account's price. Raise ``NotFound`` if there is no such model."""
        return self._admission.entry(model, account_id)

    def is_served(self, model: str) -> bool | None:
        """Whether a worker serves a model now; None if there is no such model."""
        entry = self._live.entry(self._live.resolve(model))
        return None if entry is None else availability(entry, self.watch.announcements) is None

    def quote(self, order: Submission, account_id: int) -> Quoted:
        resolved = self._admission.resolve(order)
        return self._admission.quote(resolved, datetime.now(UTC), account_id)

    def check(self, order: Submission, account_id: int) -> Quoted:
        """Say that an order could be accepted but for money and limits, or raise why not."""
        resolved = self._admission.resolve(order)
        return self._admission.check(resolved, datetime.now(UTC), account_id)

    async def submit(self, call: Caller, order: Submission) -> Ticket:
        """Accept an order and queue it, or raise why not and leave nothing behind."""
        request_id = new_request_id()
        account_id = call.key.account_id
        order = self._admission.resolve(order)
        if order.alias is not None:
            call.alias = (order.alias, order.model)
        ticket = Ticket(self, account_id, order, request_id)
        if await self._rejoin(ticket, account_id, order):
            return ticket
        try:
            admitted = await self._admission.admit(call, order, request_id)
        except TollgateError as error:
            ticket.close()
            metrics.REFUSED.labels(error.code).inc()
            raise
        except BaseException:
            ticket.close()
            raise
        ticket.attach(admitted)
        if not admitted.replayed:
            metrics.ACCEPTED.labels(order.model).inc()
            metrics.SOFT_BUDGETS_PASSED.labels(order.model).inc(len(call.soft_budgets_exceeded))
            reach("after_hold")
            await self._enqueue(call, ticket, admitted, order)
            reach("after_enqueue")
        return ticket

    def resume(self, account_id: int, request_id: RequestId, accepted_at: datetime) -> Ticket:
        """Wait again for a request that was accepted before, whatever becomes of who waits."""
        order = Submission(model="", input=OtherTask(), waits=False)
        ticket = Ticket(self, account_id, order, request_id)
        ticket.join(request_id, accepted_at)
        return ticket

    async def _rejoin(self, ticket: Ticket, account_id: int, order: Submission) -> bool:
        """Join the request that this submission repeats, unless it ended without an output."""
        if order.fingerprint is None or order.idempotency is not None or not self.watch.healthy:
            return False
        earlier = await self.retries.earlier(order.fingerprint, says_so=order.retried)
        if earlier is None:
            return False
        try:
            found = await self._lookup.find(account_id, earlier, whole=False)
        except NotFound:
            return False
        if isinstance(found, ClosedRequest) and (
            found.status != "succeeded" or found.output is None
        ):
            return False
        ticket.join(earlier, found.accepted_at)
        metrics.REJOINED.labels(order.model).inc()
        return True

    async def _enqueue(
        self, call: Caller, ticket: Ticket, admitted: Admitted, order: Submission
    ) -> None:
        """Queue an accepted job. A full queue frees hold and name; the sweeper has the rest."""
        if admitted.job.workflow:
            self._flows.wake(admitted.request_id, "")
            return
        try:
            entry = self._dispatch.entry(
                admitted.job, admitted.payload, batch_key=admitted.batch_key
            )
            status = await self._dispatch.enqueue(admitted.job.model, entry)
        except QUEUE_OUTAGE as error:
            log.warning("%s is left to the sweeper: %s", admitted.request_id, type(error).__name__)
            return
        if status in NOT_QUEUED:
            ticket.close()
            call.given_back = True
            # A batch gives each attempt a name of its own, and looks the earlier ones up.
            name = order.idempotency if order.service_class != "batch" else None
            await self._settler.release(
                admitted.request_id,
                status="cancelled",
                reason=status,
                freed=name.key if name else None,
            )
            await self.media.forget(ticket.account_id, admitted.request_id)
            raise not_entered(status)

    async def _close(self, settlement: Settlement, reply: str) -> None:
        await self._settler.close(settlement, reply)

    async def hold_more(self, slices: IncrementalHold, extension: Extension) -> None:
        """Hold for the next slice of a stream, or note that it cannot be."""
        answer = await self._extensions.submit(extension)
        if isinstance(answer, Extended):
            slices.held(extension)
        elif not isinstance(answer, Ended):
            slices.refused(cut_reason(answer))

    async def cut(self, model: str, request_id: RequestId, why: str) -> None:
        """Stop a stream for which nothing more can be held."""
        await self._database.write(lambda connection: mark_cut(connection, request_id, why))
        metrics.CUT.labels(model, why).inc()
        await self._cancel(model, request_id)

    async def find(self, account_id: int, request_id: str) -> OpenRequest | ClosedRequest:
        """Look a request of the account up, open or closed. Raise ``NotFound``."""
        return await self._lookup.find(account_id, request_id)

    async def end_of(self, account_id: int, request_id: RequestId) -> ClosedRequest | None:
        """Look up whether a request of the account has ended, and how."""
        return await self._lookup.closed(account_id, request_id)

    async def whole(self, closed: ClosedRequest) -> ClosedRequest:
        """Load the output of a closed request from the blob store. Raise ``RequestFailed``."""
        return await with_output(self.media.blobs, closed)

    async def receipt(self, account_id: int, request_id: str) -> Receipt:
        """Find a closed request, with all that its receipt says. Raise ``NotFound``."""
        found = await self._lookup.find(account_id, request_id, whole=False)
        if isinstance(found, OpenRequest):
            raise NotFound(
                "receipt_not_ready",
                f"{request_id} is still {found.status}; its receipt is written when it ends.",
            )
        return await self._database.read(
            lambda connection: read_receipt(connection, found, self._live.prices)
        )

    def follow(
        self, found: OpenRequest | ClosedRequest, *, after: str | None, keep_alive_s: float
    ) -> AsyncIterator[FollowedEvent]:
        """Follow a request from a cursor on. Raise ``InvalidRequest`` if the cursor is none."""
        if after is not None:
            try:
                check_cursor(after)
            except ValueError as error:
                raise InvalidRequest(
                    "invalid_value", f"Last-Event-ID: {error}.", param="Last-Event-ID"
                ) from None
        return self._follow(found, after, keep_alive_s)

    async def _follow(
        self, found: OpenRequest | ClosedRequest, after: str | None, keep_alive_s: float
    ) -> AsyncIterator[FollowedEvent]:
        with self.waiters.watch(found.request_id) as waiter:
            if isinstance(found, ClosedRequest):
                waiter.settle(found)
            else:
                known = await self._dispatch.move(found.model, found.request_id)
                if not known:
                    await self._flows.move(found.request_id)

            async def look() -> ClosedRequest | None:
                try:
                    return await self._lookup.closed(found.account_id, found.request_id)
                except SQL_OUTAGE as error:
                    # Whoever follows goes on; the end is found when the database is back.
                    log.debug("%s was not looked up: %s", found.request_id, outage_name(error))
                    return None

            async for event in follow(
                waiter,
                self._log,
                request_id=found.request_id,
                after=after,
                look=look,
                keep_alive_s=keep_alive_s,
            ):
                yield event

    async def logged(
        self, request_id: RequestId, after: tuple[int, int] | None
    ) -> Sequence[SentEvent]:
        """What a request has said after an event, by attempt and number, as far as it is kept."""
        return await logged_soon(self._log, request_id, after or (0, 0))

    async def progress(self, request_id: RequestId) -> Progress | None:
        """How far a running request has said that it is; None where that is not known."""
        return await latest_progress(self._log, request_id)

    async def list(
        self, choice: RequestFilter, *, limit: int, cursor: str | None, oldest_first: bool = False
    ) -> RequestPage:
        return await self._lookup.list(
            choice, limit=limit, cursor=cursor, oldest_first=oldest_first
        )

    async def cursor_at(self, choice: RequestFilter, offset: int) -> str | None:
        return await self._lookup.cursor_at(choice, offset)

    async def summarize(self, choice: RequestFilter, *, cursor: str | None = None) -> Summary:
        return await self._lookup.summarize(choice, cursor=cursor)

    async def cancel(self, account_id: int, request_id: str) -> None:
        """Stop a request if it still runs; a closed one stays as it is. Raise ``NotFound``."""
        found = await self._lookup.find(account_id, request_id, whole=False)
        if isinstance(found, OpenRequest):
            await self._cancel(found.model, found.request_id)

    async def release(self, request_id: str) -> None:
        """Close a request that the operator gave up, for nothing."""
        await self._settler.close(released(RequestId(request_id)), "")

    async def forget(self, account_id: int, request_id: str) -> None:
        """Drop what a closed request gave before its time; the receipt stays."""
        await self._database.write(
            lambda connection: delete_output(connection, account_id, request_id)
        )
        await self.media.forget(account_id, request_id)

    async def _cancel(self, model: str, request_id: RequestId) -> None:
        answer = await self._dispatch.cancel(model, request_id)
        if answer == "unknown":
            # The queue does not know it (any more): nothing runs, so the hold ends here.
            await self._settler.give_up(request_id, status="cancelled", reason="client")

    def leave(self, account_id: int, order: Submission, request_id: RequestId) -> None:
        """Cancel in the background a request whose last client has gone, unless it comes back."""
        if request_id in self.waiters:
            return
        if order.fingerprint is not None:
            self.retries.lose(order.fingerprint, request_id)

        async def cancel() -> None:
            try:
                if order.fingerprint is None or await self._is_given_up(
                    account_id, request_id, order.fingerprint
                ):
                    await self._cancel(order.model, request_id)
            except OUTAGE as error:
                log.warning("%s could not be cancelled: %s", request_id, type(error).__name__)

        task = asyncio.create_task(cancel())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _is_given_up(self, account_id: int, request_id: RequestId, name: str) -> bool:
        """Return whether a disconnected client has not repeated its request within the grace."""
        await self.retries.announce(name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.retry_grace_s):
                await self._stopping.wait()
        if self._stopping.is_set():
            return False
        if isinstance(await self._lookup.find(account_id, request_id, whole=False), ClosedRequest):
            return False
        return await self.retries.give_up(name)

    def observe(self) -> None:
        """Bring the gauges up to date."""
        metrics.WAITING.set(len(self.waiters))
        metrics.WORKERS.set(len(self.watch.announcements))
        for model, load in self.watch.loads.items():
            metrics.QUEUE_DEPTH.labels(model).set(load.depth)

"""The request service: wires the parts of a request's life in one process, and runs their loops.

``submit`` accepts and queues a request and returns a ``Ticket`` that waits for it; ``lookup`` finds
any request of an account, on any gateway. Background tasks belong to ``running``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from gateway import metrics
from gateway.accounts.cancelled import CancelledTime
from gateway.accounts.rates import Rates
from gateway.aside import Aside
from gateway.catalog.availability import availability
from gateway.catalog.store import LiveCatalog
from gateway.dispatch.enqueue import CancelledBy, Dispatch, weights
from gateway.dispatch.follow import FollowedEvent, follow
from gateway.dispatch.gauges import LoadGauges
from gateway.dispatch.health import QueueHealth
from gateway.dispatch.waiters import Waiters, read_mailbox
from gateway.errors import InvalidRequest, NotFound, TollgateError
from gateway.failpoints import reach
from gateway.files.fetch import Fetcher
from gateway.files.retention import MediaStore
from gateway.ids import new_request_id
from gateway.ledger.closed import NOT_QUEUED, ClosedRequest
from gateway.ledger.concurrency import Defaults
from gateway.ledger.holds import delete_output
from gateway.ledger.settle import Settlement
from gateway.ledger.writer import LedgerWriter
from gateway.notices.failing import tell_of_failures
from gateway.requests.admit import Admission, Admitted
from gateway.requests.attachments import Attachments
from gateway.requests.caller import Caller
from gateway.requests.cancellation import Cancellation
from gateway.requests.doubt import Doubts
from gateway.requests.incremental_holds import HoldExtender
from gateway.requests.lookup import Lookup
from gateway.requests.quotes import Quotes
from gateway.requests.reconnect import Reconnects
from gateway.requests.settle import Settler, released
from gateway.requests.sweep import Sweeper
from gateway.requests.ticket import Ticket, TicketServices, not_entered
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.sql.outages import QUEUE_OUTAGE, SQL_OUTAGE, outage_name
from gateway.supervision import IDLE_BEAT_S, Beat, Supervisor, Work
from gateway.tasks.registry import OtherTask
from gateway.tasks.submission import OpenRequest, Submission
from gateway.voices.store import Voices
from gateway.webhooks.sender import Poster, Webhooks
from gateway.workflows.runner import WorkflowRunner
from workers.contract.jobs import RequestId
from workers.contract.redis import QueueClient
from workers.contract.streams import EventLog, Mailbox, check_cursor

log = logging.getLogger(__name__)


class Requests:
    """The requests of this process, from submission to receipt."""

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        redis: QueueClient,
        live: LiveCatalog,
        rates: Rates,
        gateway: str,
        media: MediaStore,
        fetcher: Fetcher,
        voices: Voices,
        view: Callable[[OpenRequest | ClosedRequest], Mapping[str, Any]],
        poster: Poster,
    ) -> None:
        namespace = settings.namespace
        self._database = database
        self._redis = redis
        self._live = live
        self._log = EventLog(redis, namespace=namespace)
        self._mailbox = Mailbox(redis, gateway, namespace=namespace)
        self._reconnects = Reconnects(redis, namespace=namespace, window_s=settings.retry_window_s)
        self._waiters = Waiters()
        self.media = media
        self.health = QueueHealth(redis, namespace=namespace, weight=weights(settings))
        self._load_gauges = LoadGauges(self.health)
        self.quotes = Quotes(live, settings)
        self.lookup = Lookup(database, redis, media.blobs, live.prices, namespace=namespace)
        ledger = self.ledger = LedgerWriter(
            database,
            prices=live.prices,
            retention=timedelta(hours=settings.output_retention_hours),
            concurrent=Defaults(settings.account_concurrent, settings.key_concurrent),
            rates=lambda: live.expense_rates,
        )
        aside = Aside(database)
        cancelled = CancelledTime(
            redis, namespace=namespace, default_s=settings.cancelled_seconds_per_hour
        )
        self._dispatch = Dispatch(redis, self._mailbox.name, settings=settings)
        self._flows = WorkflowRunner(
            database=database,
            redis=redis,
            live=live,
            dispatch=self._dispatch,
            waiters=self._waiters,
            aside=aside,
            namespace=namespace,
            blobs=media.blobs,
            events_s=int(settings.event_retention_minutes * 60),
            close=self._close,
        )
        self._waiters.on_step_event = self._flows.on_step_event
        self._settler = Settler(
            database=database,
            redis=redis,
            live=live,
            rates=rates,
            cancelled=cancelled,
            waiters=self._waiters,
            gateway=gateway,
            namespace=namespace,
            ledger=ledger,
            flows=self._flows,
            media=media,
            aside=aside,
            output_row_bytes_max=settings.output_row_bytes_max,
        )
        self._cancellation = Cancellation(
            dispatch=self._dispatch,
            settler=self._settler,
            lookup=self.lookup,
            waiters=self._waiters,
            reconnects=self._reconnects,
            grace_s=settings.retry_grace_s,
        )
        self._doubts = Doubts(self._cancellation.take_back)
        self._admission = Admission(
            quotes=self.quotes,
            health=self.health,
            ledger=ledger,
            rates=rates,
            doubts=self._doubts,
            cancelled=cancelled,
            attachments=Attachments(media, fetcher),
            voices=voices,
            settings=settings,
        )
        self._services = TicketServices(
            self._waiters,
            self._reconnects,
            self.lookup,
            HoldExtender(ledger, database, self._cancellation),
            self._cancellation,
        )
        self._sweeper = Sweeper(
            database=database,
            redis=redis,
            dispatch=self._dispatch,
            settler=self._settler,
            flows=self._flows,
            aside=aside,
            in_doubt=self._doubts,
            settings=settings,
        )
        self._webhooks = Webhooks(
            database=database,
            find=functools.partial(self.lookup.find, whole=False),
            view=view,
            poster=poster,
            given_up=tell_of_failures,
        )

    @contextlib.asynccontextmanager
    async def running(self, supervisor: Supervisor, *, settles: bool = True) -> AsyncIterator[None]:
        """Run the background loops; at the end, record the clients that have just disconnected.

        Unless it ``settles``, other processes close its requests.
        """
        # Otherwise, the first requests could be refused.
        await self._live.try_refresh()
        await self.health.try_refresh()
        mailbox = functools.partial(read_mailbox, self._redis, self._mailbox, self._waiters)
        loops: dict[str, Work] = {
            "watch": self.health.run,
            "mailbox": mailbox,
            "prices": self._live.keep_fresh,
            "doubts": self._doubts.run,
            "reconnects": self._reconnects.listen,
        }
        if settles:
            loops["settler"] = self._settler.run
            loops["sweeper"] = self._sweeper.run
            loops["webhooks"] = self._webhooks.run
        for name, loop in loops.items():
            supervisor.start(name, loop)
        self._flows.start(supervisor)
        if metrics.shared():
            supervisor.start("gauges", self.keep_gauges)
        try:
            yield
        finally:
            await self._cancellation.stop()

    def is_served(self, model: str) -> bool | None:
        """Whether a worker serves a model now; None if there is no such model."""
        entry = self._live.find(model)
        return None if entry is None else availability(entry, self.health.announcements) is None

    async def submit(self, caller: Caller, submission: Submission) -> Ticket:
        """Accept a submission and queue it, or raise why it is refused."""
        try:
            submission, entry = self.quotes.resolve(submission)
            if caller.key.models is not None:
                caller.key.check_model(entry.name)
            if submission.alias is not None:
                caller.alias = (submission.alias, entry.name)
            if submission.fingerprint is not None and submission.idempotency is None:
                joined = await self._rejoin(caller, submission, submission.fingerprint)
                if joined is not None:
                    return joined
            admitted = await self._admission.admit(caller, submission, entry, new_request_id())
        except TollgateError as error:
            metrics.REFUSED.labels(error.code).inc()
            raise
        # Created before the request is queued, so that no event is missed.
        ticket = Ticket(
            self._services,
            caller.key.account_id,
            submission,
            admitted.request_id,
            admitted.accepted_at,
            admitted,
        )
        if not admitted.replayed:
            metrics.ACCEPTED.labels(entry.name).inc()
            if caller.soft_budgets_exceeded:
                exceeded = len(caller.soft_budgets_exceeded)
                metrics.SOFT_BUDGETS_PASSED.labels(entry.name).inc(exceeded)
            reach("after_hold")
            await self._enqueue(caller, ticket, admitted)
            reach("after_enqueue")
        return ticket

    def resume(self, account_id: int, request_id: RequestId, accepted_at: datetime) -> Ticket:
        """Wait again for a request that was accepted before. It is not cancelled on leaving."""
        submission = Submission(model="", input=OtherTask(), waits=False)
        return Ticket(self._services, account_id, submission, request_id, accepted_at)

    async def _rejoin(
        self, caller: Caller, submission: Submission, fingerprint: str
    ) -> Ticket | None:
        """Join a retry after a disconnect to the original request, unless that has come to
        nothing."""
        if not self.health.healthy:
            return None
        earlier = await self._reconnects.earlier(fingerprint, says_so=submission.retried)
        if earlier is None:
            return None
        try:
            found = await self.lookup.find(caller.key.account_id, earlier, whole=False)
        except NotFound:
            return None
        if isinstance(found, ClosedRequest) and (
            found.status != "succeeded" or found.output is None
        ):
            return None
        metrics.REJOINED.labels(submission.model).inc()
        caller.warnings = found.warnings
        queue = found.queue if isinstance(found, OpenRequest) else found.model
        return Ticket(
            self._services,
            found.account_id,
            submission,
            earlier,
            found.accepted_at,
            queue=queue,
        )

    async def _enqueue(self, caller: Caller, ticket: Ticket, admitted: Admitted) -> None:
        """Queue an accepted job. If its queue is full, release it; after an outage the sweeper
        queues it."""
        if admitted.job.workflow:
            self._flows.wake(admitted.request_id, "")
            return
        submission, prepared = admitted.quoted.submission, admitted.quoted.prepared
        try:
            entry = self._dispatch.entry(
                admitted.job, admitted.payload, batch_key=prepared.batch_key
            )
            status = await self._dispatch.enqueue(admitted.job.model, entry)
        except QUEUE_OUTAGE as error:
            log.warning("%s is left to the sweeper: %s", admitted.request_id, type(error).__name__)
            return
        if status in NOT_QUEUED:
            ticket.close()
            caller.given_back = True
            # A batch names each attempt anew and looks the earlier ones up.
            name = submission.idempotency if submission.service_class != "batch" else None
            await self._settler.release(
                admitted.request_id,
                status="cancelled",
                reason=status,
                freed=name.key if name else None,
            )
            await self.media.forget(ticket.account_id, admitted.request_id)
            raise not_entered(status)

    def follow(
        self, found: OpenRequest | ClosedRequest, *, after: str | None, keep_alive_s: float
    ) -> AsyncIterator[FollowedEvent]:
        """Follow a request from a cursor. Raise ``InvalidRequest`` if the cursor is invalid."""
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
        with self._waiters.watch(found.request_id) as waiter:
            if isinstance(found, ClosedRequest):
                waiter.settle(found)
            else:
                known = await self._dispatch.move(found.queue, found.request_id)
                if not known:
                    await self._flows.move(found.request_id)

            async def look() -> ClosedRequest | None:
                try:
                    return await self.lookup.closed(found.account_id, found.request_id)
                except SQL_OUTAGE as error:
                    # The stream continues; its end is found when the database is back.
                    log.debug("could not look up %s: %s", found.request_id, outage_name(error))
                    return None

            # If a crash of the database lost the request, the stream ends.
            with contextlib.suppress(NotFound):
                async for event in follow(
                    waiter,
                    self._log,
                    request_id=found.request_id,
                    after=after,
                    look=look,
                    keep_alive_s=keep_alive_s,
                ):
                    yield event

    async def _close(self, settlement: Settlement, reply: str) -> None:
        await self._settler.close(settlement, reply)

    async def cancel(
        self, account_id: int | None, request_id: str, by: CancelledBy = "client"
    ) -> None:
        """Cancel a request if it still runs; without an account, of any. Raise ``NotFound``."""
        found = await self.lookup.find(account_id, request_id, whole=False)
        if isinstance(found, OpenRequest):
            await self._cancellation.cancel(found.queue, found.request_id, by)

    @property
    def waiting(self) -> int:
        """Number of requests whose clients wait at this process."""
        return len(self._waiters)

    async def release(self, request_id: str) -> None:
        """Close a request that the operator gave up, without a charge."""
        await self._settler.close(released(RequestId(request_id)), "")

    async def forget(self, account_id: int, request_id: str) -> None:
        """Delete the output of a closed request before its time; the receipt stays."""
        await self._database.write(
            lambda connection: delete_output(connection, account_id, request_id)
        )
        await self.media.forget(account_id, request_id)

    async def keep_gauges(self, beat: Beat) -> None:
        """Update the gauges for scrapes that another process of this gateway answers."""
        while True:
            self.observe()
            beat()
            await asyncio.sleep(IDLE_BEAT_S)

    def observe(self) -> None:
        """Update the gauges."""
        metrics.WAITING.set(len(self._waiters))
        self._load_gauges.observe()

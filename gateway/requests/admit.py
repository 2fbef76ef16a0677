"""Admission: limits, attachments and the hold. A request is accepted once its hold is committed.

Whatever can be refused is refused before anything is written. What depends on money or on the key
is decided inside the hold's transaction, where it is exact for any number of requests and gateways.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from gateway.accounts.cancelled import CancelledTime
from gateway.accounts.rates import (
    RateReservation,
    Rates,
    refuse_overrun,
    refuse_oversized,
    wanted,
)
from gateway.catalog.schema import CatalogEntry
from gateway.dispatch.enqueue import BATCH_PRIORITY, flow_of
from gateway.dispatch.health import QueueHealth
from gateway.errors import TollgateError, TooManyRequests, Unavailable
from gateway.failpoints import reach
from gateway.ledger.holds import Held, HoldAnswer, HoldRequest, Replayed
from gateway.ledger.writer import LedgerWriter
from gateway.requests.attachments import QUEUED_BYTES_MAX, Attachments, keeps_row
from gateway.requests.caller import Caller
from gateway.requests.doubt import Doubts
from gateway.requests.incremental_holds import IncrementalHold
from gateway.requests.quotes import Quoted, Quotes, packed
from gateway.requests.refusals import refusal
from gateway.requests.voices import with_recordings
from gateway.settings import Settings
from gateway.sql.database import DatabaseTimeout
from gateway.sql.outages import OUTAGE
from gateway.tasks.submission import Submission
from gateway.time_limit import TimeLimit
from gateway.voices.store import Voices
from workers.contract.jobs import BlobRef, Job, RequestId, encode

HOLD_PATIENCE_S: Final = 4.0
"""Timeout of a hold, after which the database counts as unreachable."""


@dataclass(slots=True)
class Admitted:
    """An accepted request; if ``replayed``, the one that the same submission made before."""

    quoted: Quoted
    request_id: RequestId
    accepted_at: datetime
    deadline_at: datetime
    job: Job
    payload: bytes
    hold_nanos: int
    replayed: bool
    incremental: IncrementalHold | None = None
    """The hold of a stream without a token limit, which is extended while it runs."""


class Admission:
    def __init__(
        self,
        *,
        quotes: Quotes,
        health: QueueHealth,
        ledger: LedgerWriter,
        rates: Rates,
        doubts: Doubts,
        cancelled: CancelledTime,
        attachments: Attachments,
        voices: Voices,
        settings: Settings,
    ) -> None:
        self._quotes = quotes
        self._health = health
        self._ledger = ledger
        self._rates = rates
        self._doubts = doubts
        self._cancelled = cancelled
        self._attachments = attachments
        self._voices = voices
        self._settings = settings
        self._hold_limit = TimeLimit(HOLD_PATIENCE_S)

    async def admit(
        self, caller: Caller, submission: Submission, entry: CatalogEntry, request_id: RequestId
    ) -> Admitted:
        """Quote a submission, take its share of the limits, store its attachments and hold.

        Accepting is one committed transaction, shared with whatever else arrived in the same
        instant. If nothing new is accepted, limits are given back and blobs are discarded. Raise
        the ``TollgateError`` that says why a submission is refused.
        """
        key, now = caller.key, datetime.now(UTC)
        quoted = self._quotes.quote_entry(submission, entry, now, key.account_id)
        caller.warnings = quoted.warnings
        if quoted.prepared.sources:
            recorded = await with_recordings(self._voices, key.account_id, quoted.prepared)
            quoted = replace(quoted, prepared=recorded)
        sticky_key = submission.sticky_key(key.account_id)
        runs_on = await self._choose_queue(quoted, key.account_id, sticky_key or request_id)
        await self._cancelled.check(key.account_id, key.limits)
        tokens = quoted.prepared.limits.tokens
        rates = wanted(key.limits, key.id, entry.name, tokens=tokens) if key.limits else ()
        if rates:
            refuse_oversized(rates)
            caller.taken = await self._rates.take(rates)
            refuse_overrun(caller.taken.usages)
        else:
            caller.taken = RateReservation()
        keeps = keeps_row(key, submission, quoted.task, quoted.prepared)
        try:
            blobs: tuple[BlobRef, ...] = ()
            if keeps:
                blobs = await self._attachments.ingest(
                    key.account_id,
                    request_id,
                    quoted.task,
                    quoted.prepared,
                    submission=submission,
                )
                if quoted.prepared.measured_by is not None:
                    measure = self._attachments.measure
                    quoted = quoted.bounded(await measure(quoted.prepared, entry, blobs[0]))
            reach("sources_stored")
            admitted = await self._accept(caller, quoted, runs_on, request_id, now, blobs)
        except TollgateError:
            # No other error: a request whose hold is in doubt may have been accepted.
            await self._undo(caller, request_id, keeps=keeps)
            raise
        if admitted.replayed:
            await self._undo(caller, request_id, keeps=keeps)
        return admitted

    async def _choose_queue(self, quoted: Quoted, account_id: int, key: str) -> str:
        """Return the model in whose queue the request belongs: the ordered one, or the version that
        the key chooses, if that can take it. Raise ``Unavailable`` or ``TooManyRequests`` if a
        queue could not take the request."""
        submission, settings = quoted.submission, self._settings
        is_batch = submission.service_class == "batch"
        # Batches obey the interactive limit on queueing time: they can wait, and must not lengthen
        # a queue beyond what waiting clients tolerate.
        soon = submission.waits or is_batch
        check = functools.partial(
            self._health.check,
            account=flow_of(str(account_id), batch=is_batch),
            waits=submission.waits,
            wait_max_s=settings.wait_max_s if soon else settings.async_wait_max_s,
        )
        version = self._quotes.version(quoted.entry, key)
        if version.name != quoted.entry.name:
            with contextlib.suppress(Unavailable, TooManyRequests):
                await check(version)
                return version.name
        entries = [quoted.entry]
        if quoted.workflow is not None:
            entries = [self._quotes.find(one.step.model) for one in quoted.workflow.steps]
        for entry in entries:
            await check(entry)
        return quoted.entry.name

    async def _undo(self, caller: Caller, request_id: RequestId, *, keeps: bool) -> None:
        """Give the limits back and discard the blobs of a request that was not accepted."""
        caller.given_back = True
        if caller.taken is not None:
            await self._rates.undo(caller.taken)
        if keeps:
            await self._attachments.discard(caller.key.account_id, request_id)

    async def _accept(
        self,
        caller: Caller,
        quoted: Quoted,
        runs_on: str,
        request_id: RequestId,
        now: datetime,
        blobs: tuple[BlobRef, ...],
    ) -> Admitted:
        settings, key, submission = self._settings, caller.key, quoted.submission
        entry, prepared = quoted.entry, quoted.prepared
        timeout_s = settings.timeout_s if submission.waits else settings.async_timeout_s
        deadline_at = submission.deadline_at or now + timedelta(
            seconds=entry.limits.timeout_s or timeout_s
        )
        job = Job(
            request_id=request_id,
            account_id=str(key.account_id),
            model=runs_on,
            task=quoted.task,
            input=quoted.input,
            workflow=quoted.workflow is not None,
            limits=prepared.limits,
            stream=submission.stream,
            deadline_ms=int(deadline_at.timestamp() * 1000),
            attachments=blobs,
            gateway_note=caller.taken.note if caller.taken is not None else "",
            priority=BATCH_PRIORITY if submission.service_class == "batch" else 0,
            sticky_key=submission.sticky_key(key.account_id),
            warnings=quoted.warnings,
        )
        payload = packed(encode, job)
        self._quotes.refuse_large(payload, quoted)
        if len(payload) > QUEUED_BYTES_MAX and quoted.input_may_be_stored:
            job = await self._attachments.store_input(job)
            payload = encode(job)
        incremental = None
        if prepared.choices is not None and submission.stream and submission.waits:
            incremental = self._incremental(prepared.choices, quoted)
        hold_nanos = incremental.hold_nanos if incremental else quoted.bill.total_nanos
        idempotency = submission.idempotency
        answer = await self._hold(
            HoldRequest(
                request_id=request_id,
                account_id=key.account_id,
                key_id=key.id,
                model=entry.name,
                task=quoted.task,
                price_id=quoted.price_id,
                hold_nanos=hold_nanos,
                held_tokens=incremental.covered if incremental else None,
                job=payload,
                served_by=runs_on if runs_on != entry.name else None,
                accepted_at=now,
                deadline_at=deadline_at,
                idempotency_key=idempotency.key if idempotency else None,
                body_sha256=idempotency.body_sha256 if idempotency else None,
                metadata=dict(submission.metadata) if submission.metadata else None,
                webhook=submission.webhook,
                service_class=submission.service_class,
                durable=needs_durable_hold(submission, runs_steps=quoted.workflow is not None),
            )
        )
        if not isinstance(answer, Held) and job.stored_input is not None:
            await self._attachments.discard(key.account_id, request_id)
        if isinstance(answer, Held):
            caller.soft_budgets_exceeded = answer.soft_budgets_exceeded
        elif not isinstance(answer, Replayed):
            raise refusal(answer, hold_nanos)
        return Admitted(
            quoted,
            answer.request_id,
            now,
            deadline_at,
            job,
            payload,
            hold_nanos,
            isinstance(answer, Replayed),
            incremental,
        )

    async def _hold(self, request: HoldRequest) -> HoldAnswer:
        """Hold for a request. On an outage, have the request taken back if it was held after all,
        and raise."""
        try:
            return await self._hold_limit.apply(self._ledger.hold(request))
        except OUTAGE as error:
            if request.idempotency_key is None:
                self._doubts.note(request.served_by or request.model, request.request_id)
            if isinstance(error, TimeoutError):
                raise DatabaseTimeout(
                    f"no hold was written within {HOLD_PATIENCE_S:g} s"
                ) from error
            raise

    def _incremental(self, choices: int, quoted: Quoted) -> IncrementalHold | None:
        """Hold in slices for a stream without a token limit, unless one slice covers all of it."""
        limits = quoted.prepared.limits
        slice_tokens = choices * self._settings.hold_slice_tokens
        if slice_tokens >= limits.output_tokens:
            return None
        return IncrementalHold(quoted.price, limits, slice_tokens)


def needs_durable_hold(submission: Submission, *, runs_steps: bool) -> bool:
    """Whether a client can learn of a request, or refer to it, before its settlement, or whether
    its steps are recorded before. The hold of any other becomes durable with its settlement."""
    awaits_whole_answer = submission.waits and not submission.stream
    named = submission.idempotency is not None or submission.webhook is not None
    return runs_steps or named or not awaits_whole_answer

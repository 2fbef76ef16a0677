"""Everything before a request is queued: price, limits, quote, hold. Committed means accepted.

Refuses before anything is written where it can; whatever depends on money or on the key is decided
inside the hold's transaction, where it is exact for any number of requests and gateways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import msgspec

from gateway.accounts.cancelled import CancelledTime
from gateway.accounts.rates import Rates, refuse_overrun, refuse_oversized, wanted
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.store import LiveCatalog
from gateway.catalog.tasks import Task
from gateway.dispatch.enqueue import BATCH_PRIORITY, flow_of
from gateway.dispatch.health import QueueHealth
from gateway.errors import (
    InvalidRequest,
    NotFound,
    TollgateError,
    TooLarge,
)
from gateway.failpoints import reach
from gateway.group_commit import GroupCommit
from gateway.ledger.holds import (
    Held,
    HoldAnswer,
    HoldRequest,
    Replayed,
)
from gateway.ledger.prices import LIST
from gateway.pricing import (
    Bill,
    Price,
    ServiceClass,
    UnpricedUsage,
    is_exact_quote,
    quote,
)
from gateway.requests.attachments import (
    PLAIN_BYTES_MAX,
    QUEUED_BYTES_MAX,
    Attachments,
    may_be_stored,
)
from gateway.requests.caller import Caller
from gateway.requests.doubt import Doubts
from gateway.requests.incremental_holds import IncrementalHold
from gateway.requests.refusals import refusal
from gateway.requests.voices import with_recordings
from gateway.settings import Settings
from gateway.sql.database import DatabaseTimeout
from gateway.sql.outages import OUTAGE
from gateway.tasks.prepared import Prepared
from gateway.tasks.registry import choose_task, parse, prepare
from gateway.tasks.submission import Submission
from gateway.tasks.workflow_submission import WorkflowSubmission
from gateway.voices.store import Voices
from gateway.workflows.plan import PlannedRun, StepModels, from_fields, plan
from workers.contract.jobs import BlobRef, Job, RequestId, encode

T = TypeVar("T")

ORDERED_AS: Final = "ordered_as"
"""Attribute of a usage: the alias by which its model was ordered."""
HOLD_PATIENCE_S: Final = 4.0
"""Time for which a client waits for its hold before it hears that the database is away."""


@dataclass(frozen=True, slots=True)
class Quoted:
    """What an order would cost at most, at the price in force now."""

    entry: CatalogEntry
    task: Task
    price_id: int
    price: Price
    prepared: Prepared
    bill: Bill
    service_class: ServiceClass
    workflow: PlannedRun | None = None
    """Of a workflow: its steps, each with its own quote."""

    @property
    def input(self) -> dict[str, Any]:
        """What the request's job carries."""
        if self.workflow is None:
            return self.prepared.input
        plan: dict[str, Any] = msgspec.to_builtins(self.workflow.plan)
        return plan

    @property
    def input_may_be_stored(self) -> bool:
        """Whether a large input goes by the blob store. A plan stays: every gateway reads it."""
        return self.workflow is None and may_be_stored(self.task)


@dataclass(frozen=True, slots=True)
class Admitted:
    """An accepted request, or with ``replayed`` the one that the same order made before."""

    request_id: RequestId
    accepted_at: datetime
    deadline_at: datetime
    job: Job
    payload: bytes
    batch_key: str
    replayed: bool
    hold_nanos: int
    cost_nanos: int | None = None
    """What it costs if it succeeds, where that does not depend on what is made."""
    slices: IncrementalHold | None = None
    """Of a stream that named no length, and is held for piece by piece."""


class Admission:
    def __init__(
        self,
        *,
        live: LiveCatalog,
        watch: QueueHealth,
        holds: GroupCommit[HoldRequest, HoldAnswer],
        rates: Rates,
        doubts: Doubts,
        cancelled: CancelledTime,
        intake: Attachments,
        voices: Voices,
        settings: Settings,
    ) -> None:
        self._doubts = doubts
        self._intake = intake
        self._voices = voices
        self._live = live
        self._watch = watch
        self._holds = holds
        self._rates = rates
        self._cancelled = cancelled
        self._settings = settings

    def read_input(self, model: str, value: Mapping[str, Any], task: Task | None = None) -> Any:
        """Check the shape of an input of the native API by the task that is named, or its model's
        own."""
        entry = self.entry(model)
        return (
            parse(task or entry.task, value)
            if entry.workflow is None
            else WorkflowSubmission(value)
        )

    def resolve(self, order: Submission) -> Submission:
        """Name an order's model by its own name, and note the one that it was ordered by."""
        real = self._live.resolve(order.model)
        return order if real == order.model else replace(order, model=real, alias=order.model)

    def quote(self, order: Submission, now: datetime, account_id: int) -> Quoted:
        """Price an order as an account pays it. Raise ``NotFound`` or ``InvalidRequest``."""
        entry = self.entry(order.model)
        if entry.workflow is not None:
            return self._quote_workflow(entry, order, now, account_id)
        assert not isinstance(order.input, WorkflowSubmission)
        task = order.task or choose_task(entry, order.input)
        if task != entry.task and task not in entry.also:
            raise InvalidRequest(
                "task_not_supported",
                f"{entry.name} does {', '.join((entry.task, *entry.also))}, not {task}.",
                param="model",
            )
        price_id, price = self._live.priced(entry.name, now, account_id, order.service_class)
        prepared = prepare(entry, order.input, task=task, prefix=order.within)
        prepared = _noting_alias(prepared, order)
        try:
            bill = quote(price, prepared.limits)
        except UnpricedUsage as error:
            # The price fits the model, so what is missing is something to pay for in the input.
            raise InvalidRequest(
                "nothing_to_do", f"This input gives {entry.name} nothing to do: {error}."
            ) from None
        return Quoted(entry, task, price_id, price, prepared, bill, order.service_class)

    def _quote_workflow(
        self, entry: CatalogEntry, order: Submission, now: datetime, account_id: int
    ) -> Quoted:
        """Price a workflow: at its own price, or at that of its steps."""
        if order.task not in (None, entry.task):
            raise InvalidRequest(
                "task_not_supported",
                f"{entry.name} does {entry.task}, not {order.task}.",
                param="model",
            )
        if order.service_class == "batch":
            raise InvalidRequest(
                "model_not_in_batches", f"{entry.name} is not sold in batches.", param="model"
            )
        asked = order.input
        if not isinstance(asked, WorkflowSubmission):
            fields = {name: getattr(asked, name) for name in type(asked).model_fields}
            asked = from_fields(entry, fields)
        price_id, price = self._live.priced(entry.name, now, account_id)
        market = StepModels(
            entry=self.entry,
            priced=lambda model: self._live.priced(model, now, account_id),
            own=price,
        )
        planned = plan(entry, asked, market, prefix=order.within)
        return Quoted(
            entry,
            entry.task,
            price_id,
            price,
            _noting_alias(planned.prepared, order),
            planned.bill,
            order.service_class,
            planned,
        )

    def check(self, order: Submission, now: datetime, account_id: int) -> Quoted:
        """Say that an order could be accepted but for money and limits, or raise why not."""
        quoted = self.quote(order, now, account_id)
        self._refuse_large(len(_packed(msgspec.msgpack.encode, quoted.input)), quoted)
        return quoted

    async def admit(self, call: Caller, order: Submission, request_id: RequestId) -> Admitted:
        """Take in what an order brings, hold its quote and accept it; raise the reason why not.

        Accepting is one committed transaction, shared with whatever else arrived in the same
        instant. What is not accepted as something new gives back what it took of the limits, and
        leaves nothing in the store.
        """
        now = datetime.now(UTC)
        quoted = self.quote(order, now, call.key.account_id)
        quoted = await self._with_voices(quoted, call.key.account_id)
        settings = self._settings
        # A batch has time: it adds nothing to a queue that is as long as who waits may find it.
        soon = order.waits or order.service_class == "batch"
        wait_max_s = settings.wait_max_s if soon else settings.async_wait_max_s
        account = flow_of(str(call.key.account_id), batch=order.service_class == "batch")
        for entry in self._run_by(quoted):
            self._watch.check(entry, account=account, waits=order.waits, wait_max_s=wait_max_s)
        await self._cancelled.check(call.key.account_id, call.key.limits)
        await self._take(call, quoted)
        try:
            attachments = await self._intake.take_in(
                call.key.account_id,
                request_id,
                quoted.task,
                quoted.prepared,
                origin=order.origin,
            )
            reach("sources_stored")
            admitted = await self._accept(
                call, order, request_id, quoted, now, attachments=attachments
            )
        except TollgateError:
            # Not after anything else: what is in doubt may have been accepted.
            await self._give_back(call)
            await self._discard(call, request_id, quoted)
            raise
        if admitted.replayed:
            await self._give_back(call)
            await self._discard(call, request_id, quoted)
        return admitted

    async def _with_voices(self, quoted: Quoted, account_id: int) -> Quoted:
        """Look up the voices that an order names. Raise ``NotFound``."""
        prepared = await with_recordings(self._voices, account_id, quoted.prepared)
        return quoted if prepared is quoted.prepared else replace(quoted, prepared=prepared)

    def _run_by(self, quoted: Quoted) -> list[CatalogEntry]:
        """The entries in whose queues an order will be."""
        if quoted.workflow is None:
            return [quoted.entry]
        return [self.entry(one.step.model) for one in quoted.workflow.steps]

    async def _discard(self, call: Caller, request_id: RequestId, quoted: Quoted) -> None:
        await self._intake.discard(call.key.account_id, request_id, quoted.task, quoted.prepared)

    async def _take(self, call: Caller, quoted: Quoted) -> None:
        """Take a request's share of every limit that covers it, or raise ``TooManyRequests``."""
        rates = wanted(
            call.key.limits,
            call.key.id,
            quoted.entry.name,
            tokens=quoted.prepared.limits.tokens,
        )
        refuse_oversized(rates)
        call.taken = await self._rates.take(rates)
        refuse_overrun(call.taken.usages)

    async def _give_back(self, call: Caller) -> None:
        call.given_back = True
        if call.taken is not None:
            await self._rates.undo(call.taken)

    async def _accept(
        self,
        call: Caller,
        order: Submission,
        request_id: RequestId,
        quoted: Quoted,
        now: datetime,
        *,
        attachments: tuple[BlobRef, ...],
    ) -> Admitted:
        settings, key = self._settings, call.key
        entry, prepared = quoted.entry, quoted.prepared
        timeout_s = settings.timeout_s if order.waits else settings.async_timeout_s
        deadline_at = order.deadline_at or now + timedelta(
            seconds=entry.limits.timeout_s or timeout_s
        )
        job = Job(
            request_id=request_id,
            account_id=str(key.account_id),
            model=entry.name,
            task=quoted.task,
            input=quoted.input,
            workflow=quoted.workflow is not None,
            limits=prepared.limits,
            stream=order.stream,
            deadline_ms=int(deadline_at.timestamp() * 1000),
            attachments=attachments,
            gateway_note=call.taken.note if call.taken is not None else "",
            priority=BATCH_PRIORITY if order.service_class == "batch" else 0,
        )
        payload = _packed(encode, job)
        self._refuse_large(len(payload), quoted)
        if len(payload) > QUEUED_BYTES_MAX and quoted.input_may_be_stored:
            job = await self._intake.shorten(job)
            payload = encode(job)
        slices = self._slices(order, quoted)
        hold_nanos = slices.hold_nanos if slices else quoted.bill.total_nanos
        answer = await self._hold(
            HoldRequest(
                request_id=request_id,
                account_id=key.account_id,
                key_id=key.id,
                model=entry.name,
                task=quoted.task,
                price_id=quoted.price_id,
                hold_nanos=hold_nanos,
                held_tokens=slices.covered if slices else None,
                job=payload,
                accepted_at=now,
                deadline_at=deadline_at,
                idempotency_key=order.idempotency.key if order.idempotency else None,
                body_sha256=order.idempotency.body_sha256 if order.idempotency else None,
                metadata=dict(order.metadata) if order.metadata else None,
                webhook=order.webhook,
                service_class=order.service_class,
            )
        )
        if not isinstance(answer, Held):
            await self._intake.discard_input(job)
        if not isinstance(answer, (Held, Replayed)):
            raise refusal(answer, hold_nanos)
        if isinstance(answer, Held):
            call.soft_budgets_exceeded = answer.soft_budgets_exceeded
        return Admitted(
            request_id=answer.request_id,
            accepted_at=now,
            deadline_at=deadline_at,
            job=job,
            payload=payload,
            batch_key=prepared.batch_key,
            replayed=isinstance(answer, Replayed),
            hold_nanos=hold_nanos,
            cost_nanos=quoted.bill.total_nanos if is_exact_quote(quoted.price) else None,
            slices=slices,
        )

    async def _hold(self, request: HoldRequest) -> HoldAnswer:
        """Hold for a request, or raise an outage; what may be held all the same is taken back."""
        try:
            async with asyncio.timeout(HOLD_PATIENCE_S) as patience:
                return await self._holds.submit(request)
        except OUTAGE as error:
            if request.idempotency_key is None:
                self._doubts.note(request.model, request.request_id)
            if patience.expired():
                raise DatabaseTimeout(
                    f"no hold was written within {HOLD_PATIENCE_S:g} s"
                ) from error
            raise

    def _refuse_large(self, size: int, quoted: Quoted) -> None:
        most = self._settings.input_bytes_max
        if not quoted.input_may_be_stored:
            most = min(most, PLAIN_BYTES_MAX)
        if size > most:
            raise TooLarge(
                "input_too_large",
                f"The input is {size} bytes long; at most {most} are accepted.",
            )

    def _slices(self, order: Submission, quoted: Quoted) -> IncrementalHold | None:
        """Hold in slices for a stream that somebody reads and that named no length."""
        choices = quoted.prepared.choices
        if choices is None or not order.stream or not order.waits:
            return None
        slice_tokens = choices * self._settings.hold_slice_tokens
        if slice_tokens >= quoted.prepared.limits.output_tokens:
            return None
        return IncrementalHold(quoted.price, quoted.prepared.limits, slice_tokens)

    def entry(self, model: str, account_id: int = LIST) -> CatalogEntry:
        """An entry at an account's price. Raise ``NotFound`` if there is no such model."""
        entry = self._live.entry(self._live.resolve(model), account_id)
        if entry is None:
            raise NotFound(
                "model_not_found",
                f"The model {model!r} does not exist; GET /v1/models lists those that do.",
                param="model",
            )
        return entry


def _noting_alias(prepared: Prepared, order: Submission) -> Prepared:
    """Have the name that was ordered by stay with the usage to the receipt; no price depends on
    it."""
    if order.alias is None:
        return prepared
    attributes = {**prepared.limits.attributes, ORDERED_AS: order.alias}
    limits = msgspec.structs.replace(prepared.limits, attributes=attributes)
    return replace(prepared, limits=limits)


def _packed(encode: Callable[[T], bytes], value: T) -> bytes:
    """Encode an input for the queue. Raise ``InvalidRequest`` if it holds what the queue cannot."""
    try:
        return encode(value)
    except OverflowError:
        raise InvalidRequest(
            "invalid_value", "A number in the input is beyond 64 bits; send a smaller one."
        ) from None
    except RecursionError:
        raise InvalidRequest("invalid_value", "The input is nested too deeply.") from None

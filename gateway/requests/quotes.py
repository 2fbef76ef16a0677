"""Quotes: what a submission is, once it is checked against its catalog entry, and what it can cost.

Nothing here is written, taken or held, so a quote costs its account nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec

from gateway.catalog.schema import CatalogEntry
from gateway.catalog.store import LiveCatalog
from gateway.catalog.tasks import Task
from gateway.checks.public_urls import check_public_url
from gateway.errors import InvalidRequest, TooLarge, unknown_model
from gateway.ledger.prices import LIST
from gateway.pricing import Bill, Price, UnpricedUsage, is_exact_quote, quote
from gateway.requests.attachments import PLAIN_BYTES_MAX, may_be_stored
from gateway.settings import Settings
from gateway.tasks.prepared import Prepared
from gateway.tasks.registry import choose_task, parse, prepare
from gateway.tasks.submission import Idempotency, Submission
from gateway.tasks.understanding import check_understood
from gateway.tasks.workflow_submission import WorkflowSubmission
from gateway.workflows.plan import PlannedRun, StepModels, from_fields, plan
from workers.contract.jobs import PromptWarning
from workers.contract.shares import choose

T = TypeVar("T")

ORDERED_AS: Final = "ordered_as"
"""Attribute of a usage: the alias under which its model was requested."""


@dataclass(slots=True)
class Quoted:
    """A checked submission, with the most that it can cost at the price in force now."""

    submission: Submission
    entry: CatalogEntry
    task: Task
    price_id: int
    price: Price
    prepared: Prepared
    bill: Bill
    workflow: PlannedRun | None = None
    """The steps of a workflow, each with its own quote."""
    warnings: tuple[PromptWarning, ...] = ()
    """What the model will not understand of the texts."""

    @property
    def input(self) -> dict[str, Any]:
        """The input that the job carries."""
        if self.workflow is None:
            return self.prepared.input
        plan: dict[str, Any] = msgspec.to_builtins(self.workflow.plan)
        return plan

    def bounded(self, prepared: Prepared) -> Quoted:
        """Return the quote of the same submission with other bounds."""
        return replace(self, prepared=prepared, bill=quote(self.price, prepared.limits))

    @property
    def input_may_be_stored(self) -> bool:
        """Whether a large input is moved to the blob store. A plan is not: every gateway reads
        it."""
        return self.workflow is None and may_be_stored(self.task)

    @property
    def cost_nanos(self) -> int | None:
        """The charge if the request succeeds, or None if it depends on what is generated."""
        return self.bill.total_nanos if is_exact_quote(self.price) else None


class Quotes:
    def __init__(self, live: LiveCatalog, settings: Settings) -> None:
        self._live = live
        self._settings = settings
        self._plain_bytes_max = min(settings.input_bytes_max, PLAIN_BYTES_MAX)

    def submission(
        self,
        model: str,
        value: Mapping[str, Any],
        *,
        task: Task | None = None,
        webhook: str | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotency: Idempotency | None = None,
    ) -> Submission:
        """Build a submission of the native API: no client waits, and any client may follow.

        The input is read by the task that is named, or by the model's own.
        """
        if webhook is not None:
            private = self._settings.webhook_private_addresses
            check_public_url(webhook, param="webhook", private_allowed=private)
        entry = self.find(model)
        return Submission(
            model=model,
            input=parse(task or entry.task, value)
            if entry.workflow is None
            else WorkflowSubmission(value),
            task=task,
            within="input",
            stream=True,
            waits=False,
            webhook=webhook,
            metadata=metadata,
            idempotency=idempotency,
        )

    def find(self, model: str) -> CatalogEntry:
        """Return the entry of a model or of an alias. Raise ``NotFound`` if there is none."""
        entry = self._live.find(model)
        if entry is None:
            raise unknown_model(model)
        return entry

    def version(self, entry: CatalogEntry, key: str) -> CatalogEntry:
        """Return the entry that runs a request: itself, or the version that the key chooses."""
        if not entry.canary:
            return entry
        shares = dict(entry.canary)
        if (rest := 100 - sum(shares.values())) > 0:
            shares[entry.name] = rest
        return self.find(choose(shares, key))

    def resolve(self, submission: Submission) -> tuple[Submission, CatalogEntry]:
        """Find the entry of a submission, and replace an alias or another spelling by its model's
        name."""
        entry = self.find(submission.model)
        if entry.name != submission.model:
            spelled = self._live.spelling(submission.model)
            alias = spelled if spelled != entry.name else None
            submission = replace(submission, model=entry.name, alias=alias)
        return submission, entry

    def quote(self, submission: Submission, account_id: int) -> Quoted:
        """Quote a submission. Raise ``NotFound`` or ``InvalidRequest``."""
        submission, entry = self.resolve(submission)
        return self.quote_entry(submission, entry, datetime.now(UTC), account_id)

    def check(self, submission: Submission, account_id: int) -> Quoted:
        """Quote a submission and check its size: what is accepted but for money and limits."""
        quoted = self.quote(submission, account_id)
        self.refuse_large(packed(msgspec.msgpack.encode, quoted.input), quoted)
        return quoted

    def quote_entry(
        self, submission: Submission, entry: CatalogEntry, now: datetime, account_id: int
    ) -> Quoted:
        """Quote a resolved submission at the account's price. Raise ``InvalidRequest``."""
        value = submission.input
        if entry.workflow is not None:
            return self._quote_workflow(submission, entry, now, account_id)
        assert not isinstance(value, WorkflowSubmission)
        task = submission.task or choose_task(entry, value)
        if task != entry.task and task not in entry.also:
            raise InvalidRequest(
                "task_not_supported",
                f"{entry.name} does {', '.join((entry.task, *entry.also))}, not {task}.",
                param="model",
            )
        price_id, price = self._live.priced(entry.name, now, account_id, submission.service_class)
        prepared = prepare(entry, value, task=task, prefix=submission.within)
        warnings = check_understood(entry, vars(value), prefix=submission.within)
        if submission.alias is not None:
            prepared = _with_alias(prepared, submission.alias)
        try:
            bill = quote(price, prepared.limits)
        except UnpricedUsage as error:
            # The price fits the model, so what is missing is something to pay for in the input.
            raise InvalidRequest(
                "nothing_to_do", f"This input gives {entry.name} nothing to do: {error}."
            ) from None
        return Quoted(submission, entry, task, price_id, price, prepared, bill, warnings=warnings)

    def _quote_workflow(
        self, submission: Submission, entry: CatalogEntry, now: datetime, account_id: int
    ) -> Quoted:
        """Quote a workflow: at its own price, or at that of its steps."""
        if submission.task not in (None, entry.task):
            raise InvalidRequest(
                "task_not_supported",
                f"{entry.name} does {entry.task}, not {submission.task}.",
                param="model",
            )
        if submission.service_class == "batch":
            raise InvalidRequest(
                "model_not_in_batches", f"{entry.name} is not sold in batches.", param="model"
            )
        value = submission.input
        if not isinstance(value, WorkflowSubmission):
            value = from_fields(
                entry, {name: getattr(value, name) for name in type(value).model_fields}
            )
        price_id, price = self._live.priced(entry.name, now, account_id)
        market = StepModels(
            entry=self.find,
            priced=lambda model: self._live.priced(model, now, account_id),
            own=price,
        )
        planned = plan(entry, value, market, prefix=submission.within)
        prepared = planned.prepared
        if submission.alias is not None:
            prepared = _with_alias(prepared, submission.alias)
        return Quoted(
            submission,
            entry,
            entry.task,
            price_id,
            price,
            prepared,
            planned.bill,
            planned,
            planned.warnings,
        )

    def refuse_large(self, payload: bytes, quoted: Quoted) -> None:
        """Raise ``TooLarge`` if an encoded input or job is too large for its task."""
        size = len(payload)
        if size <= self._plain_bytes_max:
            return
        stored = quoted.input_may_be_stored
        most = self._settings.input_bytes_max if stored else self._plain_bytes_max
        if size > most:
            raise TooLarge(
                "input_too_large",
                f"The input is {size} bytes long; at most {most} are accepted.",
            )

    def entry(self, model: str, account_id: int = LIST) -> CatalogEntry:
        """Return an entry at an account's price. Raise ``NotFound`` if there is none."""
        return self._live.at_price(self.find(model), account_id)


def _with_alias(prepared: Prepared, alias: str) -> Prepared:
    """Record the alias in the usage, so that the receipt shows it. No price depends on it."""
    attributes = {**prepared.limits.attributes, ORDERED_AS: alias}
    limits = msgspec.structs.replace(prepared.limits, attributes=attributes)
    return replace(prepared, limits=limits)


def packed(encode: Callable[[T], bytes], value: T) -> bytes:
    """Encode a value for the queue. Raise ``InvalidRequest`` if the queue cannot represent it."""
    try:
        return encode(value)
    except OverflowError:
        raise InvalidRequest(
            "invalid_value", "A number in the input is beyond 64 bits; send a smaller one."
        ) from None

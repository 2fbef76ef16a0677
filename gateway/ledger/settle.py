"""Settlement: replaces holds by receipts and moves the money, in one transaction per batch.

The ``DELETE … RETURNING`` of the hold makes a charge happen exactly once: the call that gets the
row settles the request, and later calls get nothing. The charge is computed here, from the price at
acceptance and the measured usage, and is never more than the hold.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, bindparam, delete, insert

from gateway.checks.moments import MICROSECOND
from gateway.ledger.balances import Balances, lock_balances
from gateway.ledger.bounds import settle_windows
from gateway.ledger.closed import ClosedRequest, Output, RequestError, Status
from gateway.ledger.concurrency import COUNTED
from gateway.ledger.expenses import (
    NO_RATES,
    NO_RECORD,
    ExpenseRates,
    RunRecord,
    cost_of_steps,
    with_cost,
)
from gateway.ledger.extend import Extension, decide_extensions
from gateway.ledger.lots import consume
from gateway.ledger.prices import PriceCache, read_price
from gateway.ledger.steps import Running, StepLine, charge_steps, measure_steps, write_steps
from gateway.ledger.workflow_plan import plan_of
from gateway.pricing import UnpricedUsage, charge_nanos, clip, quote
from gateway.sql.statements import CompiledStatement, Row, any_of
from gateway.tables.core import (
    SYSTEM_ACCOUNTS,
    holds,
    idempotency,
    outputs,
    receipts,
    transfers,
)
from gateway.tables.webhooks import webhook_deliveries
from workers.contract.attempts import UnreadResult
from workers.contract.jobs import Job, RequestId, Timings, Usage, decode_job

NOTHING: Final = Usage()
UNTIMED: Final = Timings()
BATCH_RETENTION: Final = timedelta(days=1)

_UNREADABLE: Final[Mapping[str, Any]] = {
    "status": "failed",
    "reason": "unreadable",
    "billable": False,
    "output": None,
    "error": RequestError("engine_error", "The stored request cannot be read."),
}

log = logging.getLogger(__name__)


class Settlement(msgspec.Struct, frozen=True):
    """The end of a request. ``billable``: whether its usage is charged."""

    request_id: RequestId
    status: Status
    reason: str
    billable: bool
    usage: Usage = NOTHING
    timings: Timings = UNTIMED
    output: Output | None = None
    error: RequestError | None = None
    run: RunRecord = NO_RECORD
    unread: UnreadResult | None = None
    """The upstream's result, if a part of it could not be read."""
    freed: str | None = None
    """Idempotency key to delete, so that the key can be used again: the queue was full."""


class Closing(msgspec.Struct, frozen=True):
    """A request that this call closed. ``clipped``: its usage exceeded its limits."""

    closed: ClosedRequest
    clipped: bool
    job: Job
    steps: tuple[StepLine, ...] = ()
    running: tuple[Running, ...] = ()
    """Running steps of a workflow run, to be stopped."""


_TAKE: Final = CompiledStatement(
    delete(holds).where(any_of(holds.c.request_id, "ids")).returning(holds)
)
_FREE: Final = CompiledStatement(
    delete(idempotency).where(
        idempotency.c.account_id == bindparam("owner"),
        idempotency.c.key == bindparam("name"),
        idempotency.c.request_id == bindparam("request"),
    )
)
_INSERT_RECEIPT: Final = CompiledStatement(
    insert(receipts), columns=[column.name for column in receipts.columns]
)
_INSERT_OUTPUT: Final = CompiledStatement(
    insert(outputs), columns=[column.name for column in outputs.columns]
)
_INSERT_TRANSFER: Final = CompiledStatement(
    insert(transfers).returning(transfers.c.id),
    columns=[column.name for column in transfers.columns if column is not transfers.c.id],
)


def settle(
    connection: Connection,
    settlements: Sequence[Settlement],
    *,
    now: datetime,
    prices: PriceCache,
    retention: timedelta,
    rates: ExpenseRates = NO_RATES,
) -> list[Closing | None]:
    """Close requests; None for each one that was closed before, including earlier in the batch.

    ``now`` is the ``booking_time`` of the same transaction.
    """
    balances = lock_balances(connection, open=[each.request_id for each in settlements])
    answers = close(
        connection,
        balances,
        settlements,
        now=now,
        prices=prices,
        retention=retention,
        rates=rates,
    )
    balances.write(connection)
    return answers


def close(
    connection: Connection,
    balances: Balances,
    settlements: Sequence[Settlement],
    *,
    now: datetime,
    prices: PriceCache,
    retention: timedelta,
    rates: ExpenseRates,
) -> list[Closing | None]:
    """Do what ``settle`` does, with locked balances that the caller writes."""
    ids = [settlement.request_id for settlement in settlements]
    taken = {row["request_id"]: row for row in _TAKE.rows(connection, ids=ids)}
    _hold_for_overrun(connection, balances, settlements, taken, prices)
    answers: list[Closing | None] = []
    ended: list[tuple[Row, Closing]] = []
    freed: list[dict[str, Any]] = []
    for settlement in settlements:
        row = taken.pop(settlement.request_id, None)
        if row is None:
            answers.append(None)
            continue
        settled = _close(
            connection, row, settlement, now=now, prices=prices, retention=retention, rates=rates
        )
        answers.append(settled)
        ended.append((row, settled))
        if settlement.freed is not None:
            freed.append(
                {
                    "owner": row["account_id"],
                    "name": settlement.freed,
                    "request": settlement.request_id,
                }
            )
    if ended:
        charges = _post(connection, balances, ended, now=now)
        _write(connection, ended, charges, now=now)
    _FREE.run(connection, freed)
    return answers


def _hold_for_overrun(
    connection: Connection,
    balances: Balances,
    settlements: Sequence[Settlement],
    taken: Mapping[str, Row],
    prices: PriceCache,
) -> None:
    """Extend holds for tokens that streams produced beyond their last slice, if credit allows.

    A worker can be ahead of the gateway that extends the hold, or that gateway may have crashed.
    """
    extensions: dict[str, Extension] = {}
    for settlement in settlements:
        row = taken.get(settlement.request_id)
        if row is None or row["held_tokens"] is None or not settlement.billable:
            continue
        if settlement.usage.output_tokens <= row["held_tokens"]:
            continue
        try:
            limits = decode_job(row["job"]).limits
        except msgspec.MsgspecError:
            continue
        tokens = min(settlement.usage.output_tokens, limits.output_tokens)
        covered = msgspec.structs.replace(limits, output_tokens=tokens)
        bill = quote(read_price(connection, row["price_id"], prices), covered)
        # Only the first settlement of a request in a batch closes it.
        extensions.setdefault(
            settlement.request_id, Extension(settlement.request_id, bill.total_nanos, tokens)
        )
    if extensions:
        rows = {id: taken[id] for id in extensions}
        decide_extensions(connection, balances, rows, list(extensions.values()))


def _close(
    connection: Connection,
    row: Row,
    settlement: Settlement,
    *,
    now: datetime,
    prices: PriceCache,
    retention: timedelta,
    rates: ExpenseRates,
) -> Closing:
    """Compute the charge. If the price does not cover the usage, fail as ``unpriced_usage``."""
    readable = True
    try:
        job = decode_job(row["job"])
        plan = plan_of(job)
        steps = None if plan is None else measure_steps(connection, row["request_id"], plan)
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as problem:
        # Written by another version, or damaged. Without its limits nothing can be charged, but the
        # hold must be released.
        log.error("closing %s, whose job cannot be read: %s", row["request_id"], problem)
        readable, job, plan, steps = False, _stand_in(row), None, None
        if settlement.billable or settlement.status == "succeeded":
            settlement = msgspec.structs.replace(settlement, **_UNREADABLE)
    if not readable:
        usage, timings, clipped = NOTHING, settlement.timings, False
    elif steps is None:
        limits = job.limits
        if row["held_tokens"] is not None:
            limits = msgspec.structs.replace(limits, output_tokens=row["held_tokens"])
        usage, clipped = clip(settlement.usage, limits)
        timings = settlement.timings
    else:
        said = settlement.usage.attributes
        attributes = {**said, **steps.usage.attributes, **job.limits.attributes}
        usage = msgspec.structs.replace(steps.usage, attributes=attributes)
        timings, clipped = steps.timings, steps.clipped
    lines: tuple[StepLine, ...] = steps.lines if steps else ()
    cost_nanos, status, reason, error = 0, settlement.status, settlement.reason, settlement.error
    if settlement.billable:
        try:
            if plan is not None and plan.by_steps:
                lines = charge_steps(connection, lines, prices)
                cost_nanos = sum(line.charge_nanos for line in lines)
            else:
                cost_nanos = charge_nanos(read_price(connection, row["price_id"], prices), usage)
        except (UnpricedUsage, ValueError) as problem:
            status, reason = "failed", "unpriced_usage"
            error = RequestError("unpriced_usage", f"The usage could not be priced: {problem}.")
    if row["cut"] and status == "cancelled":
        reason = row["cut"]
    cost_nanos = min(cost_nanos, row["hold_nanos"])
    output = settlement.output if error is settlement.error else None
    warnings = job.warnings + (steps.warnings if steps else ())
    if output is not None and warnings:
        output = msgspec.structs.replace(output, warnings=warnings)
    model = row["served_by"] or row["model"]
    served_by = row["served_by"] or settlement.run.served_by
    run = msgspec.structs.replace(settlement.run, served_by=served_by)
    total_us = (now - row["accepted_at"]) // MICROSECOND
    if steps is None:
        run, expense_nanos = with_cost(run, rates, model, usage)
    else:
        models = ((line.model, line.usage) for line in lines)
        run, expense_nanos = cost_of_steps(run, rates, models)
    closed = ClosedRequest(
        request_id=settlement.request_id,
        account_id=row["account_id"],
        model=row["model"],
        task=row["task"],
        status=status,
        outcome="charged" if cost_nanos else "released",
        reason=reason,
        cost_nanos=cost_nanos,
        hold_nanos=row["hold_nanos"],
        price_id=row["price_id"],
        usage=usage,
        timings=msgspec.structs.replace(timings, total_us=max(total_us, 0)),
        accepted_at=row["accepted_at"],
        settled_at=now,
        error=error,
        output=output,
        metadata=row["metadata"] or {},
        service_class=row["service_class"],
        kept_until=_keep_until(row, now, retention) if output is not None else None,
        run=run,
        expense_nanos=expense_nanos,
    )
    return Closing(
        closed,
        clipped or cost_nanos > row["hold_nanos"],
        job,
        steps=lines,
        running=steps.running if steps else (),
    )


def _stand_in(row: Row) -> Job:
    """Build a job with no input and no limits, for a request whose job cannot be read."""
    return Job(row["request_id"], str(row["account_id"]), row["model"], row["task"], {})


def _post(
    connection: Connection,
    balances: Balances,
    ended: Sequence[tuple[Row, Closing]],
    *,
    now: datetime,
) -> dict[int, int]:
    """Move the money, in one transfer per charged account. Return account → transfer."""
    charged: defaultdict[int, int] = defaultdict(int)
    first: dict[int, str] = {}
    for row, settled in ended:
        account, cost = row["account_id"], settled.closed.cost_nanos
        balances.change(
            account,
            row["key_id"],
            held=-row["hold_nanos"],
            charged=cost,
            opened=-int(row["service_class"] == COUNTED),
        )
        if cost:
            charged[account] += cost
            first.setdefault(account, row["request_id"])
    settle_windows(
        connection,
        [(row["windows"], row["hold_nanos"], settled.closed.cost_nanos) for row, settled in ended],
    )
    consume(connection, charged)
    paying = sorted(charged)
    made = _INSERT_TRANSFER.first_each(
        connection,
        [
            {
                "key": f"charge:{first[id]}",
                "kind": "charge",
                "from_account": id,
                "to_account": SYSTEM_ACCOUNTS["revenue"],
                "amount_nanos": charged[id],
                "posted_after": balances.accounts[id].posted_nanos,
                "account_version": balances.accounts[id].version + 1,
                "actor": "settler",
                "reason": "",
                "booked_at": now,
            }
            for id in paying
        ],
    )
    return {id: row["id"] for id, row in zip(paying, made, strict=True) if row is not None}


def _write(
    connection: Connection,
    ended: Sequence[tuple[Row, Closing]],
    charges: Mapping[int, int],
    *,
    now: datetime,
) -> None:
    _INSERT_RECEIPT.run(
        connection, [_receipt(row, settled.closed, charges) for row, settled in ended]
    )
    write_steps(connection, [(row["request_id"], settled.steps) for row, settled in ended])
    kept = [
        {
            "request_id": row["request_id"],
            "body": settled.closed.output.row() if settled.closed.output else b"",
            "expires_at": settled.closed.kept_until,
        }
        for row, settled in ended
        if settled.closed.kept_until is not None and settled.closed.kept_until > now
    ]
    _INSERT_OUTPUT.run(connection, kept)
    awaited = [
        {
            "request_id": row["request_id"],
            "account_id": row["account_id"],
            "url": row["webhook"],
            "due_at": now,
            "queued_at": now,
        }
        for row, _ in ended
        if row["webhook"]
    ]
    if awaited:
        connection.execute(insert(webhook_deliveries), awaited)


def _keep_until(row: Row, now: datetime, retention: timedelta) -> datetime:
    if row["service_class"] == "batch":
        # Keep it until the batch's file is written, which can be some time after the batch ends.
        deadline_at: datetime = row["deadline_at"]
        return max(deadline_at + BATCH_RETENTION, now + retention)
    return now + retention


def _receipt(row: Row, closed: ClosedRequest, charges: Mapping[int, int]) -> dict[str, Any]:
    return {
        "request_id": closed.request_id,
        "account_id": closed.account_id,
        "key_id": row["key_id"],
        "model": closed.model,
        "task": closed.task,
        "price_id": closed.price_id,
        "outcome": closed.outcome,
        "status": closed.status,
        "reason": closed.reason,
        "hold_nanos": closed.hold_nanos,
        "charge_nanos": closed.cost_nanos,
        **msgspec.structs.asdict(closed.usage),
        "attributes": closed.usage.attributes or None,
        "timings": closed.timings,
        "metadata": row["metadata"],
        "windows": row["windows"],
        "error": closed.error,
        "run": None if closed.run == NO_RECORD else closed.run,
        "expense_nanos": closed.expense_nanos,
        "service_class": closed.service_class,
        "accepted_at": closed.accepted_at,
        "settled_at": closed.settled_at,
        "transfer_id": charges[closed.account_id] if closed.cost_nanos else None,
    }

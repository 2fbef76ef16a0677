"""R1, R5, R6, R14: rules of single rows, which are read table by table.

A nightly proof reads the rows since a moment, the newest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Column, ColumnElement, and_, case, exists, func, or_, select

from gateway.ids import first_request_id
from gateway.ledger.proof.findings import Finding
from gateway.ledger.proof.snapshots import Snapshots
from gateway.pricing import format_usd
from gateway.sql.database import wide_sum
from gateway.tables.core import accounts, holds, lots, outputs, receipts, transfers
from gateway.tables.payments import payments
from gateway.tables.settlement_time import LAG
from gateway.tables.webhooks import webhook_deliveries
from gateway.tables.workflows import receipt_steps

OVERDUE_S: Final = 60


def open_or_closed(snapshots: Snapshots, *, now: datetime) -> Iterator[Finding]:
    """R5: no request has both a hold and a receipt. R6: no hold outlives its deadline by more than
    a minute."""
    late = now - timedelta(seconds=OVERDUE_S)
    closed = exists().where(receipts.c.request_id == holds.c.request_id)
    query = select(holds.c.request_id, holds.c.deadline_at, closed.label("closed"))
    query = query.order_by(holds.c.request_id).limit(snapshots.page)
    after = ""
    while True:
        with snapshots.open() as connection:
            rows = connection.execute(query.where(holds.c.request_id > after)).all()
        for row in rows:
            if row.closed:
                yield Finding("R5", row.request_id, "has a hold although it has a receipt")
            if row.deadline_at < late:
                message = f"has a hold past its deadline {row.deadline_at}"
                yield Finding("R6", row.request_id, message)
        if len(rows) < snapshots.page:
            return
        after = rows[-1].request_id


def sums_to_zero(snapshots: Snapshots, *, since: datetime | None) -> Iterator[Finding]:
    """R1: the balances of all accounts, including those of the system, sum to zero, because each
    transfer has two of them."""
    total, before = 0, None
    columns = ("id", "from_account", "to_account", "amount_nanos", "booked_at")
    newest = select(*(transfers.c[name] for name in columns)).order_by(transfers.c.id.desc())
    while True:
        query = newest if before is None else newest.where(transfers.c.id < before)
        page = query.limit(snapshots.page).subquery()
        given, taken = (
            case((exists().where(accounts.c.id == page.c[side]), page.c.amount_nanos), else_=0)
            for side in ("to_account", "from_account")
        )
        whole = (func.count(), func.min(page.c.id), func.max(page.c.booked_at))
        with snapshots.open() as connection:
            count, before, last, nanos = connection.execute(
                select(*whole, wide_sum(given - taken)).select_from(page)
            ).one()
        total += nanos
        if count < snapshots.page or (since is not None and last < since):
            break
    if total:
        yield Finding("R1", "ledger", f"all balances sum to {format_usd(total)}, not to 0")


@dataclass(frozen=True, slots=True)
class _Reference:
    """A column that refers to a row of another table, and the order in which it is read.

    Rows are recent if their ``moment`` is or, without one, the time of their request id.
    """

    column: Column[Any]
    target: Column[Any]
    order: tuple[Column[Any], ...]
    moment: Column[Any] | None = None


_REFERENCES: Final = (
    _Reference(lots.c.transfer_id, transfers.c.id, (lots.c.id,), lots.c.created_at),
    _Reference(
        payments.c.transfer_id,
        transfers.c.id,
        (payments.c.transfer_id, payments.c.id),
        payments.c.created_at,
    ),
    _Reference(
        receipt_steps.c.request_id,
        receipts.c.request_id,
        (receipt_steps.c.request_id, receipt_steps.c.seq),
    ),
    _Reference(outputs.c.request_id, receipts.c.request_id, (outputs.c.request_id,)),
    _Reference(
        webhook_deliveries.c.request_id, receipts.c.request_id, (webhook_deliveries.c.request_id,)
    ),
)
"""References that are not read with the rows of an account. On PostgreSQL their targets have
partitions, and no foreign key refers to them."""


def references_exist(snapshots: Snapshots, *, since: datetime | None) -> Iterator[Finding]:
    """R14: each reference to a receipt or a transfer has its row."""
    for reference in _REFERENCES:
        reported = None
        for value in _lost(snapshots, reference, since):
            if value != reported:
                message = f"refers to no row of {reference.target.table.name}"
                yield Finding("R14", f"{reference.column.table.name} {value}", message)
            reported = value


def _lost(snapshots: Snapshots, reference: _Reference, since: datetime | None) -> Iterator[Any]:
    column, moment, order = reference.column, reference.moment, reference.order
    lost = ~exists().where(reference.target == column)
    named = [each.label(f"place{number}") for number, each in enumerate(order)]
    query = select(column.label("value"), lost.label("lost"), *named).where(column.is_not(None))
    if moment is not None:
        query = query.add_columns(moment.label("moment"))
    elif since is not None:
        query = query.where(column >= first_request_id(since - LAG))
    query = query.order_by(*(each.desc() for each in order)).limit(snapshots.page)
    last: tuple[Any, ...] | None = None
    while True:
        page = query if last is None else query.where(_before(order, last))
        with snapshots.open() as connection:
            rows = connection.execute(page).all()
        yield from (row.value for row in rows if row.lost)
        if len(rows) < snapshots.page:
            return
        if moment is not None and since is not None and max(row.moment for row in rows) < since:
            return
        last = tuple(rows[-1][2 : 2 + len(order)])


def _before(order: tuple[Column[Any], ...], last: tuple[Any, ...]) -> ColumnElement[bool]:
    """SQL condition: a row comes before another in the order of some columns."""
    earlier: ColumnElement[bool] = order[-1] < last[-1]
    for column, value in zip(reversed(order[:-1]), reversed(last[:-1]), strict=True):
        earlier = and_(column <= value, or_(column < value, earlier))
    return earlier

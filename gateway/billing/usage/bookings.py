"""The bookings that a report of usage sums: receipts when they were settled, and refunds.

A figure of a report is the sum of the bookings of the same span and filters. Receipts of archived
months are in their files only, and are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias

from sqlalchemy import ColumnElement, Connection, and_, func, literal, or_, select

from gateway.accounts.keys import PREFIX_LENGTH
from gateway.billing.usage.report import Filters, Span
from gateway.billing.usage.sums import filter_conditions
from gateway.checks.moments import EPOCH, microseconds_of
from gateway.errors import InvalidRequest
from gateway.ids import first_request_id, is_request_id
from gateway.sql.partitions import is_partitioned
from gateway.tables.core import accounts, keys, receipts, refunds
from gateway.tables.settlement_time import refunded_within, settled_within

BookingKind: TypeAlias = Literal["charge", "free", "refund", "correction"]
_RECENT: Final = timedelta(days=1)
"""Time before the newest wanted booking that is searched first."""
_COLUMNS: Final = (
    receipts.c.request_id,
    receipts.c.model,
    receipts.c.task,
    accounts.c.name.label("account"),
    keys.c.prefix,
)


@dataclass(frozen=True, slots=True)
class Booking:
    """A charge or, with a negative amount, what was given back of one."""

    booked_at: datetime
    kind: BookingKind
    request_id: str
    seq: int
    """0 for the charge of a request; its refunds are counted from 1."""
    amount_nanos: int
    account: str
    key: str
    model: str
    task: str

    @property
    def place(self) -> tuple[datetime, str, int]:
        return self.booked_at, self.request_id, self.seq

    @property
    def cursor(self) -> str:
        """Position in a list, after which its next page begins."""
        return f"{microseconds_of(self.booked_at)}-{self.request_id}-{self.seq}"


def list_bookings(
    connection: Connection, span: Span, filters: Filters, *, limit: int, cursor: str | None
) -> list[Booking]:
    """List the bookings of a span, newest first. Raise ``InvalidRequest`` if the cursor is not
    valid."""
    after = None if cursor is None else _read_cursor(cursor)
    found = [
        *_charges(connection, span, filters, limit, after),
        *_refunds(connection, span, filters, limit, after),
    ]
    return sorted(found, key=lambda each: each.place, reverse=True)[:limit]


def _charges(
    connection: Connection, span: Span, filters: Filters, limit: int, after: _Place | None
) -> list[Booking]:
    moment, id = receipts.c.settled_at, receipts.c.request_id
    query = (
        select(*_COLUMNS, moment, receipts.c.charge_nanos, receipts.c.outcome)
        .join(accounts, accounts.c.id == receipts.c.account_id)
        .join(keys, keys.c.id == receipts.c.key_id)
        .where(*filter_conditions(receipts, filters), *_before(after, moment, id, literal(0)))
        .order_by(moment.desc(), id.desc())
        .limit(limit)
    )
    rows: Sequence[Any] = []
    for starts_at in _starts(connection, span, filters, limit, after):
        within = settled_within(connection, starts_at, span.ends_at)
        rows = connection.execute(query.where(*within)).mappings().all()
        if len(rows) == limit:
            break
    return [
        _booking(
            row,
            row["settled_at"],
            "charge" if row["outcome"] == "charged" else "free",
            seq=0,
            amount_nanos=row["charge_nanos"],
        )
        for row in rows
    ]


def _starts(
    connection: Connection, span: Span, filters: Filters, limit: int, after: _Place | None
) -> Iterator[datetime]:
    """Yield ever earlier starts to look for the newest bookings from, the span's at last.

    PostgreSQL has no index in the order of the bookings of all accounts, and would sort the span.
    But if as many receipts as are wanted were booked since a moment, the newest ones were too. The
    requests that began last find a moment that is seldom much too early.
    """
    if is_partitioned(connection) and filters.account_ids is None and filters.key_ids is None:
        end = min(span.ends_at, datetime.now(UTC) if after is None else after[0])
        recent = max(end - _RECENT, span.starts_at)
        began_last = (
            select(receipts.c.settled_at)
            .where(
                receipts.c.request_id >= first_request_id(recent),
                receipts.c.request_id < first_request_id(end),
                receipts.c.settled_at < end,
            )
            .order_by(receipts.c.request_id.desc())
            .limit(limit)
            .subquery()
        )
        moment = began_last.c.settled_at
        found, earliest = connection.execute(select(func.count(), func.min(moment))).one()
        if found == limit and recent < earliest:
            yield earliest
        if span.starts_at < recent:
            yield recent
    yield span.starts_at


def _refunds(
    connection: Connection, span: Span, filters: Filters, limit: int, after: _Place | None
) -> list[Booking]:
    moment, id = refunds.c.booked_at, refunds.c.request_id
    seq = refunds.c.seq + 1
    booked = [moment >= span.starts_at, moment < span.ends_at]
    if filters.account_ids is not None:
        booked.append(refunds.c.account_id.in_(filters.account_ids))
    query = (
        select(*_COLUMNS, moment, refunds.c.kind, seq.label("seq"), refunds.c.amount_nanos)
        .select_from(refunds)
        .join(receipts, receipts.c.request_id == id)
        .join(accounts, accounts.c.id == receipts.c.account_id)
        .join(keys, keys.c.id == receipts.c.key_id)
        .where(
            *filter_conditions(receipts, filters, indexed=False),
            *booked,
            *refunded_within(connection, *booked),
            *_before(after, moment, id, seq),
        )
        .order_by(moment.desc(), id.desc(), seq.desc())
        .limit(limit)
    )
    return [
        _booking(
            row, row["booked_at"], row["kind"], seq=row["seq"], amount_nanos=-row["amount_nanos"]
        )
        for row in connection.execute(query).mappings()
    ]


def _booking(
    row: Any, booked_at: datetime, kind: BookingKind, *, seq: int, amount_nanos: int
) -> Booking:
    return Booking(
        booked_at=booked_at,
        kind=kind,
        request_id=row["request_id"],
        seq=seq,
        amount_nanos=amount_nanos,
        account=row["account"],
        key=row["prefix"][:PREFIX_LENGTH],
        model=row["model"],
        task=row["task"],
    )


_Place: TypeAlias = tuple[datetime, str, int]


def _before(
    after: _Place | None,
    moment: ColumnElement[datetime],
    id: ColumnElement[Any],
    seq: ColumnElement[int],
) -> Sequence[ColumnElement[bool]]:
    """Return the condition of what a list has after a place."""
    if after is None:
        return ()
    at, request_id, number = after
    same = and_(moment == at, or_(id < request_id, and_(id == request_id, seq < number)))
    return (moment <= at, or_(moment < at, same))


def _read_cursor(cursor: str) -> _Place:
    us, _, rest = cursor.partition("-")
    request_id, _, seq = rest.rpartition("-")
    if not (us.isdecimal() and seq.isdecimal() and len(us) < 18 and len(seq) < 9):
        raise _no_cursor(cursor)
    if not is_request_id(request_id):
        raise _no_cursor(cursor)
    return EPOCH + timedelta(microseconds=int(us)), request_id, int(seq)


def _no_cursor(cursor: str) -> InvalidRequest:
    message = f"cursor is {cursor!r}; follow the link to the next page."
    return InvalidRequest("invalid_value", message, param="cursor")

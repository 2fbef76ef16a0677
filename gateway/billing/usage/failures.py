"""Counts requests that did not succeed, by reason and model, or by time. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Select,
    Subquery,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    select,
    union_all,
)

from gateway.archive.marks import removed_archives
from gateway.billing.usage.report import Filters
from gateway.checks.moments import EPOCH
from gateway.ids import first_request_id, time_of
from gateway.sql.database import exact_sum, time_bucket
from gateway.tables.core import receipts
from gateway.tables.settlement_time import LAG, LEAD

UNSUCCESSFUL: Final = ("failed", "cancelled", "expired")
SCANNED_MAX: Final = 50_000
"""Maximum number of unsuccessful requests that are counted, the newest."""
QUARTER: Final = timedelta(minutes=15)
"""Interval of counts over time: hours and days of every zone consist of whole ones."""


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Requests of a model that ended for the same reason; ``example`` is the newest."""

    status: str
    reason: str
    model: str
    requests: int
    first_at: datetime
    last_at: datetime
    example: str


@dataclass(frozen=True, slots=True)
class Failures:
    """Groups, the largest first. ``capped``: only the newest ``SCANNED_MAX`` are counted."""

    groups: Sequence[FailureGroup]
    capped: bool


def count_failures(
    connection: Connection,
    *,
    account_id: int | None,
    starts_at: datetime,
    ends_at: datetime,
) -> Failures:
    """Count the requests accepted in a span that failed, expired or were cancelled."""
    parameters: dict[str, Any] = {
        "first": first_request_id(starts_at),
        "end": first_request_id(ends_at),
    }
    if account_id is not None:
        parameters["account"] = account_id
    query = _FAILURES if account_id is None else _FAILURES_OF_ACCOUNT
    rows = connection.execute(query, parameters).all()
    groups = [
        FailureGroup(
            status=row.status,
            reason=row.reason,
            model=row.model,
            requests=row.requests,
            first_at=time_of("req_", row.first),
            last_at=time_of("req_", row.last),
            example=row.last,
        )
        for row in rows
    ]
    return Failures(groups, sum(group.requests for group in groups) >= SCANNED_MAX)


class EndCount(NamedTuple):
    """Number of requests that ended with a status in the quarter of an hour from ``at``."""

    status: str
    at: datetime
    requests: int


def count_unsuccessful(
    connection: Connection, filters: Filters, *, starts_at: datetime, ends_at: datetime
) -> Sequence[EndCount] | None:
    """Count the requests that ended without success in a span, by status and time.

    None if there are more than ``SCANNED_MAX``, or if some are archived.
    """
    if removed_archives(connection, (starts_at, ends_at)):
        return None
    id, names = receipts.c.request_id, ("key_id", "model", "task")
    conditions: list[ColumnElement[bool]] = [
        id >= first_request_id(starts_at - LAG),
        id < first_request_id(ends_at + LEAD),
    ]
    if filters.account_ids is not None:
        conditions.append(receipts.c.account_id.in_(filters.account_ids))
    columns = (id, receipts.c.status, receipts.c.settled_at, *(receipts.c[name] for name in names))
    every = _newest(columns, conditions)
    # No index has the other conditions: they select among a bounded number of rows.
    wanted: list[ColumnElement[bool]] = [
        every.c.settled_at >= starts_at,
        every.c.settled_at < ends_at,
        *(
            every.c[name].in_(values)
            for name in names
            if (values := getattr(filters, f"{name}s")) is not None
        ),
    ]
    seconds = int(QUARTER.total_seconds())
    at = time_bucket(every.c.settled_at, seconds).label("at")
    rows = connection.execute(
        select(
            every.c.status,
            at,
            func.count().label("scanned"),
            exact_sum(case((and_(*wanted), 1), else_=0)).label("requests"),
        ).group_by(every.c.status, literal_column("2"))
    ).all()
    if sum(row.scanned for row in rows) >= SCANNED_MAX:
        return None
    return [
        EndCount(row.status, EPOCH + row.at * QUARTER, row.requests) for row in rows if row.requests
    ]


def _newest(columns: Sequence[Column[Any]], conditions: Sequence[ColumnElement[bool]]) -> Subquery:
    """Select the newest unsuccessful receipts, ``SCANNED_MAX`` of each status.

    One query for each status, because the partial indexes of unsuccessful receipts begin with it.
    SQLite uses them for a condition that is spelled as theirs.
    """
    of_status = [
        select(
            select(*columns)
            .where(
                receipts.c.status != literal_column("'succeeded'"),
                receipts.c.status == status,
                *conditions,
            )
            .order_by(receipts.c.request_id.desc())
            .limit(SCANNED_MAX)
            .subquery()
        )
        for status in UNSUCCESSFUL
    ]
    return union_all(*of_status).subquery()


def _failures(*conditions: ColumnElement[bool]) -> Select[Any]:
    id = receipts.c.request_id
    within = (id >= bindparam("first"), id < bindparam("end"))
    columns = (id, receipts.c.status, receipts.c.reason, receipts.c.model)
    every = _newest(columns, [*within, *conditions])
    newest = select(every).order_by(every.c.request_id.desc()).limit(SCANNED_MAX).subquery()
    places = (newest.c.status, newest.c.reason, newest.c.model)
    first, last = func.min(newest.c.request_id), func.max(newest.c.request_id)
    return (
        select(*places, func.count().label("requests"), first.label("first"), last.label("last"))
        .group_by(*places)
        .order_by(func.count().desc(), *places)
    )


# Kept, because building one takes longer than reading its rows.
_FAILURES: Final = _failures()
_FAILURES_OF_ACCOUNT: Final = _failures(receipts.c.account_id == bindparam("account"))

"""Counts requests that did not succeed, by reason and model. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, func, literal_column, select, union_all

from gateway.ids import first_request_id, time_of
from gateway.tables.core import receipts

UNSUCCESSFUL: Final = ("failed", "cancelled", "expired")
SCANNED_MAX: Final = 50_000
"""Maximum number of unsuccessful requests that are counted, the newest."""


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
    id = receipts.c.request_id
    conditions = [id >= first_request_id(starts_at), id < first_request_id(ends_at)]
    if account_id is not None:
        conditions.append(receipts.c.account_id == account_id)
    # One query for each status, because the partial indexes of unsuccessful receipts begin with it.
    # SQLite uses them for a condition that is spelled as theirs.
    of_status = [
        select(
            select(id, receipts.c.status, receipts.c.reason, receipts.c.model)
            .where(
                receipts.c.status != literal_column("'succeeded'"),
                receipts.c.status == status,
                *conditions,
            )
            .order_by(id.desc())
            .limit(SCANNED_MAX)
            .subquery()
        )
        for status in UNSUCCESSFUL
    ]
    every = union_all(*of_status).subquery()
    newest = select(every).order_by(every.c.request_id.desc()).limit(SCANNED_MAX).subquery()
    places = (newest.c.status, newest.c.reason, newest.c.model)
    first, last = func.min(newest.c.request_id), func.max(newest.c.request_id)
    rows = connection.execute(
        select(*places, func.count().label("requests"), first.label("first"), last.label("last"))
        .group_by(*places)
        .order_by(func.count().desc(), *places)
    ).all()
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

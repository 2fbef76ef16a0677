"""Webhook deliveries in SQL: claim due ones, record attempts, list, send again, delete.

An attempt is counted when it is claimed, so a delivery that crashes the process is eventually given
up. Each statement uses an index and is limited to a number of rows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    RowMapping,
    Select,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)

from gateway.checks.public_urls import host_of
from gateway.tables.webhooks import webhook_attempts, webhook_deliveries
from gateway.webhooks.lanes import Lanes

Outcome: TypeAlias = Literal["delivered", "gone", "failed"]
Status: TypeAlias = Literal["pending", "delivered", "gone", "failed"]

SCHEDULE_S: Final = (0, 5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Pauses before each attempt, as Standard Webhooks recommends: about three days in total."""
ATTEMPTS_MAX: Final = len(SCHEDULE_S)
SERIES_MAX: Final = timedelta(days=4)
"""Age at which a delivery is given up, even if an open circuit allowed only few attempts."""
CLAIM: Final = timedelta(seconds=60)
"""Time for which a claimed delivery is not claimed by other gateways."""
PROBE: Final = timedelta(seconds=15)
"""Time for which the deliveries of a silent receiver wait for the probe in flight."""
UNSENT: Final = timedelta(seconds=5)
"""Pause before a delivery is claimed again that was not sent because of an outage of SQL."""
ACCOUNTS_MAX: Final = 256
"""Accounts with open deliveries that one claim looks at; the next claim starts after them."""
ROWS_MAX: Final = 64
"""Due deliveries of one account that one claim looks at."""

_TABLE: Final = webhook_deliveries


@dataclass(frozen=True, slots=True)
class Claimed:
    """A delivery that this gateway sends now."""

    request_id: str
    account_id: int
    url: str
    host: str
    attempts: int
    number: int
    """Number of this attempt among all attempts of the delivery."""
    due_at: datetime


@dataclass(frozen=True, slots=True)
class Claim:
    """Result of ``claim``: deliveries to send, and where the next claim starts."""

    taken: Sequence[Claimed]
    given_up: int
    after: int
    """Account after which the next claim starts."""
    more: bool
    """Whether there can be more due deliveries."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Result of an attempt. With neither code nor error it was not made, and does not count."""

    of: Claimed
    started_at: datetime
    duration_ms: int
    code: int | None = None
    error: str | None = None
    final: bool = False
    """Whether another attempt would be pointless."""

    @property
    def outcome(self) -> Outcome | None:
        """The end of the delivery, or None if it is tried again."""
        if self.code is not None and 200 <= self.code < 300:
            return "delivered"
        if self.code == 410:
            return "gone"
        made = self.code is not None or self.error is not None
        return "failed" if made and (self.final or self.of.attempts >= ATTEMPTS_MAX) else None


@dataclass(frozen=True, slots=True)
class Attempt:
    number: int
    started_at: datetime
    duration_ms: int
    code: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery with the attempts whose result is known."""

    request_id: str
    account_id: int
    url: str
    status: Status
    queued_at: datetime
    due_at: datetime | None
    ended_at: datetime | None
    attempts: Sequence[Attempt] = field(default_factory=tuple)


def claim(connection: Connection, lanes: Lanes, now: datetime, *, after: int) -> Claim:
    """Claim due deliveries, of each account the oldest first.

    Claimed deliveries are started in ``lanes``. Deliveries to silent receivers are postponed
    without counting an attempt.
    """
    accounts, cut_at = _accounts_due(connection, now, after)
    more = cut_at is not None
    found: dict[int, deque[RowMapping]] = {}
    given_up: list[str] = []
    put_off: list[dict[str, Any]] = []
    for account_id in accounts:
        if len(found) >= lanes.room_in_all:
            more = True
            break
        if lanes.room(account_id) <= 0:
            continue
        rows = _rows_due(connection, account_id, now)
        more = more or len(rows) == ROWS_MAX
        for row in rows:
            until = lanes.deferred_until(account_id, host_of(row["url"]), now, patience=PROBE)
            if row["attempts"] >= ATTEMPTS_MAX or now - row["queued_at"] > SERIES_MAX:
                given_up.append(row["request_id"])
            elif until is not None:
                pause = (until - now) * random.uniform(1.0, 1.1)
                put_off.append({"b_request": row["request_id"], "b_due": now + pause})
            else:
                found.setdefault(account_id, deque()).append(row)
    taken = _share_out(found, lanes)
    if put_off:
        connection.execute(
            update(_TABLE)
            .where(_TABLE.c.request_id == bindparam("b_request"))
            .values(due_at=bindparam("b_due")),
            put_off,
        )
    if given_up:
        connection.execute(
            update(_TABLE)
            .where(_TABLE.c.request_id.in_(given_up))
            .values(outcome="failed", ended_at=now)
        )
    if taken:
        connection.execute(
            update(_TABLE)
            .where(_TABLE.c.request_id.in_([one.request_id for one in taken]))
            .values(attempts=_TABLE.c.attempts + 1, tried=_TABLE.c.tried + 1, due_at=now + CLAIM)
        )
    if found:
        after = next(reversed(found))
    elif cut_at is not None:
        after = cut_at
    return Claim(taken, len(given_up), after, more)


def _share_out(found: Mapping[int, deque[RowMapping]], lanes: Lanes) -> list[Claimed]:
    """Claim one delivery per account in rounds, until the pool or the accounts are at capacity."""
    taken: list[Claimed] = []
    waiting = dict(found)
    while waiting:
        for account_id, rows in list(waiting.items()):
            row = None
            while rows and lanes.room(account_id) > 0:
                row = rows.popleft()
                host = host_of(row["url"])
                if lanes.fits(account_id, host):
                    lanes.start(account_id, host)
                    taken.append(
                        Claimed(
                            row["request_id"],
                            account_id,
                            row["url"],
                            host,
                            attempts=row["attempts"] + 1,
                            number=row["tried"] + 1,
                            due_at=row["due_at"],
                        )
                    )
                    break
                row = None
            if row is None:
                del waiting[account_id]
    return taken


def _accounts_due(
    connection: Connection, now: datetime, after: int
) -> tuple[list[int], int | None]:
    """List accounts with due deliveries, starting after one and wrapping around.

    Also return the last account that was looked at if there were too many, else None.
    """
    walked = _walk(connection, after, ACCOUNTS_MAX)
    if len(walked) < ACCOUNTS_MAX and after:
        rest = _walk(connection, 0, ACCOUNTS_MAX - len(walked))
        walked += [one for one in rest if one[0] <= after]
    cut_at = walked[-1][0] if len(walked) >= ACCOUNTS_MAX else None
    return [account_id for account_id, first in walked if first <= now], cut_at


def _build_walk() -> Select[int, datetime]:
    """Build the query of accounts with open deliveries, with first due times: two index seeks per
    account."""
    step, due = _TABLE.alias(), _TABLE.alias()
    walk = (
        select(func.min(_TABLE.c.account_id).label("account_id"))
        .where(_TABLE.c.ended_at.is_(None), _TABLE.c.account_id > bindparam("after"))
        .cte("walk", recursive=True)
    )
    following = (
        select(func.min(step.c.account_id))
        .where(step.c.ended_at.is_(None), step.c.account_id > walk.c.account_id)
        .scalar_subquery()
    )
    walk = walk.union_all(select(following).where(walk.c.account_id.is_not(None)))
    first = (
        select(func.min(due.c.due_at))
        .where(due.c.ended_at.is_(None), due.c.account_id == walk.c.account_id)
        .scalar_subquery()
    )
    found = select(walk.c.account_id, first).where(walk.c.account_id.is_not(None))
    return found.limit(bindparam("limit", type_=Integer()))


# Built once: an idle gateway asks every second.
_WALK: Final = _build_walk()


def _walk(connection: Connection, after: int, limit: int) -> list[tuple[int, datetime]]:
    found = connection.execute(_WALK, {"after": after, "limit": limit})
    return [(row[0], row[1]) for row in found if row[1] is not None]


def _rows_due(connection: Connection, account_id: int, now: datetime) -> Sequence[RowMapping]:
    query = (
        select(_TABLE)
        .where(
            _TABLE.c.ended_at.is_(None),
            _TABLE.c.account_id == account_id,
            _TABLE.c.due_at <= now,
        )
        .order_by(_TABLE.c.due_at)
        .limit(ROWS_MAX)
        .with_for_update(skip_locked=True)
    )
    return connection.execute(query).mappings().all()


_ATTEMPT: Final = insert(webhook_attempts)
# By the number of the attempt, so that a late result does not change a later claim.
_MINE: Final[tuple[ColumnElement[bool], ...]] = (
    _TABLE.c.request_id == bindparam("b_request"),
    _TABLE.c.tried == bindparam("b_number"),
)
_END: Final = (
    update(_TABLE)
    .where(*_MINE)
    .values(outcome=bindparam("b_outcome"), ended_at=bindparam("b_ended"))
)
_AGAIN: Final = update(_TABLE).where(*_MINE).values(due_at=bindparam("b_due"))
_UNSENT: Final = (
    update(_TABLE)
    .where(*_MINE)
    .values(due_at=bindparam("b_due"), attempts=_TABLE.c.attempts - 1, tried=_TABLE.c.tried - 1)
)


def record(connection: Connection, results: Sequence[AttemptResult], now: datetime) -> None:
    """Record the results of attempts, and when deliveries that did not end are due again."""
    ended, again, unsent, attempts = [], [], [], []
    kept = _kept(connection, [result.of.request_id for result in results])
    for result in results:
        if result.of.request_id not in kept:
            continue
        mine = {"b_request": result.of.request_id, "b_number": result.of.number}
        if result.code is None and result.error is None:
            unsent.append({**mine, "b_due": now + UNSENT})
            continue
        attempts.append(
            {
                "request_id": result.of.request_id,
                "number": result.of.number,
                "started_at": result.started_at,
                "duration_ms": result.duration_ms,
                "code": result.code,
                "error": result.error,
            }
        )
        if result.outcome is not None:
            ended.append({**mine, "b_outcome": result.outcome, "b_ended": now})
        else:
            pause_s = SCHEDULE_S[result.of.attempts] * random.uniform(0.9, 1.1)
            again.append({**mine, "b_due": now + timedelta(seconds=pause_s)})
    for statement, rows in (
        (_ATTEMPT, attempts), (_END, ended), (_AGAIN, again), (_UNSENT, unsent)
    ):  # fmt: skip
        if rows:
            connection.execute(statement, rows)


def _kept(connection: Connection, ids: Sequence[str]) -> set[str]:
    """Return those of some deliveries that have not been deleted since."""
    if not ids:
        return set()
    query = select(_TABLE.c.request_id).where(_TABLE.c.request_id.in_(ids))
    return set(connection.scalars(query))


def list_deliveries(
    connection: Connection,
    *,
    account_id: int | None,
    limit: int,
    status: Status | None = None,
    before: str | None = None,
) -> list[Delivery]:
    """List deliveries of one account, or of all for None, newest request first."""
    query = select(_TABLE).order_by(_TABLE.c.request_id.desc()).limit(limit)
    if account_id is not None:
        query = query.where(_TABLE.c.account_id == account_id)
    if status is not None:
        outcome = _TABLE.c.outcome
        query = query.where(outcome.is_(None) if status == "pending" else outcome == status)
    if before is not None:
        query = query.where(_TABLE.c.request_id < before)
    return _with_attempts(connection, connection.execute(query).mappings().all())


def find_delivery(
    connection: Connection, request_id: str, *, account_id: int | None
) -> Delivery | None:
    """Find the delivery of a request of an account, or of any for None."""
    query = select(_TABLE).where(_TABLE.c.request_id == request_id)
    if account_id is not None:
        query = query.where(_TABLE.c.account_id == account_id)
    found = _with_attempts(connection, connection.execute(query).mappings().all())
    return found[0] if found else None


def send_again(
    connection: Connection, request_id: str, *, account_id: int | None, now: datetime
) -> Delivery | None:
    """Start a new series of attempts, whatever the result of the last one. None if not found."""
    mine = [_TABLE.c.request_id == request_id]
    if account_id is not None:
        mine.append(_TABLE.c.account_id == account_id)
    connection.execute(
        update(_TABLE)
        .where(*mine)
        .values(attempts=0, due_at=now, queued_at=now, outcome=None, ended_at=None)
    )
    return find_delivery(connection, request_id, account_id=account_id)


def delete_ended(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete some deliveries that ended before a moment, with attempts; return their number."""
    ids = connection.scalars(
        select(_TABLE.c.request_id)
        .where(_TABLE.c.ended_at < before)
        .order_by(_TABLE.c.ended_at)
        .limit(limit)
    ).all()
    if ids:
        connection.execute(delete(_TABLE).where(_TABLE.c.request_id.in_(ids)))
    return len(ids)


def _with_attempts(connection: Connection, rows: Sequence[RowMapping]) -> list[Delivery]:
    table = webhook_attempts
    attempts: dict[str, list[Attempt]] = {row["request_id"]: [] for row in rows}
    query = (
        select(table)
        .where(table.c.request_id.in_(attempts))
        .order_by(table.c.request_id, table.c.number)
    )
    for row in connection.execute(query) if rows else ():
        attempts[row.request_id].append(
            Attempt(row.number, row.started_at, row.duration_ms, row.code, row.error)
        )
    return [
        Delivery(
            row["request_id"],
            row["account_id"],
            row["url"],
            row["outcome"] or "pending",
            row["queued_at"],
            None if row["ended_at"] else row["due_at"],
            row["ended_at"],
            attempts[row["request_id"]],
        )
        for row in rows
    ]

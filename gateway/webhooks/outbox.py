"""Deliveries in SQL, to be sent with retries: claim due ones, record attempts.

An outbox is a table of deliveries and one of their attempts: of requests' webhooks, or of notices.
An attempt is counted when it is claimed, so a delivery that crashes the process is eventually given
up. Each statement uses an index and is limited to a number of rows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeAlias

from sqlalchemy import (
    Connection,
    Integer,
    RowMapping,
    Select,
    Table,
    bindparam,
    func,
    insert,
    select,
    update,
)

from gateway.checks.public_urls import host_of
from gateway.webhooks.lanes import Lanes

Outcome: TypeAlias = Literal["delivered", "gone", "failed"]

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
BEGINNING: Final = -1
"""Account after which the first claim starts: the number 0 is the operator's."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A delivery that this gateway sends now."""

    id: str
    account_id: int
    url: str
    host: str
    attempts: int
    number: int
    """Number of this attempt among all attempts of the delivery."""
    due_at: datetime
    kind: str = ""
    """Kind of the notice; requests' webhooks have none."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A delivery whose attempts are used up."""

    account_id: int
    url: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Result of ``claim``: deliveries to send, and where the next claim starts."""

    taken: Sequence[Claimed]
    given_up: Sequence[GivenUp]
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
    answer: str = ""
    """The first characters of what the receiver answered."""

    @property
    def outcome(self) -> Outcome | None:
        """The end of the delivery, or None if it is tried again."""
        if self.code is not None and 200 <= self.code < 300:
            return "delivered"
        if self.code == 410:
            return "gone"
        made = self.code is not None or self.error is not None
        return "failed" if made and (self.final or self.of.attempts >= ATTEMPTS_MAX) else None


class Outbox:
    """Two tables with the columns of ``webhook_deliveries`` and ``webhook_attempts``; the names of
    their keys can differ, and deliveries can have a ``kind``."""

    def __init__(self, deliveries: Table, attempts: Table) -> None:
        self._table = deliveries
        self._attempts = attempts
        (self._id,) = deliveries.primary_key.columns
        self._of = next(iter(attempts.primary_key.columns)).name
        # Built once: an idle gateway asks every second.
        self._walking = _build_walk(deliveries)

    def claim(self, connection: Connection, lanes: Lanes, now: datetime, *, after: int) -> Claim:
        """Claim due deliveries, of each account the oldest first.

        Claimed deliveries are started in ``lanes``. Deliveries to silent receivers are postponed
        without counting an attempt.
        """
        accounts, cut_at = self._accounts_due(connection, now, after)
        more = cut_at is not None
        found: dict[int, deque[RowMapping]] = {}
        given_up: list[RowMapping] = []
        put_off: list[dict[str, Any]] = []
        for account_id in accounts:
            if len(found) >= lanes.room_in_all:
                more = True
                break
            if lanes.room(account_id) <= 0:
                continue
            rows = self._rows_due(connection, account_id, now)
            more = more or len(rows) == ROWS_MAX
            for row in rows:
                until = lanes.deferred_until(account_id, host_of(row["url"]), now, patience=PROBE)
                if row["attempts"] >= ATTEMPTS_MAX or now - row["queued_at"] > SERIES_MAX:
                    given_up.append(row)
                elif until is not None:
                    pause = (until - now) * random.uniform(1.0, 1.1)
                    put_off.append({"b_id": row[self._id], "b_due": now + pause})
                else:
                    found.setdefault(account_id, deque()).append(row)
        taken = self._share_out(found, lanes)
        table = self._table
        if put_off:
            connection.execute(
                update(table)
                .where(self._id == bindparam("b_id"))
                .values(due_at=bindparam("b_due")),
                put_off,
            )
        if given_up:
            connection.execute(
                update(table)
                .where(self._id.in_([row[self._id] for row in given_up]))
                .values(outcome="failed", ended_at=now)
            )
        if taken:
            connection.execute(
                update(table)
                .where(self._id.in_([one.id for one in taken]))
                .values(attempts=table.c.attempts + 1, tried=table.c.tried + 1, due_at=now + CLAIM)
            )
        if found:
            after = next(reversed(found))
        elif cut_at is not None:
            after = cut_at
        lost = [GivenUp(row["account_id"], row["url"], row.get("kind", "")) for row in given_up]
        return Claim(taken, lost, after, more)

    def record(
        self, connection: Connection, results: Sequence[AttemptResult], now: datetime
    ) -> None:
        """Record the results of attempts, and when deliveries that did not end are due again."""
        table = self._table
        ended, again, unsent, attempts = [], [], [], []
        kept = self._kept(connection, [result.of.id for result in results])
        for result in results:
            if result.of.id not in kept:
                continue
            mine = {"b_id": result.of.id, "b_number": result.of.number}
            if result.code is None and result.error is None:
                unsent.append({**mine, "b_due": now + UNSENT})
                continue
            attempts.append(
                {
                    self._of: result.of.id,
                    "number": result.of.number,
                    "started_at": result.started_at,
                    "duration_ms": result.duration_ms,
                    "code": result.code,
                    "error": result.error,
                    "answer": result.answer or None,
                }
            )
            if result.outcome is not None:
                ended.append({**mine, "b_outcome": result.outcome, "b_ended": now})
            else:
                pause_s = SCHEDULE_S[result.of.attempts] * random.uniform(0.9, 1.1)
                again.append({**mine, "b_due": now + timedelta(seconds=pause_s)})
        # By the number of the attempt, so that a late result does not change a later claim.
        attempt = update(table).where(
            self._id == bindparam("b_id"), table.c.tried == bindparam("b_number")
        )
        due = attempt.values(due_at=bindparam("b_due"))
        for statement, rows in (
            (insert(self._attempts), attempts),
            (
                attempt.values(outcome=bindparam("b_outcome"), ended_at=bindparam("b_ended")),
                ended,
            ),
            (due, again),
            (due.values(attempts=table.c.attempts - 1, tried=table.c.tried - 1), unsent),
        ):
            if rows:
                connection.execute(statement, rows)

    def _share_out(self, found: Mapping[int, deque[RowMapping]], lanes: Lanes) -> list[Claimed]:
        """Claim one delivery per account in rounds, until the pool or the accounts are at
        capacity."""
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
                                row[self._id],
                                account_id,
                                row["url"],
                                host,
                                attempts=row["attempts"] + 1,
                                number=row["tried"] + 1,
                                due_at=row["due_at"],
                                kind=row.get("kind", ""),
                            )
                        )
                        break
                    row = None
                if row is None:
                    del waiting[account_id]
        return taken

    def _accounts_due(
        self, connection: Connection, now: datetime, after: int
    ) -> tuple[list[int], int | None]:
        """List accounts with due deliveries, starting after one and wrapping around.

        Also return the last account that was looked at if there were too many, else None.
        """
        walked = self._walk(connection, after, ACCOUNTS_MAX)
        if len(walked) < ACCOUNTS_MAX and after > BEGINNING:
            rest = self._walk(connection, BEGINNING, ACCOUNTS_MAX - len(walked))
            walked += [one for one in rest if one[0] <= after]
        cut_at = walked[-1][0] if len(walked) >= ACCOUNTS_MAX else None
        return [account_id for account_id, first in walked if first <= now], cut_at

    def _walk(self, connection: Connection, after: int, limit: int) -> list[tuple[int, datetime]]:
        found = connection.execute(self._walking, {"after": after, "limit": limit})
        return [(row[0], row[1]) for row in found if row[1] is not None]

    def _rows_due(
        self, connection: Connection, account_id: int, now: datetime
    ) -> Sequence[RowMapping]:
        table = self._table
        query = (
            select(table)
            .where(
                table.c.ended_at.is_(None),
                table.c.account_id == account_id,
                table.c.due_at <= now,
            )
            .order_by(table.c.due_at)
            .limit(ROWS_MAX)
            .with_for_update(skip_locked=True)
        )
        return connection.execute(query).mappings().all()

    def _kept(self, connection: Connection, ids: Sequence[str]) -> set[str]:
        """Return those of some deliveries that have not been deleted since."""
        if not ids:
            return set()
        return set(connection.scalars(select(self._id).where(self._id.in_(ids))))


def _build_walk(table: Table) -> Select[int, datetime]:
    """Build the query of accounts with open deliveries, with first due times: two index seeks per
    account."""
    step, due = table.alias(), table.alias()
    walk = (
        select(func.min(table.c.account_id).label("account_id"))
        .where(table.c.ended_at.is_(None), table.c.account_id > bindparam("after"))
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

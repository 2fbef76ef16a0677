"""Requests of the last hour in short intervals: accepted, settled, failed, charged; and by minute
how long first outputs took.

Counted from holds and receipts, so they are those of all gateways. An interval is read again until
it is so old that its rows are committed; then it is kept. First outputs are read once for each
minute, after it has ended. Nothing is read unless somebody asks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, Connection, Table, case, func, select

from gateway.ids import first_request_id, time_of
from gateway.performance import SUCCESSES_MIN
from gateway.requests.lookup import COUNTED_MAX, RequestFilter
from gateway.sql.database import Database, exact_sum, time_bucket
from gateway.sql.partitions import is_partitioned
from gateway.tables.core import accounts, holds, receipts
from gateway.tables.settlement_time import settled_within

STEP_S: Final = 5
HOUR: Final = timedelta(hours=1)
MONTH: Final = timedelta(days=31)
OPEN: Final = timedelta(seconds=15)
"""Age below which rows of an interval may not be committed yet."""
CHUNK: Final = timedelta(minutes=10)
"""Longest span of one query, so that the first reading of a busy hour is not one long query."""
ADMISSION: Final = timedelta(seconds=10)
"""Longest usual time from a request's id to its acceptance."""
FRESH_S: Final = 0.5
FAILED: Final = ("failed", "expired")
MINUTE_OUTPUTS_MAX: Final = 200
"""Maximum number of receipts of a minute whose times to the first output are read: the newest."""
MINUTES: Final = 60
MINUTES_READ_MAX: Final = 10
"""Minutes whose first outputs are read together."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What happened in an interval. ``failed`` requests are settled, too; cancelled ones did not
    fail."""

    accepted: int = 0
    settled: int = 0
    failed: int = 0
    charged_nanos: int = 0

    def __add__(self, other: Flow) -> Flow:
        return Flow(
            self.accepted + other.accepted,
            self.settled + other.settled,
            self.failed + other.failed,
            self.charged_nanos + other.charged_nanos,
        )


NOTHING: Final = Flow()


@dataclass(frozen=True, slots=True)
class OpenHolds:
    """The sum of what accounts hold, and the number of open requests without batch lines."""

    requests: int
    held_nanos: int


def open_holds(connection: Connection) -> OpenHolds:
    """Sum the holds, as the accounts have them: the proof compares both each night."""
    sums = select(exact_sum(accounts.c.open_requests), exact_sum(accounts.c.held_nanos))
    return OpenHolds(*connection.execute(sums).one())


@dataclass(frozen=True, slots=True)
class Activity:
    """The open requests of an account, and when its newest request was accepted."""

    open_requests: int
    last_at: datetime | None


def activity_of(connection: Connection, account_ids: Collection[int]) -> dict[int, Activity]:
    """Return the activity of accounts by their numbers."""

    def newest(table: Table, *conditions: ColumnElement[bool]) -> ColumnElement[str | None]:
        own = table.c.account_id == accounts.c.id
        last = select(func.max(table.c.request_id)).where(own, *conditions)
        return last.correlate(accounts).scalar_subquery()

    counted = select(func.count()).where(holds.c.account_id == accounts.c.id)
    # PostgreSQL would look into each partition for each account.
    recent = [] if not is_partitioned(connection) else [_since(datetime.now(UTC) - MONTH)]
    query = select(
        accounts.c.id,
        counted.correlate(accounts).scalar_subquery().label("open_requests"),
        newest(holds).label("held"),
        newest(receipts, *recent).label("ended"),
    ).where(accounts.c.id.in_(sorted(account_ids)))
    rows = connection.execute(query).all()
    earlier: dict[int, str | None] = {}
    if rest := [row.id for row in rows if recent and row.held is None and row.ended is None]:
        of_rest = select(accounts.c.id, newest(receipts).label("ended")).where(
            accounts.c.id.in_(rest)
        )
        earlier = {row.id: row.ended for row in connection.execute(of_rest)}
    found = {}
    for row in rows:
        known = (row.held, row.ended, earlier.get(row.id))
        last = max((id for id in known if id is not None), default=None)
        at = None if last is None else time_of("req_", last)
        found[row.id] = Activity(row.open_requests, at)
    return found


def _since(moment: datetime) -> ColumnElement[bool]:
    return receipts.c.request_id >= first_request_id(moment)


def count_since(connection: Connection, choice: RequestFilter, since: str) -> int:
    """Count the open and closed requests whose ids are after one, at most ``COUNTED_MAX`` of
    each."""
    total = 0
    for table, wanted in ((holds, choice.open), (receipts, choice.closed)):
        if wanted:
            ids = select(table.c.request_id).where(
                *choice.conditions(table), table.c.request_id > since
            )
            some = ids.limit(COUNTED_MAX).subquery()
            total += connection.execute(select(func.count()).select_from(some)).scalar_one()
    return total


def read_flows(connection: Connection, starts_at: datetime, ends_at: datetime) -> dict[int, Flow]:
    """Return the flows of a span by the number of their interval since 1970."""
    found: defaultdict[int, Flow] = defaultdict(Flow)
    step = time_bucket(receipts.c.settled_at, STEP_S)
    failed = exact_sum(case((receipts.c.status.in_(FAILED), 1), else_=0))
    settled = (
        select(step, func.count(), failed, exact_sum(receipts.c.charge_nanos))
        .where(*settled_within(connection, starts_at, ends_at))
        .group_by(step)
    )
    for number, requests, unsuccessful, charged in connection.execute(settled):
        found[number] += Flow(0, requests, unsuccessful, charged)
    for table in (holds, receipts):
        step = time_bucket(table.c.accepted_at, STEP_S)
        conditions: list[ColumnElement[bool]] = [
            # By the time in the id, which has an index.
            table.c.request_id >= first_request_id(starts_at - ADMISSION),
            table.c.request_id < first_request_id(ends_at),
            table.c.accepted_at >= starts_at,
            table.c.accepted_at < ends_at,
        ]
        accepted = select(step, func.count()).where(*conditions).group_by(step)
        for number, requests in connection.execute(accepted):
            found[number] += Flow(requests)
    return dict(found)


def read_first_outputs(
    connection: Connection, minutes: Collection[int]
) -> dict[int, Sequence[int]]:
    """Return the times to the first token or audio in µs, the shortest first, of the newest
    requests of minutes, which are counted since 1970."""
    return {minute: _first_outputs(connection, minute) for minute in minutes}


def _first_outputs(connection: Connection, minute: int) -> Sequence[int]:
    starts_at, ends_at = (datetime.fromtimestamp(at * 60, UTC) for at in (minute, minute + 1))
    query = (
        select(receipts.c.timings)
        .where(
            *settled_within(connection, starts_at, ends_at),
            receipts.c.status == "succeeded",
            receipts.c.service_class == "standard",
        )
        .order_by(receipts.c.settled_at.desc())
        .limit(MINUTE_OUTPUTS_MAX)
    )
    all_us = (timings.get("first_token_us", 0) for timings in connection.scalars(query))
    return sorted(int(us) for us in all_us if us)


def _p95(ordered: Sequence[int]) -> int | None:
    return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None


@dataclass(frozen=True, slots=True)
class FirstOutputs:
    """The p95 of the time to the first output in µs, of a number of requests; None of too few."""

    requests: int
    p95_us: int | None


class TrafficHour:
    """The flows of the last hour, read step by step and kept."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._flows: dict[int, Flow] = {}
        self._first_outputs: dict[int, Sequence[int]] = {}
        """Those of the minutes that have ended, by their number since 1970."""
        self._first: datetime | None = None
        """Start of what has been read, and the end of what need not be read again."""
        self._kept_until: datetime | None = None
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether the whole hour has been read; otherwise each refresh reads some more of it."""
        return self._first is not None and self._first <= datetime.now(UTC) - HOUR + CHUNK

    async def refresh(self, *, only_new: bool = False) -> None:
        """Read what is new and, unless ``only_new``, a part of the past hour that has not been read
        yet."""
        async with self._reading:
            if time.monotonic() - self._read_at < FRESH_S:
                return
            now = datetime.now(UTC)
            first, kept = self._first, self._kept_until
            if first is None or kept is None or now - kept > CHUNK:
                first = kept = _step_start(now - CHUNK)
                self._flows.clear()
            minutes = self._missing_minutes(now)[: 1 if only_new else MINUTES_READ_MAX]
            past = max(first - CHUNK, _step_start(now - HOUR)) if first > now - HOUR else first

            def read(
                connection: Connection,
            ) -> tuple[list[dict[int, Flow]], dict[int, Sequence[int]]]:
                parts = [read_flows(connection, kept, now + timedelta(seconds=STEP_S))]
                if past < first and not only_new:
                    parts.append(read_flows(connection, past, first))
                return parts, read_first_outputs(connection, minutes)

            # Intervals without requests are not in an answer, so what is read again is dropped.
            parts, first_outputs = await self._database.report(read, account_id=None)
            begin = _number(kept)
            self._flows = {
                number: flow
                for number, flow in self._flows.items()
                if _number(now - HOUR) <= number < begin
            }
            for part in parts:
                self._flows.update(part)
            self._first_outputs = {
                minute: times
                for minute, times in (self._first_outputs | first_outputs).items()
                if minute >= _minute(now) - MINUTES
            }
            self._first = first if only_new else past
            self._kept_until = max(kept, _step_start(now - OPEN))
            self._read_at = time.monotonic()

    def per_second(self, now: datetime) -> tuple[float, float]:
        """Return how many requests were accepted and settled each second, over the last full
        interval and the present one."""
        number = _number(now)
        found = sum((self._flows.get(each, NOTHING) for each in (number - 1, number)), NOTHING)
        seconds = STEP_S + (now - _at(number)).total_seconds()
        return found.accepted / seconds, found.settled / seconds

    def since(self, moment: datetime) -> Flow:
        """Return what happened since the interval of a moment."""
        begin = _number(moment)
        return sum((flow for at, flow in self._flows.items() if at >= begin), NOTHING)

    def minutes(self, now: datetime) -> Sequence[Flow]:
        """Return the flows of the last 60 minutes, the present one last."""
        last = _minute(now)
        found: Mapping[int, Flow] = self._flows
        sums = [NOTHING] * MINUTES
        for number, flow in found.items():
            place = MINUTES - 1 - (last - number * STEP_S // 60)
            if 0 <= place < MINUTES:
                sums[place] += flow
        return sums

    def first_outputs(self, now: datetime) -> Sequence[int | None]:
        """Return the p95 of the time to the first output in µs for the last 60 minutes, the present
        one last; None without such requests, and for what has not been read yet."""
        last = _minute(now)
        return [_p95(self._first_outputs.get(last - back, ())) for back in reversed(range(MINUTES))]

    def first_output(self) -> FirstOutputs:
        """Return the time to the first output in the minutes of the hour that have been read."""
        times = sorted(us for of_minute in self._first_outputs.values() for us in of_minute)
        return FirstOutputs(len(times), _p95(times) if len(times) >= SUCCESSES_MIN else None)

    def _missing_minutes(self, now: datetime) -> Sequence[int]:
        """Return the minutes whose rows are committed and have not been read, newest first."""
        last = _minute(now - OPEN)
        return [
            minute
            for minute in range(last - 1, last - MINUTES, -1)
            if minute not in self._first_outputs
        ]


def _minute(moment: datetime) -> int:
    return int(moment.timestamp()) // 60


def _number(moment: datetime) -> int:
    return int(moment.timestamp()) // STEP_S


def _at(number: int) -> datetime:
    return datetime.fromtimestamp(number * STEP_S, UTC)


def _step_start(moment: datetime) -> datetime:
    return _at(_number(moment))

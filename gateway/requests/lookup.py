"""Finds requests of one account, open or closed, one by one or in pages. Reads, never writes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    Table,
    desc,
    func,
    select,
    union,
)

from gateway.database import Database, exact_sum
from gateway.errors import InvalidRequest, NotFound
from gateway.ledger.closed import Closed, read_closed
from gateway.ledger.ids import first_request_id, is_request_id
from gateway.requests.order import Open
from gateway.tables import holds, outputs, receipts
from gateway.workflows.store import attempts_of
from workers.contract.jobs import RequestId
from workers.contract.queue import Queue

PATIENCE_S: Final = 2.0
OPEN_STATES: Final = ("queued", "running")

_CLOSED: Final = select(
    receipts, outputs.c.body, outputs.c.expires_at.label("kept_until")
).outerjoin(outputs, outputs.c.request_id == receipts.c.request_id)
_OPEN: Final = select(
    holds.c.request_id,
    holds.c.account_id,
    holds.c.model,
    holds.c.task,
    holds.c.hold_nanos,
    holds.c.accepted_at,
    holds.c.deadline_at,
    holds.c["metadata"],
)


@dataclass(frozen=True, slots=True)
class Page:
    """Requests, newest first, and the cursor of the page after this one if there is one."""

    items: Sequence[Open | Closed]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which requests a list shows; None is all of them. Times are those of acceptance."""

    account_id: int | None
    model: str | None = None
    status: str | None = None
    task: str | None = None
    tasks: Collection[str] = ()
    """Any of these; none of them is all."""
    key_id: int | None = None
    outcome: str | None = None
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        return self.status in (None, *OPEN_STATES) and self.outcome is None

    @property
    def closed(self) -> bool:
        return self.status not in OPEN_STATES

    def conditions(self, table: Table) -> list[ColumnElement[bool]]:
        """The same of holds and of receipts, but for what only receipts have."""
        found = []
        for name in ("account_id", "model", "task", "key_id", "status", "outcome"):
            value = getattr(self, name)
            if value is not None and name in table.c:
                found.append(table.c[name] == value)
        if self.tasks:
            found.append(table.c.task.in_(self.tasks))
        # By the time in the id, which the order of the list is too.
        if self.starts_at is not None:
            found.append(table.c.request_id >= first_request_id(self.starts_at))
        if self.ends_at is not None:
            found.append(table.c.request_id < first_request_id(self.ends_at))
        for tag, value in self.tags.items():
            found.append(table.c["metadata"][tag].as_string() == value)
        return found


@dataclass(frozen=True, slots=True)
class Summary:
    """How many requests run, how many ended in which way, and what they cost."""

    running: int
    ended: Mapping[str, int]
    cost_nanos: int


class Lookup:
    def __init__(self, database: Database, redis: Redis, *, namespace: str) -> None:
        self._database = database
        self._redis = redis
        self._namespace = namespace

    async def find(self, account_id: int, request_id: str) -> Open | Closed:
        """Raise ``NotFound`` if the account has no such request."""
        found = None
        if is_request_id(request_id):
            found = await self._database.read(
                lambda connection: _find(connection, account_id, request_id)
            )
        if found is None:
            raise NotFound(
                "request_not_found", f"There is no request {request_id!r}.", param="request_id"
            )
        return await self._with_state(found) if isinstance(found, Open) else found

    async def list(
        self, choice: Choice, *, limit: int, cursor: str | None, oldest_first: bool = False
    ) -> Page:
        """Ids of requests are ordered by time and never change, so a page goes on beyond the last
        id of the one before; none is left out or repeated, whatever is accepted or settled
        meanwhile. Open and closed requests are merged."""
        if cursor is not None and not is_request_id(cursor):
            raise InvalidRequest(
                "invalid_value", f"cursor is {cursor!r}; send a next_cursor.", param="cursor"
            )
        found = await self._database.read(
            lambda connection: _list(
                connection, choice, limit=limit + 1, cursor=cursor, oldest_first=oldest_first
            )
        )
        items = [
            await self._with_state(item) if isinstance(item, Open) else item
            for item in found[:limit]
        ]
        if choice.status in OPEN_STATES:
            items = [item for item in items if item.status == choice.status]
        return Page(items, found[limit - 1].request_id if len(found) > limit else None)

    async def cursor_at(self, choice: Choice, offset: int) -> str | None:
        """The cursor of the page that leaves out the newest ``offset`` requests of a list; None if
        there are no more than these."""
        ids = [
            select(table.c.request_id).where(*choice.conditions(table))
            for table, wanted in ((holds, choice.open), (receipts, choice.closed))
            if wanted
        ]
        # In both for a moment, while it is settled.
        query = union(*ids).order_by(desc("request_id")).offset(offset - 1).limit(1)
        return await self._database.read(lambda connection: connection.execute(query).scalar())

    async def summarize(self, choice: Choice) -> Summary:
        """Count what a list would show, and sum what it cost."""
        return await self._database.read(lambda connection: _summarize(connection, choice))

    async def _with_state(self, found: Open) -> Open:
        """Add what the queue knows; without it an open request counts as queued."""
        queue = Queue(self._redis, found.model, namespace=self._namespace)
        try:
            async with asyncio.timeout(PATIENCE_S):
                state = await queue.state(found.request_id)
        except (RedisError, OSError, TimeoutError):
            return found
        if state is None:
            return await self._with_steps(found)
        if state.state in ("queued", "delayed"):
            return replace(found, position=state.position or None)
        return replace(found, status="running")

    async def _with_steps(self, found: Open) -> Open:
        """The queue does not know it: a workflow is known by its steps, anything else is queued."""
        attempts = await self._database.read(
            lambda connection: attempts_of(connection, found.request_id)
        )
        if any(one.status is not None for one in attempts):
            return replace(found, status="running")
        for one in attempts:
            queue = Queue(self._redis, one.model, namespace=self._namespace)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    state = await queue.state(str(one.id))
            except (RedisError, OSError, TimeoutError):
                return found
            if state is not None and state.state not in ("queued", "delayed"):
                return replace(found, status="running")
        return found


def _find(connection: Connection, account_id: int, request_id: str) -> Open | Closed | None:
    # Holds first: a request that is settled in between is then found among the receipts.
    for query, table, read in ((_OPEN, holds, _open), (_CLOSED, receipts, read_closed)):
        row = connection.execute(
            query.where(table.c.request_id == request_id, table.c.account_id == account_id)
        )
        found = row.mappings().first()
        if found is not None:
            return read(found)
    return None


def _list(
    connection: Connection,
    choice: Choice,
    *,
    limit: int,
    cursor: str | None,
    oldest_first: bool,
) -> list[Open | Closed]:
    def ordered(query: Select[Any], table: Table) -> Select[Any]:
        id = table.c.request_id
        if cursor is not None:
            query = query.where(id > cursor if oldest_first else id < cursor)
        return query.order_by(id if oldest_first else id.desc()).limit(limit)

    items: list[Open | Closed] = []
    if choice.open:
        query = ordered(_OPEN.where(*choice.conditions(holds)), holds)
        items += [_open(row) for row in connection.execute(query).mappings()]
    if choice.closed:
        query = ordered(_CLOSED.where(*choice.conditions(receipts)), receipts)
        items += [read_closed(row) for row in connection.execute(query).mappings()]
    items.sort(key=lambda item: item.request_id, reverse=not oldest_first)
    return items[:limit]


def _summarize(connection: Connection, choice: Choice) -> Summary:
    running = 0
    if choice.open:
        counted = select(func.count()).where(*choice.conditions(holds))
        running = connection.execute(counted.select_from(holds)).scalar_one()
    if not choice.closed:
        return Summary(running, {}, 0)
    rows = connection.execute(
        select(receipts.c.status, func.count(), exact_sum(receipts.c.charge_nanos))
        .where(*choice.conditions(receipts))
        .group_by(receipts.c.status)
    ).all()
    return Summary(running, {row[0]: row[1] for row in rows}, sum(row[2] for row in rows))


def _open(row: RowMapping | Any) -> Open:
    return Open(
        request_id=RequestId(row["request_id"]),
        account_id=row["account_id"],
        model=row["model"],
        task=row["task"],
        status="queued",
        hold_nanos=row["hold_nanos"],
        accepted_at=row["accepted_at"],
        deadline_at=row["deadline_at"],
        metadata=row["metadata"] or {},
    )

"""Finds requests of one account, open or closed, one by one or in pages. Reads, never writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import ColumnElement, Connection, RowMapping, Table, select

from gateway.database import Database
from gateway.errors import InvalidRequest, NotFound
from gateway.ledger.closed import Closed, read_closed
from gateway.ledger.ids import is_request_id
from gateway.requests.order import Open
from gateway.tables import holds, outputs, receipts
from workers.contract.jobs import RequestId
from workers.contract.queue import Queue

PATIENCE_S: Final = 2.0

_CLOSED: Final = select(receipts, outputs.c.body).outerjoin(
    outputs, outputs.c.request_id == receipts.c.request_id
)
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
        self,
        account_id: int,
        *,
        limit: int,
        cursor: str | None,
        model: str | None,
        status: str | None,
    ) -> Page:
        """Ids of requests are ordered by time, so a page goes on below the last id of the one
        before; open and closed requests are merged."""
        if cursor is not None and not is_request_id(cursor):
            raise InvalidRequest(
                "invalid_value", f"cursor is {cursor!r}; send a next_cursor.", param="cursor"
            )
        found = await self._database.read(
            lambda connection: _list(
                connection, account_id, limit=limit + 1, cursor=cursor, model=model, status=status
            )
        )
        items = [
            await self._with_state(item) if isinstance(item, Open) else item
            for item in found[:limit]
        ]
        if status in ("queued", "running"):
            items = [item for item in items if item.status == status]
        return Page(items, found[limit - 1].request_id if len(found) > limit else None)

    async def _with_state(self, found: Open) -> Open:
        """Add what the queue knows; without it an open request counts as queued."""
        queue = Queue(self._redis, found.model, namespace=self._namespace)
        try:
            async with asyncio.timeout(PATIENCE_S):
                state = await queue.state(found.request_id)
        except (RedisError, OSError, TimeoutError):
            return found
        if state is None or state.state in ("queued", "delayed"):
            return replace(found, position=state.position or None if state else None)
        return replace(found, status="running")


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
    account_id: int,
    *,
    limit: int,
    cursor: str | None,
    model: str | None,
    status: str | None,
) -> list[Open | Closed]:
    def conditions(table: Table) -> list[ColumnElement[bool]]:
        found = [table.c.account_id == account_id]
        if cursor is not None:
            found.append(table.c.request_id < cursor)
        if model is not None:
            found.append(table.c.model == model)
        return found

    items: list[Open | Closed] = []
    if status in (None, "queued", "running"):
        query = _OPEN.where(*conditions(holds)).order_by(holds.c.request_id.desc()).limit(limit)
        items += [_open(row) for row in connection.execute(query).mappings()]
    if status not in ("queued", "running"):
        ended = _CLOSED.where(*conditions(receipts))
        if status is not None:
            ended = ended.where(receipts.c.status == status)
        ended = ended.order_by(receipts.c.request_id.desc()).limit(limit)
        items += [read_closed(row) for row in connection.execute(ended).mappings()]
    items.sort(key=lambda item: item.request_id, reverse=True)
    return items[:limit]


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

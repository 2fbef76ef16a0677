"""Finds an account's open and closed requests, one by one or in pages. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from redis.asyncio import Redis
from sqlalchemy import (
    Connection,
    RowMapping,
    Select,
    Table,
    and_,
    bindparam,
    case,
    desc,
    func,
    select,
    true,
    union,
)

from gateway.archive.marks import Archive, archived_months, archives_with
from gateway.dispatch.follow import latest_progress, logged_soon
from gateway.dispatch.outputs import with_output
from gateway.errors import InvalidRequest, NotFound, Unavailable
from gateway.group_commit import GroupCommit
from gateway.ids import is_request_id, time_of
from gateway.ledger.closed import ClosedRequest, read_closed, warnings_of
from gateway.ledger.prices import PriceCache
from gateway.ledger.receipts import Receipt, read_receipt
from gateway.ledger.steps import StepLine
from gateway.requests.lists.filter import OPEN_STATES
from gateway.requests.lists.filter import RequestFilter as RequestFilter
from gateway.sql.database import Database, exact_sum
from gateway.sql.outages import QUEUE_OUTAGE
from gateway.tables.core import holds, keys, outputs, receipts
from gateway.tables.settlement_time import newest
from gateway.tasks.submission import OpenRequest
from gateway.workflows.store import attempts_at
from workers.contract.blobs import Blobs
from workers.contract.jobs import Progress, RequestId, SentEvent
from workers.contract.queue import JobState, states
from workers.contract.streams import EventLog

PATIENCE_S: Final = 2.0
LOOKED_AT_MAX: Final = 20_000
"""Maximum number of receipts, and of open requests, that a page scans."""
COUNTED_MAX: Final = 50_000
"""Maximum number of rows that a summary or a count scans. A cursor says where a scan stopped."""
OPEN_COUNTED_MAX: Final = 10_000
"""Maximum number of open requests among which a summary counts."""

_CLOSED: Final = select(
    receipts, outputs.c.body, outputs.c.expires_at.label("kept_until")
).outerjoin(outputs, outputs.c.request_id == receipts.c.request_id)
_LISTED: Final = select(
    receipts, outputs.c.body, outputs.c.expires_at.label("kept_until")
).outerjoin(
    outputs,
    # PostgreSQL would plan a look into each partition, as it derives no bounds from those of the
    # receipts.
    and_(
        outputs.c.request_id == receipts.c.request_id,
        outputs.c.request_id >= bindparam("oldest"),
    ),
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
    holds.c.served_by,
)


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Requests, newest first, and the cursor of the next page, if any. A page with few matches
    among ``LOOKED_AT_MAX`` receipts is short and has a cursor."""

    items: Sequence[OpenRequest | ClosedRequest]
    next_cursor: str | None
    archived: Sequence[str] = ()
    """Months of the filter's span whose requests are archived, so that they are not listed."""
    searched_to: datetime | None = None
    """Time back to which a short page with a cursor was searched."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Number of running requests, of ended ones by status, and their total cost."""

    running: int
    ended: Mapping[str, int]
    cost_nanos: int
    held_nanos: int = 0
    """What is held for the running ones that were counted."""
    more_running: bool = False
    """Whether more run than were counted among ``OPEN_COUNTED_MAX``."""
    next_cursor: str | None = None
    """Position at which the scan stopped after ``LOOKED_AT_MAX`` receipts."""
    archived: Sequence[str] = ()
    """Months of the filter's span whose requests are archived, so that they are not counted."""

    @property
    def requests(self) -> int:
        return self.running + sum(self.ended.values())


class Lookup:
    def __init__(
        self,
        database: Database,
        redis: Redis,
        blobs: Blobs,
        prices: PriceCache,
        *,
        namespace: str,
    ) -> None:
        self._prices = prices
        self._blobs = blobs
        self._database = database
        self._redis = redis
        self._namespace = namespace
        self._log = EventLog(redis, namespace=namespace)

        async def read(asked: Sequence[tuple[int, RequestId]]) -> list[ClosedRequest | bool]:
            return await database.read(lambda connection: _ends(connection, asked))

        self._ends = GroupCommit(read)

    async def find(
        self, account_id: int | None, request_id: str, *, whole: bool = True
    ) -> OpenRequest | ClosedRequest:
        """Return a request, also an archived one; without an account, of any. Raise ``NotFound``.

        ``whole``: also load an output from the blob store; raise ``RequestFailed`` if that fails.
        """
        found, _ = await _find_stored(self._database, self._blobs, account_id, request_id)
        if isinstance(found, OpenRequest):
            return (await self._with_states([found]))[0]
        return await with_output(self._blobs, found) if whole else found

    async def closed(self, account_id: int, request_id: RequestId) -> ClosedRequest | None:
        """Return a request with its output if it is closed, None if it is open. Concurrent calls
        share one query. Raise ``NotFound``."""
        found = await self._ends.submit((account_id, request_id))
        if isinstance(found, ClosedRequest):
            return await with_output(self._blobs, found)
        if not found:
            raise request_not_found(request_id)
        return None

    async def with_output(self, closed: ClosedRequest) -> ClosedRequest:
        """Load an output that is too large for SQL. Raise ``RequestFailed`` if that fails."""
        return await with_output(self._blobs, closed)

    async def receipt(self, account_id: int | None, request_id: str) -> Receipt:
        """Return a receipt as ``receipt_of`` does."""
        return await receipt_of(self._database, self._blobs, account_id, request_id, self._prices)

    async def key(self, request_id: str) -> tuple[int, str, str] | None:
        """Return number, prefix and name of the key that sent a request; None if it is archived."""

        def read(connection: Connection) -> tuple[int, str, str] | None:
            for table in (receipts, holds):
                query = (
                    select(keys.c.id, keys.c.prefix, keys.c.name)
                    .join(table, table.c.key_id == keys.c.id)
                    .where(table.c.request_id == request_id)
                )
                if (found := connection.execute(query).first()) is not None:
                    return found.id, found.prefix, found.name
            return None

        return await self._database.read(read)

    async def logged(
        self, request_id: RequestId, after: tuple[int, int] | None
    ) -> Sequence[SentEvent]:
        """Return the logged events of a request after an attempt and number."""
        return await logged_soon(self._log, request_id, after or (0, 0))

    async def progress(self, request_id: RequestId) -> Progress | None:
        """Return the last progress that a running request reported, or None."""
        return await latest_progress(self._log, request_id)

    async def state(self, found: OpenRequest) -> JobState | None:
        """Return the state of an open request's job; None for workflows, for a job that is not
        queued yet, and if the queue server does not respond in time."""
        known = await self._states([(found.queue, found.request_id)])
        return known[0] if known else None

    async def list(
        self, choice: RequestFilter, *, limit: int, cursor: str | None, oldest_first: bool = False
    ) -> RequestPage:
        """Return a page of open and closed requests, merged.

        Ids are ordered by time and never change, and a page starts after the last id of the one
        before. So none is missed or repeated, whatever is accepted or settled meanwhile.
        """
        _check_cursor(cursor)

        def read(
            connection: Connection,
        ) -> tuple[tuple[list[OpenRequest | ClosedRequest], str | None], list[str]]:
            page = read_page(
                connection, choice, limit=limit + 1, cursor=cursor, oldest_first=oldest_first
            )
            return page, _archived(connection, choice)

        (found, border), archived = await self._database.report(read, account_id=choice.account_id)
        items = found[:limit]
        with_states = iter(
            await self._with_states([one for one in items if isinstance(one, OpenRequest)])
        )
        items = [next(with_states) if isinstance(item, OpenRequest) else item for item in items]
        if choice.status in OPEN_STATES:
            items = [item for item in items if item.status == choice.status]
        after = found[limit - 1].request_id if len(found) > limit else border
        short = border is not None and len(found) <= limit and not oldest_first
        searched_to = time_of("req_", border) if border is not None and short else None
        return RequestPage(items, after, archived, searched_to)

    async def cursor_at(self, choice: RequestFilter, offset: int) -> str | None:
        """Return the cursor of the page after the newest ``offset`` requests, or None if there are
        no more."""
        ids = [
            select(
                select(table.c.request_id)
                .where(*choice.conditions(table))
                .order_by(table.c.request_id.desc())
                .limit(offset)
                .subquery()
            )
            for table, wanted in ((holds, choice.open), (receipts, choice.closed))
            if wanted
        ]
        # A union, because a request is in both tables while it is settled.
        query = union(*ids).order_by(desc("request_id")).offset(offset - 1).limit(1)
        return await self._database.report(
            lambda connection: connection.execute(query).scalar(), account_id=choice.account_id
        )

    async def summarize(self, choice: RequestFilter, *, cursor: str | None = None) -> Summary:
        """Count the requests of a filter and sum their cost. From a cursor, only closed ones."""
        _check_cursor(cursor)
        return await self._database.report(
            lambda connection: summarize(connection, choice, cursor), account_id=choice.account_id
        )

    async def _with_states(self, found: Sequence[OpenRequest]) -> Sequence[OpenRequest]:
        """Add states and positions from the queue. Without it, open requests count as queued."""
        known = await self._states([(one.queue, one.request_id) for one in found])
        if known is None:
            return found
        # Jobs unknown to the queue are workflows, whose steps are queued, or not queued yet.
        by_steps = [one.request_id for one, state in zip(found, known, strict=True) if not state]
        running = await self._running(by_steps) if by_steps else frozenset()
        answers = []
        for one, state in zip(found, known, strict=True):
            if state is None:
                begun = one.request_id in running
                answers.append(replace(one, status="running") if begun else one)
            elif state.state in ("queued", "delayed"):
                answers.append(replace(one, position=state.position or None))
            else:
                # A job that ended without a start, for example cancelled, never ran.
                answers.append(replace(one, status="running") if state.started_ms else one)
        return answers

    async def _running(self, request_ids: Sequence[RequestId]) -> frozenset[RequestId]:
        """Return the workflows of which a step has started."""
        attempts = await self._database.read(
            lambda connection: attempts_at(connection, request_ids)
        )
        begun = {one.id.request_id for one in attempts if one.ended}
        waiting = [one for one in attempts if one.id.request_id not in begun]
        known = await self._states([(one.model, str(one.id)) for one in waiting])
        for one, state in zip(waiting, known or (), strict=False):
            if state is not None and state.state not in ("queued", "delayed"):
                begun.add(one.id.request_id)
        return frozenset(begun)

    async def _states(self, jobs: Sequence[tuple[str, str]]) -> Sequence[JobState | None] | None:
        """Return the states of jobs, given by model and id. None if the queue does not answer."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await states(self._redis, jobs, namespace=self._namespace)
        except QUEUE_OUTAGE:
            return None


async def receipt_of(
    database: Database, blobs: Blobs, account_id: int | None, request_id: str, prices: PriceCache
) -> Receipt:
    """Return the receipt of a closed request; without an account, of any. Raise ``NotFound``."""
    found, steps = await _find_stored(database, blobs, account_id, request_id)
    if isinstance(found, OpenRequest):
        message = f"{request_id} is still {found.status}; its receipt is written when it ends."
        raise NotFound("receipt_not_ready", message)
    return await database.read(lambda connection: read_receipt(connection, found, prices, steps))


async def _find_stored(
    database: Database, blobs: Blobs, account_id: int | None, request_id: str
) -> tuple[OpenRequest | ClosedRequest, Sequence[StepLine] | None]:
    """Return a request, with its steps if it is archived. Raise ``NotFound``."""

    def read(connection: Connection) -> OpenRequest | ClosedRequest | list[Archive]:
        found = _find(connection, account_id, request_id)
        return found or archives_with(connection, request_id)

    if not is_request_id(request_id):
        raise request_not_found(request_id)
    found = await database.read(read)
    if not isinstance(found, list):
        return found, None
    if found:
        # Imported late: it takes a while, and a gateway should start quickly.
        from gateway.archive.lookup import find_archived

        try:
            archived = await find_archived(blobs, found, request_id)
        except Unavailable:
            message = f"The receipt of {request_id} is archived, and the archive cannot be read."
            raise Unavailable("archive_unavailable", message) from None
        if archived is not None and account_id in (None, archived[0].account_id):
            return archived
    raise request_not_found(request_id)


def _find(
    connection: Connection, account_id: int | None, request_id: str
) -> OpenRequest | ClosedRequest | None:
    # Holds first: a request that is settled in between is found among the receipts.
    open_one = _OPEN.add_columns(holds.c.job)
    for query, table, read in ((open_one, holds, _open), (_CLOSED, receipts, read_closed)):
        query = query.where(table.c.request_id == request_id)
        if account_id is not None:
            query = query.where(table.c.account_id == account_id)
        found = connection.execute(query).mappings().first()
        if found is not None:
            return read(found)
    return None


def _ends(
    connection: Connection, asked: Sequence[tuple[int, RequestId]]
) -> list[ClosedRequest | bool]:
    """Read requests, given by account and id: those that are closed, else whether they are open."""
    ids = [request_id for _, request_id in asked]
    rows = connection.execute(_CLOSED.where(receipts.c.request_id.in_(ids))).mappings()
    found = {(row["account_id"], row["request_id"]): read_closed(row) for row in rows}
    rest = [one[1] for one in asked if one not in found]
    query = select(holds.c.account_id, holds.c.request_id).where(holds.c.request_id.in_(rest))
    still_open = {tuple(row) for row in connection.execute(query)} if rest else set()
    return [found.get(one, one in still_open) for one in asked]


def request_not_found(request_id: str) -> NotFound:
    return NotFound("request_not_found", f"There is no request {request_id!r}.", param="request_id")


def read_page(
    connection: Connection,
    choice: RequestFilter,
    *,
    limit: int,
    cursor: str | None,
    oldest_first: bool,
) -> tuple[list[OpenRequest | ClosedRequest], str | None]:
    """Read a page, and the id of the last scanned request if there are more."""
    borders = []
    if choice.closed and choice.searched:
        borders.append(_border(connection, choice, receipts, cursor, oldest_first=oldest_first))
    if choice.open and (choice.searched or choice.model is not None):
        borders.append(_border(connection, choice, holds, cursor, oldest_first=oldest_first))
    # Of both tables the page has what is before the nearer border.
    known = [each for each in borders if each is not None]
    border = (min(known) if oldest_first else max(known)) if known else None

    def ordered(query: Select[Any], table: Table) -> Select[Any]:
        id = table.c.request_id
        if cursor is not None:
            query = query.where(id > cursor if oldest_first else id < cursor)
        if border is not None:
            query = query.where(id <= border if oldest_first else id >= border)
        return query.order_by(id if oldest_first else id.desc()).limit(limit)

    items: list[OpenRequest | ClosedRequest] = []
    if choice.open:
        query = ordered(_OPEN.where(*choice.conditions(holds)), holds)
        items += [_open(row) for row in connection.execute(query).mappings()]
    if choice.closed:
        query = ordered(_LISTED.where(*choice.conditions(receipts)), receipts)
        rows: Iterable[RowMapping]
        if border is None and not oldest_first:
            rows = newest(connection, query, limit, cursor=cursor)
        else:
            oldest = (cursor if oldest_first else border) or ""
            rows = connection.execute(query, {"oldest": oldest}).mappings()
        items += map(read_closed, rows)
    items.sort(key=lambda item: item.request_id, reverse=not oldest_first)
    return items[:limit], border


def _border(
    connection: Connection,
    choice: RequestFilter,
    table: Table,
    cursor: str | None,
    *,
    oldest_first: bool = False,
    most: int | None = None,
) -> str | None:
    """Return the id of the last receipt or open request to scan, from the index alone, or None to
    scan all. ``most``: how many are scanned, by default ``LOOKED_AT_MAX``."""
    id = table.c.request_id
    query = select(id).where(*(choice.places if table is receipts else choice.span)(table))
    if cursor is not None:
        query = query.where(id > cursor if oldest_first else id < cursor)
    query = query.order_by(id if oldest_first else id.desc()).limit(1)
    return connection.execute(query.offset((most or LOOKED_AT_MAX) - 1)).scalar()


def _archived(connection: Connection, choice: RequestFilter) -> list[str]:
    if not choice.closed:
        return []
    return archived_months(connection, accepted=(choice.starts_at, choice.ends_at))


def _check_cursor(cursor: str | None) -> None:
    if cursor is not None and not is_request_id(cursor):
        raise InvalidRequest(
            "invalid_value", f"cursor is {cursor!r}; send a next_cursor.", param="cursor"
        )


def summarize(connection: Connection, choice: RequestFilter, cursor: str | None) -> Summary:
    summary = Summary(0, {}, 0)
    if choice.open and cursor is None:
        summary = _count_open(connection, choice)
    if not choice.closed:
        return summary
    archived = _archived(connection, choice)
    border = _border(connection, choice, receipts, cursor, most=COUNTED_MAX)
    sums = func.count(), exact_sum(receipts.c.charge_nanos)
    query = select(receipts.c.status, *sums).where(*choice.conditions(receipts))
    if cursor is not None:
        query = query.where(receipts.c.request_id < cursor)
    if border is not None:
        query = query.where(receipts.c.request_id >= border)
    rows = connection.execute(query.group_by(receipts.c.status)).all()
    ended = {row[0]: row[1] for row in rows}
    cost = sum(row[2] for row in rows)
    return replace(summary, ended=ended, cost_nanos=cost, next_cursor=border, archived=archived)


def _count_open(connection: Connection, choice: RequestFilter) -> Summary:
    """Count the open requests of a filter among the first ``OPEN_COUNTED_MAX``."""
    columns = (column for column in holds.c if column is not holds.c.job)
    looked_at = select(*columns).where(*choice.span(holds)).limit(OPEN_COUNTED_MAX + 1).subquery()
    chosen = and_(true(), *choice.conditions(looked_at))
    held = exact_sum(case((chosen, looked_at.c.hold_nanos), else_=0))
    query = select(func.count(case((chosen, 1))), held, func.count()).select_from(looked_at)
    running, held_nanos, looked = connection.execute(query).one()
    return Summary(
        min(running, OPEN_COUNTED_MAX),
        {},
        0,
        held_nanos=held_nanos,
        more_running=looked > OPEN_COUNTED_MAX,
    )


def _open(row: RowMapping | Any) -> OpenRequest:
    return OpenRequest(
        request_id=RequestId(row["request_id"]),
        account_id=row["account_id"],
        model=row["model"],
        task=row["task"],
        status="queued",
        hold_nanos=row["hold_nanos"],
        accepted_at=row["accepted_at"],
        deadline_at=row["deadline_at"],
        metadata=row["metadata"] or {},
        served_by=row["served_by"],
        # Lists do not read jobs.
        warnings=warnings_of(row.get("job") or b""),
    )

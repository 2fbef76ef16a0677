"""Batches in SQL: created, leased to one gateway at a time, updated and ended.

Every update of a running batch requires its lease's token, so a gateway whose lease has expired
cannot change it. The progress of a batch is stored only here: its status, and a row for each line
that has ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    update,
)

from gateway.aside import add_note, describe
from gateway.batches.lines import LineResult
from gateway.errors import Conflict, InvalidRequest, NotFound, TooManyRequests
from gateway.files.store import File, add_file, find_file
from gateway.ids import is_id, new_id
from gateway.tables.batches import batch_results, batches
from gateway.tables.core import idempotency
from workers.contract.jobs import RequestId

Status: TypeAlias = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
CANCELLABLE: Final = ("validating", "in_progress")
PAUSE_MAX: Final = timedelta(minutes=10)
"""Maximum pause before a failed batch is retried."""


class LeaseLost(Exception):
    """Another gateway has claimed the batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    id: str
    account_id: int
    key_id: int
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str] | None
    status: Status
    model: str | None
    total: int
    completed: int
    failed: int
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    cost_nanos: int
    most_nanos: int | None
    errors: Sequence[Mapping[str, Any]] | None
    ending: Status | None
    output_file_id: str | None
    error_file_id: str | None
    output_expires_s: int | None
    created_at: datetime
    expires_at: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    cancelling_at: datetime | None
    ended_at: datetime | None
    lease_token: str | None
    lease_until: datetime | None


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A client's request for a batch."""

    account_id: int
    key_id: int
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str] | None
    output_expires_s: int | None


def create(
    connection: Connection,
    new: NewBatch,
    *,
    now: datetime,
    window: timedelta,
    open_max: int,
    same_since: datetime | None,
) -> Batch:
    """Create a batch.

    With ``same_since``, return an identical batch created since then instead: the request is a
    retry. Raise ``NotFound``, ``InvalidRequest`` or ``TooManyRequests``.
    """
    # Locked, so that the file is not deleted and identical batches are created one after another.
    file = find_file(
        connection, new.account_id, new.input_file_id, lock=True, param="input_file_id"
    )
    if same_since is not None and (same := _same(connection, new, same_since)) is not None:
        return same
    if file.purpose != "batch":
        raise InvalidRequest(
            "invalid_value",
            f"{file.id} has the purpose {file.purpose}; a batch reads files for batch.",
            param="input_file_id",
        )
    running = connection.execute(
        select(func.count())
        .select_from(batches)
        .where(batches.c.account_id == new.account_id, batches.c.ended_at.is_(None))
    ).scalar_one()
    if running >= open_max:
        raise TooManyRequests(
            "too_many_batches",
            f"{running} batches of this account have not ended; wait for one to end.",
            retry_after_s=60,
            should_retry=False,
            details={"limit": open_max, "unit": "batches"},
        )
    row = connection.execute(
        insert(batches)
        .values(
            id=new_id("batch_"),
            account_id=new.account_id,
            key_id=new.key_id,
            endpoint=new.endpoint,
            input_file_id=new.input_file_id,
            completion_window=new.completion_window,
            metadata=dict(new.metadata) if new.metadata else None,
            output_expires_s=new.output_expires_s,
            status="validating",
            created_at=now,
            expires_at=now + window,
        )
        .returning(batches)
    )
    return _batch(row.mappings().one())


def _same(connection: Connection, new: NewBatch, since: datetime) -> Batch | None:
    rows = connection.execute(
        select(batches)
        .where(
            batches.c.account_id == new.account_id,
            batches.c.input_file_id == new.input_file_id,
            batches.c.key_id == new.key_id,
            batches.c.endpoint == new.endpoint,
            batches.c.created_at >= since,
        )
        .order_by(batches.c.id.desc())
    ).mappings()
    return next(
        (_batch(row) for row in rows if (row["metadata"] or {}) == (new.metadata or {})), None
    )


def find(
    connection: Connection, account_id: int, batch_id: str, *, param: str = "batch_id"
) -> Batch:
    """Return a batch. Raise ``NotFound`` if the account has no such batch."""
    found = None
    if is_id("batch_", batch_id):
        query = select(batches).where(batches.c.id == batch_id, batches.c.account_id == account_id)
        found = connection.execute(query).mappings().first()
    if found is None:
        raise NotFound("batch_not_found", f"Unknown batch {batch_id!r}.", param=param)
    return _batch(found)


def page(
    connection: Connection, account_id: int, *, limit: int, after: str | None
) -> tuple[list[Batch], bool]:
    """Return an account's batches after the batch ``after``, newest first, and whether there are
    more."""
    query = select(batches).where(batches.c.account_id == account_id)
    if after is not None:
        find(connection, account_id, after, param="after")
        query = query.where(batches.c.id < after)
    rows = connection.execute(query.order_by(batches.c.id.desc()).limit(limit + 1)).mappings().all()
    return [_batch(row) for row in rows[:limit]], len(rows) > limit


def cancel(connection: Connection, account_id: int, batch_id: str, *, now: datetime) -> Batch:
    """Request the cancellation of a batch. Raise ``NotFound``, or ``Conflict`` if it is ending."""
    moved = connection.execute(
        update(batches)
        .where(
            batches.c.id == batch_id,
            batches.c.account_id == account_id,
            batches.c.status.in_(CANCELLABLE),
        )
        .values(status="cancelling", cancelling_at=now)
    )
    found = find(connection, account_id, batch_id)
    if not moved.rowcount and found.status not in ("cancelling", "cancelled"):
        raise Conflict(
            "batch_not_cancellable",
            f"{batch_id} is {found.status}; there is nothing left to cancel.",
            should_retry=False,
        )
    return found


def any_unclaimed(connection: Connection, *, now: datetime) -> bool:
    """Whether there is an open batch without a lease."""
    query = select(batches.c.id).where(_unclaimed(now)).limit(1)
    return connection.execute(query).first() is not None


def claim(connection: Connection, *, now: datetime, lease: timedelta, count: int) -> list[Batch]:
    """Lease open batches without a lease, first those of accounts with the fewest running."""
    others = batches.alias("others")
    running = (
        select(func.count())
        .select_from(others)
        .where(
            others.c.account_id == batches.c.account_id,
            others.c.ended_at.is_(None),
            others.c.lease_until > now,
        )
        .scalar_subquery()
    )
    free = (
        select(batches.c.id)
        .where(_unclaimed(now))
        .order_by(running, batches.c.id)
        .limit(count)
        .with_for_update(skip_locked=True)
    )
    taken = []
    for batch_id in connection.execute(free).scalars().all():
        mine = update(batches).where(batches.c.id == batch_id)
        connection.execute(mine.values(lease_token=secrets.token_hex(16), lease_until=now + lease))
        try:
            row = connection.execute(select(batches).where(batches.c.id == batch_id))
            taken.append(_batch(row.mappings().one()))
        except (LookupError, TypeError, ValueError) as error:
            add_note(connection, "batch", batch_id, describe(error))
            connection.execute(mine.values(lease_token=None, lease_until=now + PAUSE_MAX))
    return taken


def postpone(connection: Connection, batch: Batch, *, until: datetime) -> None:
    """Postpone a batch whose run failed, if its lease is still held."""
    connection.execute(
        update(batches)
        .where(batches.c.id == batch.id, batches.c.lease_token == batch.lease_token)
        .values(lease_token=None, lease_until=until)
    )


def retry_now(connection: Connection, batch_id: str) -> None:
    """Make a postponed batch claimable immediately."""
    connection.execute(
        update(batches)
        .where(batches.c.id == batch_id, batches.c.lease_token.is_(None))
        .values(lease_until=None)
    )


def fail(connection: Connection, batch_id: str, error: Mapping[str, Any]) -> bool:
    """End a batch that cannot be run as failed; charges of its lines stay. Return whether it was
    still open."""
    moved = connection.execute(
        update(batches)
        .where(batches.c.id == batch_id, batches.c.ended_at.is_(None))
        .values(
            status="failed",
            errors=[error],
            ended_at=datetime.now(UTC),
            lease_token=None,
            lease_until=None,
        )
    )
    return bool(moved.rowcount)


def renew(connection: Connection, batch: Batch, *, until: datetime) -> Status:
    """Renew a lease, and return the batch's status. Raise ``LeaseLost``."""
    status: Status = _change(connection, batch, {"lease_until": until})["status"]
    return status


def release(connection: Connection, batch: Batch) -> None:
    """Release a lease, if it is still held, so that another gateway can claim the batch."""
    connection.execute(
        update(batches)
        .where(batches.c.id == batch.id, batches.c.lease_token == batch.lease_token)
        .values(lease_token=None, lease_until=None)
    )


def begin(
    connection: Connection,
    batch: Batch,
    *,
    total: int,
    model: str | None,
    most_nanos: int | None,
    now: datetime,
) -> Status:
    """Record that the file is valid; return the status, which is not ``in_progress`` if the batch
    was cancelled meanwhile."""
    status: Status = _lock(connection, batch)["status"]
    if status != "validating":
        return status
    checked = {"total": total, "model": model, "most_nanos": most_nanos}
    _change(connection, batch, {"status": "in_progress", "in_progress_at": now, **checked})
    return "in_progress"


def record(connection: Connection, batch: Batch, results: Sequence[LineResult]) -> None:
    """Record results of lines; those already recorded are ignored. Raise ``LeaseLost``."""
    _lock(connection, batch)
    known = set(
        connection.execute(
            select(batch_results.c.line).where(
                batch_results.c.batch_id == batch.id,
                batch_results.c.line.in_([result.number for result in results]),
            )
        ).scalars()
    )
    new = {result.number: result for result in results if result.number not in known}
    if not new:
        return
    connection.execute(
        insert(batch_results),
        [
            {
                "batch_id": batch.id,
                "line": result.number,
                "succeeded": result.succeeded,
                "request_id": result.closed.request_id if result.closed else None,
                "result": result.text,
            }
            for result in new.values()
        ],
    )
    succeeded = sum(result.succeeded for result in new.values())
    charged = [
        result.closed for result in new.values() if result.closed and result.closed.cost_nanos
    ]
    table = batches.c
    _change(
        connection,
        batch,
        {
            "completed": table.completed + succeeded,
            "failed": table.failed + len(new) - succeeded,
            "input_tokens": table.input_tokens + sum(each.usage.input_tokens for each in charged),
            "cached_input_tokens": table.cached_input_tokens
            + sum(each.usage.cached_input_tokens for each in charged),
            "output_tokens": table.output_tokens
            + sum(each.usage.output_tokens for each in charged),
            "cost_nanos": table.cost_nanos + sum(each.cost_nanos for each in charged),
        },
    )


def ended_lines(connection: Connection, batch_id: str) -> set[int]:
    """Return the numbers of the lines that have ended."""
    query = select(batch_results.c.line).where(batch_results.c.batch_id == batch_id)
    return set(connection.execute(query).scalars())


def results_after(
    connection: Connection, batch_id: str, line: int, *, succeeded: bool, limit: int
) -> list[tuple[int, bytes]]:
    """Return results in the order of their lines, after line ``line``."""
    query = (
        select(batch_results.c.line, batch_results.c.result)
        .where(
            batch_results.c.batch_id == batch_id,
            batch_results.c.line > line,
            batch_results.c.succeeded.is_(succeeded),
        )
        .order_by(batch_results.c.line)
        .limit(limit)
    )
    return [(row.line, row.result) for row in connection.execute(query)]


def placed_requests(
    connection: Connection, account_id: int, prefix: str
) -> dict[str, tuple[RequestId, datetime]]:
    """Return the requests whose idempotency keys have a prefix: key → id, time of acceptance."""
    table = idempotency.c
    exact = connection.dialect.name == "postgresql"
    query = select(table.key, table.request_id, table.created_at).where(
        table.account_id == account_id,
        # In exactly these words, so that the partial index of these keys is used.
        text("key LIKE 'batch%'"),
        # Compared byte by byte: PostgreSQL's collations may have another order.
        table.key.op("~>=~" if exact else ">=")(prefix),
        table.key.op("~<~" if exact else "<")(prefix[:-1] + chr(ord(prefix[-1]) + 1)),
    )
    return {
        row.key: (RequestId(row.request_id), row.created_at) for row in connection.execute(query)
    }


def finalize(
    connection: Connection,
    batch: Batch,
    *,
    ending: Status,
    mistakes: Sequence[Mapping[str, Any]] | None = None,
    now: datetime,
) -> Batch:
    """Decide how a batch ends, once, and assign ids to its files; afterwards it cannot be
    cancelled."""
    row = _lock(connection, batch)
    if row["ending"] is not None:
        return _batch(row)
    if row["status"] == "cancelling":
        ending = "cancelled"
    elif ending == "expired" and row["total"] and row["completed"] == row["total"]:
        ending = "completed"
    values: dict[str, Any] = {"ending": ending, "errors": mistakes}
    if row["status"] != "cancelling" and ending != "failed":
        values |= {"status": "finalizing", "finalizing_at": now}
    if row["completed"]:
        values["output_file_id"] = new_id("file-")
    if row["failed"]:
        values["error_file_id"] = new_id("file-")
    return _batch(_change(connection, batch, values))


def finish(connection: Connection, batch: Batch, made: Sequence[File], *, now: datetime) -> None:
    """End a batch: insert its files and delete the results they were written from."""
    assert batch.ending is not None
    _lock(connection, batch)
    for file in made:
        add_file(connection, file)
    connection.execute(delete(batch_results).where(batch_results.c.batch_id == batch.id))
    _change(
        connection,
        batch,
        {"status": batch.ending, "ended_at": now, "lease_token": None, "lease_until": None},
    )


def _unclaimed(now: datetime) -> ColumnElement[bool]:
    free = or_(batches.c.lease_until.is_(None), batches.c.lease_until <= now)
    return and_(batches.c.ended_at.is_(None), free)


def _lock(connection: Connection, batch: Batch) -> RowMapping:
    """Lock and return a batch whose lease is held. Raise ``LeaseLost``."""
    row = connection.execute(
        select(batches)
        .where(batches.c.id == batch.id, batches.c.lease_token == batch.lease_token)
        .with_for_update()
    )
    found = row.mappings().first()
    if found is None:
        raise LeaseLost(batch.id)
    return found


def _change(connection: Connection, batch: Batch, values: Mapping[str, Any]) -> RowMapping:
    row = connection.execute(
        update(batches)
        .where(batches.c.id == batch.id, batches.c.lease_token == batch.lease_token)
        .values(**values)
        .returning(batches)
    )
    found = row.mappings().first()
    if found is None:
        raise LeaseLost(batch.id)
    return found


def _batch(row: RowMapping) -> Batch:
    return Batch(**row)

"""The steps of open requests in SQL: placed before they are queued, recorded when they have ended.

Everything here may be repeated. A step's attempt is one row, whoever places it first; it is
recorded once; and none is placed for a request that is not open any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import (
    Connection,
    RowMapping,
    and_,
    delete,
    exists,
    func,
    literal,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from gateway.ledger.closed import Output, RequestError, Status
from gateway.ledger.workflow_plan import StepId, WorkflowPlan, plan_of
from gateway.sql.database import UtcDateTime
from gateway.tables.core import holds
from gateway.tables.workflows import steps
from workers.contract.jobs import Job, RequestId, Timings, Usage, decode_job


@dataclass(frozen=True, slots=True)
class NewStep:
    id: StepId
    model: str
    job: bytes


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What became of an attempt at a step."""

    id: StepId
    status: Status
    usage: Usage
    timings: Timings
    error: RequestError | None = None
    output: Output | None = None


@dataclass(frozen=True, slots=True)
class StepAttempt:
    """An attempt at a step; without a status it is queued or running."""

    id: StepId
    model: str
    job: bytes
    status: Status | None
    error: RequestError | None
    output: Output | None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """An open request that is a workflow, and every attempt at its steps."""

    request_id: RequestId
    job: Job
    plan: WorkflowPlan
    attempts: tuple[StepAttempt, ...]

    def of(self, name: str) -> list[StepAttempt]:
        return [attempt for attempt in self.attempts if attempt.id.name == name]


def read_run(connection: Connection, request_id: str) -> WorkflowRun | None:
    """None if it is not open, or no workflow."""
    payload = connection.execute(
        select(holds.c.job).where(holds.c.request_id == request_id)
    ).scalar()
    job = decode_job(payload) if payload is not None else None
    plan = plan_of(job) if job is not None else None
    if job is None or plan is None:
        return None
    return WorkflowRun(RequestId(request_id), job, plan, tuple(attempts_of(connection, request_id)))


def attempts_of(connection: Connection, request_id: str) -> list[StepAttempt]:
    """Read the attempts at the steps of a request, in their order."""
    query = (
        select(steps)
        .where(steps.c.request_id == request_id)
        .order_by(steps.c.placed_at, steps.c.name, steps.c.attempt)
    )
    return [_attempt(row) for row in connection.execute(query).mappings()]


@dataclass(frozen=True, slots=True)
class StepTry:
    """An attempt at a step, without what went in and came out."""

    id: StepId
    model: str
    ended: bool


def attempts_at(connection: Connection, request_ids: Sequence[str]) -> list[StepTry]:
    """Read which attempts there were at the steps of requests."""
    query = select(
        steps.c.request_id, steps.c.name, steps.c.attempt, steps.c.model, steps.c.status
    ).where(steps.c.request_id.in_(request_ids))
    return [
        StepTry(
            StepId(RequestId(row.request_id), row.name, row.attempt),
            row.model,
            row.status is not None,
        )
        for row in connection.execute(query)
    ]


def place(
    connection: Connection, request_id: str, wanted: Sequence[NewStep], *, now: datetime
) -> list[StepAttempt]:
    """Make rows of steps that are to run, unless somebody has; return them as they are now.

    Nothing is placed for a request that has been closed.
    """
    open_hold = select(holds.c.request_id).where(holds.c.request_id == request_id)
    # Whoever settles deletes this row: it waits for us, or we find nothing.
    if connection.execute(open_hold.with_for_update(read=True)).first() is None:
        return []
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    connection.execute(
        insert(steps).on_conflict_do_nothing(),
        [
            {
                "request_id": one.id.request_id,
                "name": one.id.name,
                "attempt": one.id.attempt,
                "model": one.model,
                "job": one.job,
                "placed_at": now,
            }
            for one in wanted
        ],
    )
    ids = {one.id for one in wanted}
    return [attempt for attempt in attempts_of(connection, request_id) if attempt.id in ids]


def record(connection: Connection, ends: Iterable[StepEnd], *, now: datetime) -> None:
    """Write down how steps ended; the first word on each counts."""
    for end in ends:
        connection.execute(
            update(steps)
            .where(_is(end.id), steps.c.status.is_(None))
            .values(
                status=end.status,
                ended_at=now,
                error=msgspec.to_builtins(end.error) if end.error else None,
                usage=msgspec.to_builtins(end.usage),
                timings=msgspec.to_builtins(end.timings),
                output=end.output.row() if end.output else None,
            )
        )


def idle(connection: Connection, *, before: datetime, after: str, limit: int) -> list[RequestId]:
    """Read requests of which no step was placed or has ended since a moment, by their ids."""
    touched = func.max(func.coalesce(steps.c.ended_at, steps.c.placed_at, type_=UtcDateTime()))
    query = (
        select(steps.c.request_id)
        .where(steps.c.request_id > after)
        .group_by(steps.c.request_id)
        .having(touched < literal(before, UtcDateTime()))
        .order_by(steps.c.request_id)
        .limit(limit)
    )
    return [RequestId(request_id) for request_id in connection.execute(query).scalars()]


def orphaned(connection: Connection, *, limit: int) -> list[tuple[StepId, str]]:
    """Read steps of requests that are closed, each with its model."""
    open_hold = select(holds.c.request_id).where(holds.c.request_id == steps.c.request_id)
    query = select(steps.c.request_id, steps.c.name, steps.c.attempt, steps.c.model).where(
        ~exists(open_hold.correlate(steps))
    )
    return [
        (StepId(RequestId(row.request_id), row.name, row.attempt), row.model)
        for row in connection.execute(query.limit(limit))
    ]


def forget(connection: Connection, ids: Iterable[StepId]) -> None:
    """Delete the rows of steps that have been stopped."""
    for id in ids:
        connection.execute(delete(steps).where(_is(id)))


def _is(id: StepId) -> Any:
    return and_(
        steps.c.request_id == id.request_id,
        steps.c.name == id.name,
        steps.c.attempt == id.attempt,
    )


def _attempt(row: RowMapping) -> StepAttempt:
    return StepAttempt(
        id=StepId(RequestId(row["request_id"]), row["name"], row["attempt"]),
        model=row["model"],
        job=row["job"],
        status=row["status"],
        error=msgspec.convert(row["error"], RequestError) if row["error"] else None,
        output=msgspec.msgpack.decode(row["output"], type=Output) if row["output"] else None,
        ended_at=row["ended_at"],
    )

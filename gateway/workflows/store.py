"""The steps of open workflow runs in SQL: inserted before they are queued, updated when they end.

Every operation may be repeated. An attempt at a step has one row, which the first call inserts; its
end is recorded once; and no row is inserted for a request that is closed.
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

from gateway.ledger.closed import Output, RequestError, Status
from gateway.ledger.workflow_plan import StepId, WorkflowPlan, plan_of
from gateway.sql.database import UtcDateTime, upsert
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
    """The end of an attempt at a step."""

    id: StepId
    status: Status
    usage: Usage
    timings: Timings
    error: RequestError | None = None
    output: Output | None = None


@dataclass(frozen=True, slots=True)
class StepAttempt:
    """An attempt at a step; it is queued or running while ``status`` is None."""

    id: StepId
    model: str
    job: bytes
    status: Status | None
    error: RequestError | None
    output: Output | None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """An open workflow run with all attempts at its steps."""

    request_id: RequestId
    job: Job
    plan: WorkflowPlan
    attempts: tuple[StepAttempt, ...]

    def of(self, name: str) -> list[StepAttempt]:
        return [attempt for attempt in self.attempts if attempt.id.name == name]


def read_run(connection: Connection, request_id: str) -> WorkflowRun | None:
    """Return a workflow run, or None if the request is closed or not a workflow."""
    payload = connection.execute(
        select(holds.c.job).where(holds.c.request_id == request_id)
    ).scalar()
    job = decode_job(payload) if payload is not None else None
    plan = plan_of(job) if job is not None else None
    if job is None or plan is None:
        return None
    return WorkflowRun(RequestId(request_id), job, plan, tuple(attempts_of(connection, request_id)))


def attempts_of(connection: Connection, request_id: str) -> list[StepAttempt]:
    """Return the attempts at the steps of a request, in the order in which they were placed."""
    query = (
        select(steps)
        .where(steps.c.request_id == request_id)
        .order_by(steps.c.placed_at, steps.c.name, steps.c.attempt)
    )
    return [_attempt(row) for row in connection.execute(query).mappings()]


@dataclass(frozen=True, slots=True)
class StepTry:
    """An attempt at a step, without its input and output."""

    id: StepId
    model: str
    ended: bool


def attempts_at(connection: Connection, request_ids: Sequence[str]) -> list[StepTry]:
    """Return the attempts at the steps of requests, without inputs and outputs."""
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
    """Insert rows of steps that are to run, unless they exist; return them as they are now.

    Returns nothing if the request is closed.
    """
    open_hold = select(holds.c.request_id).where(holds.c.request_id == request_id)
    # Settling deletes this row: it waits for this transaction, or the row is already gone.
    if connection.execute(open_hold.with_for_update(read=True)).first() is None:
        return []
    connection.execute(
        upsert(connection, steps).on_conflict_do_nothing(),
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
    """Record the ends of steps; only the first end of each attempt counts."""
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
    """Return ids of requests without a step that was placed or ended since ``before``, sorted."""
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
    """Return steps of closed requests, each with its model."""
    open_hold = select(holds.c.request_id).where(holds.c.request_id == steps.c.request_id)
    query = select(steps.c.request_id, steps.c.name, steps.c.attempt, steps.c.model).where(
        ~exists(open_hold.correlate(steps))
    )
    return [
        (StepId(RequestId(row.request_id), row.name, row.attempt), row.model)
        for row in connection.execute(query.limit(limit))
    ]


def forget(connection: Connection, ids: Iterable[StepId]) -> None:
    """Delete the rows of stopped steps."""
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

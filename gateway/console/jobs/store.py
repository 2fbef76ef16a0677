"""The rows of the console's jobs: begin, note progress, end, find.

A row is kept for a day. A result is found by its kind and the digest of what it depends on, so a
page shows it without naming the job. Contains no secrets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias

import msgspec
from sqlalchemy import ColumnElement, Connection, RowMapping, select, update

from gateway.console.roles import Act
from gateway.sql.database import upsert
from gateway.tables.users import console_jobs

SILENT: Final = timedelta(seconds=15)
"""Time after which a job that was not seen has ended with its gateway."""
PROBLEM_MAX: Final = 1000
BACK_MAX: Final = 4000
LOST: Final = "The gateway that ran it has ended."

JobState: TypeAlias = Literal["running", "done", "failed", "cancelled", "lost"]
"""``lost``: its gateway has ended."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be started.

    ``starter`` started it. Those who may do ``act`` in ``account_id`` see it; in the installation
    if that is None. ``back`` is the address of the page that shows the result.
    """

    kind: str
    digest: str
    starter: str
    act: Act
    back: str
    account_id: int | None = None
    can_cancel: bool = True


@dataclass(frozen=True, slots=True)
class ConsoleJob:
    """A job as pages show it. ``total`` is None if it is not known how much there is to do."""

    id: str
    kind: str
    starter: str
    act: Act
    account_id: int | None
    back: str
    state: JobState
    done: int
    total: int | None
    can_cancel: bool
    cancelling: bool
    result: Any
    problem: str
    started_at: datetime
    ended_at: datetime | None

    @property
    def is_running(self) -> bool:
        return self.state == "running"


def digest_of(*parts: object) -> str:
    """Return the digest of what a result depends on."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


def begin(connection: Connection, id: str, job: NewJob, now: datetime) -> str:
    """Insert a job, unless the same one is running; return the id of the one that runs."""
    same = console_jobs.c.kind == job.kind, console_jobs.c.digest == job.digest
    is_running = console_jobs.c.state == "running"
    connection.execute(
        update(console_jobs)
        .where(*same, is_running, console_jobs.c.seen_at < now - SILENT)
        .values(state="failed", problem=LOST, ended_at=now)
    )
    inserted = connection.execute(
        upsert(connection, console_jobs)
        .values(
            id=id,
            kind=job.kind,
            digest=job.digest,
            starter=job.starter,
            act=job.act,
            account_id=job.account_id,
            # A longer query is left out; the page then shows its defaults.
            back=job.back if len(job.back) <= BACK_MAX else job.back.partition("?")[0][:BACK_MAX],
            can_cancel=job.can_cancel,
            started_at=now,
            seen_at=now,
        )
        .on_conflict_do_nothing()
        .returning(console_jobs.c.id)
    ).scalar()
    if inserted is not None:
        return id
    known = connection.execute(select(console_jobs.c.id).where(*same, is_running)).scalar()
    return known or id


def note(connection: Connection, id: str, *, done: int, total: int | None) -> bool:
    """Note how far a job is. Return whether it is to be cancelled."""
    noted = connection.execute(
        update(console_jobs)
        .where(console_jobs.c.id == id, console_jobs.c.state == "running")
        .values(done=done, total=total, seen_at=datetime.now(UTC))
        .returning(console_jobs.c.cancelling)
    )
    return bool(noted.scalar())


def end(
    connection: Connection, id: str, state: JobState, *, result: Any = None, problem: str = ""
) -> None:
    connection.execute(
        update(console_jobs)
        .where(console_jobs.c.id == id, console_jobs.c.state == "running")
        .values(
            state=state,
            result=result,
            problem=problem[:PROBLEM_MAX],
            ended_at=datetime.now(UTC),
        )
    )


def ask_to_cancel(connection: Connection, id: str) -> None:
    """Let the gateway that runs a job cancel it."""
    connection.execute(
        update(console_jobs)
        .where(console_jobs.c.id == id, console_jobs.c.can_cancel.is_(True))
        .values(cancelling=True)
    )


def find(connection: Connection, id: str) -> ConsoleJob | None:
    return _latest(connection, console_jobs.c.id == id)


def find_latest(connection: Connection, kind: str, digest: str) -> ConsoleJob | None:
    """Return the last job of a kind that was started for a digest."""
    same = console_jobs.c.kind == kind, console_jobs.c.digest == digest
    return _latest(connection, *same)


def _latest(connection: Connection, *conditions: ColumnElement[bool]) -> ConsoleJob | None:
    query = select(console_jobs).where(*conditions).order_by(console_jobs.c.started_at.desc())
    row = connection.execute(query.limit(1)).mappings().first()
    return None if row is None else _job(row)


def _job(row: RowMapping) -> ConsoleJob:
    silent = row["state"] == "running" and row["seen_at"] + SILENT < datetime.now(UTC)
    return ConsoleJob(
        id=row["id"],
        kind=row["kind"],
        starter=row["starter"],
        act=row["act"],
        account_id=row["account_id"],
        back=row["back"],
        state="lost" if silent else row["state"],
        done=row["done"],
        total=row["total"],
        can_cancel=row["can_cancel"],
        cancelling=row["cancelling"],
        result=row["result"],
        problem=row["problem"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
    )

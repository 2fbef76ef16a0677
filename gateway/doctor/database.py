"""Examines the database: schema, writes, the time of a commit, its clock, the state of the books,
and where recent requests spent their time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from gateway.billing.reconciliation import last_reconciliation
from gateway.doctor.diagnosis import Diagnosis, note, ok, problem, warning
from gateway.performance import ReceiptSample, read_samples
from gateway.readiness import write_probe
from gateway.settings import Settings
from gateway.sql.database import Database, schema_is_current

COMMITS: Final = 5
COMMIT_MAX_MS: Final = 20.0
"""Time of a commit above which it is a noticeable part of a chat: each request needs two."""
SKEW_MAX_S: Final = 1.0
WINDOW: Final = timedelta(hours=1)
QUEUED_MAX_MS: Final = 1000.0
SAMPLES_MIN: Final = 5


def examine_database(settings: Settings, models: Sequence[str]) -> Iterator[Diagnosis]:
    where = make_url(settings.sql_url).render_as_string(hide_password=True)
    file = settings.sqlite_file
    if file is not None and not file.exists():
        yield note("database", f"{file} does not exist yet; `tollgate up` creates it")
        return
    database = Database(settings.sql_url, prepare=settings.database_prepare)
    try:
        if not schema_is_current(database.engine):
            yield problem(
                "database",
                f"{where} does not have the schema of this version",
                "Run `tollgate migrate`, or install the version that migrated it.",
            )
            return
        yield from _commits(database, where)
        with database.snapshot() as connection:
            yield from _books(connection)
            for model in models:
                samples = read_samples(connection, model, datetime.now(UTC) - WINDOW)
                yield from time_spent(model, samples)
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        yield problem(
            "database",
            f"{where} failed: {reason}",
            "Check that it runs and is writable, and that DATABASE_URL is right.",
        )
    finally:
        database.dispose()


def time_spent(model: str, samples: Sequence[ReceiptSample]) -> Iterator[Diagnosis]:
    """Say what made recent requests of a model slow, if something other than the model did."""
    timings = [sample.timings for sample in samples if sample.status == "succeeded"]
    if len(timings) < SAMPLES_MIN:
        return
    queue_ms = statistics.median(each.queue_us for each in timings) / 1000
    total_ms = statistics.median(each.total_us for each in timings) / 1000
    load_ms = statistics.median(each.load_us for each in timings) / 1000
    found = f"{model}: of {total_ms:.0f} ms of the median request"
    if queue_ms > QUEUED_MAX_MS and queue_ms > total_ms / 2:
        yield warning(
            "speed",
            f"{found}, {queue_ms:.0f} ms are in the queue",
            "Add a worker, or raise `options.slots` of its entry if its device has memory left.",
        )
    if load_ms > total_ms / 2:
        yield warning(
            "speed",
            f"{found}, {load_ms:.0f} ms load its weights",
            "Set TOLLGATE_PRELOAD=true for its worker.",
        )


def _commits(database: Database, where: str) -> Iterator[Diagnosis]:
    times_ms, skew_s, set_aside = [], 0.0, 0
    for _ in range(COMMITS):
        started = time.monotonic()
        with database.transaction() as connection:
            found = write_probe(connection)
        times_ms.append((time.monotonic() - started) * 1000)
        skew_s, set_aside = found.skew_s, sum(found.set_aside.values())
    commit_ms = statistics.median(times_ms)
    said = f"{where} has the current schema; a commit takes {commit_ms:.1f} ms"
    if commit_ms > COMMIT_MAX_MS:
        yield warning(
            "database",
            said,
            "Each request commits twice: put the database on a local SSD or nearer to the gateway.",
        )
    else:
        yield ok("database", said)
    if abs(skew_s) > SKEW_MAX_S:
        yield problem(
            "clock",
            f"the clock of the database differs by {skew_s:+.1f} s",
            "Synchronise both clocks (NTP): prices, budgets and months begin by them.",
        )
    if set_aside:
        yield warning(
            "books",
            f"{set_aside} stored rows could not be processed and are set aside",
            "Run `tollgate aside list`, then retry or release each.",
        )


def _books(connection: Connection) -> Iterator[Diagnosis]:
    last = last_reconciliation(connection)
    if last is None:
        return
    at = f"{last.finished_at:%Y-%m-%d %H:%M} UTC"
    if last.findings:
        yield problem(
            "books",
            f"the reconciliation of {at} has {len(last.findings)} findings",
            "Run `tollgate reconcile`, which prints them.",
        )
    else:
        yield ok("books", f"consistent, as of {at}")

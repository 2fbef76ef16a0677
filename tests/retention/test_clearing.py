"""Retention: each kind is cleared by its setting, in bounded batches, by one process at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import (
    JSON,
    Column,
    Integer,
    Row,
    delete,
    event,
    insert,
    null,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError

from gateway import metrics
from gateway.accounts.budgets import create_budget
from gateway.accounts.users import create_user
from gateway.audit_log import Author, record
from gateway.checks.moments import microseconds_of
from gateway.feedback.store import RatedRequest, put
from gateway.ids import first_request_id
from gateway.leases import Lease
from gateway.ledger.holds import hold
from gateway.ledger.reconcile import reconcile
from gateway.ledger.refunds import refund
from gateway.notices.kinds import Notice
from gateway.notices.store import publish
from gateway.notices.subscriptions import subscribe
from gateway.retention.budget_windows import delete_old_windows
from gateway.retention.clearing import Retention
from gateway.retention.kinds import _delete_batches, all_kinds
from gateway.retention.metadata import REQUESTS
from gateway.settings import Settings
from gateway.sql.database import Database, UtcDateTime
from gateway.tables.audit import audit_events
from gateway.tables.batches import batch_results, batches, files
from gateway.tables.core import budget_windows, budgets, chores, idempotency, outputs, receipts
from gateway.tables.files import media
from gateway.tables.users import console_jobs, login_links, sessions
from gateway.tables.voices import voice_recordings
from gateway.tables.webhooks import webhook_deliveries
from tests.ledger.books import Books, done, open_books
from workers.contract.blobs import Blobs
from workers.contract.jobs import RequestId

TAGS = {"customer": "ann"}
OLD = datetime.now(UTC) - timedelta(days=400)
EVERYTHING = dict.fromkeys(
    (
        *("metadata_retention_days", "audit_retention_days", "batch_retention_days"),
        "budget_window_retention_days",
    ),
    300,
)


@pytest.fixture
def books(database: Database) -> Books:
    return open_books(database, credit=10_000_000)


def old_requests(books: Books, number: int, *, settled: bool = True) -> list[RequestId]:
    """Make requests with metadata and a webhook, accepted 400 days ago."""
    ids = [RequestId(f"{first_request_id(OLD)}{n:020x}") for n in range(number)]
    orders = [
        books.order(request_id=id, metadata=TAGS, webhook="https://example.com/hook") for id in ids
    ]
    with books.database.transaction() as connection:
        hold(connection, orders)
    if settled:
        books.settle(*(done(id) for id in ids))
    return ids


def retention(books: Books, folder: Path, **settings: Any) -> Retention:
    made = Settings(**(EVERYTHING | settings))
    blobs = Blobs((folder / "blobs").as_uri())
    return Retention(books.database, all_kinds(made, books.database, blobs))


def tagged(books: Books) -> int:
    with books.database.transaction() as connection:
        return len(
            connection.execute(select(receipts).where(receipts.c["metadata"] != null())).all()
        )


def row_of_each_kind(books: Books) -> None:
    """Insert a row of each kind that is due."""
    (id, *_) = old_requests(books, 3)
    account = {"account_id": books.account.id}
    recording = {"id": f"cons_{0:032x}", "name": "c", "language": "en", "clear_at": OLD}
    file = {
        "id": f"file-{0:032x}", "purpose": "user_data", "filename": "f", "bytes": 1,
        "blob_key": "k", "sha256": "x", "content_type": "x", "expires_at": OLD,
    }  # fmt: skip
    batch = {
        "id": f"batch_{first_request_id(OLD)[4:]}{0:020x}", "key_id": books.key.id, "endpoint": "/",
        "input_file_id": "f", "completion_window": "24h", "metadata": TAGS, "status": "completed",
        "expires_at": OLD, "ended_at": OLD,
    }  # fmt: skip
    with books.database.transaction() as connection:
        connection.execute(insert(outputs).values(request_id=id, body=b"", expires_at=OLD))
        connection.execute(
            insert(idempotency).values(
                **account, key="k", request_id=id, body_sha256=b"x" * 32, created_at=OLD
            )
        )
        # Of a request that was never accepted.
        connection.execute(insert(media).values(**account, request_id="r", task="t", clear_at=OLD))
        connection.execute(insert(files).values(**account, **file, created_at=OLD))
        connection.execute(insert(voice_recordings).values(**account, **recording, created_at=OLD))
        connection.execute(insert(batches).values(**account, **batch, created_at=OLD))
        of_request = RatedRequest(id, books.account.id, "m", "text-generation", "m", OLD)
        put(connection, of_request, rating=3, labels=[], comment="", now=OLD)
        budget = create_budget(connection, books.account.id, 5, window="hour")
        window = {"starts_us": microseconds_of(OLD), "limit_nanos": 5, "hard": True}
        connection.execute(insert(budget_windows).values(budget_id=budget.id, **window))
        connection.execute(update(webhook_deliveries).values(outcome="gone", ended_at=OLD))
        subscribe(connection, books.account.id, "mailto:ann@example.com", None)
        told = Notice("k", books.account.id, "key.expired", "key 1", "Expired", "Expired.", {})
        publish(connection, [told, replace(told, key="l", lasting=True)], now=OLD)
        record(connection, Author("ann", "cli"), "catalog.load", "old", now=OLD)
        ann = create_user(connection, "Ann", role="operator").id
        entered = {
            "user_id": ann, "method": "link", "csrf": b"", "network": "", "agent": "",
            **dict.fromkeys(("seen_at", "proved_at"), OLD),
        }  # fmt: skip
        ended = {"token_hash": b"x", "created_at": OLD, "ends_at": OLD}
        connection.execute(insert(sessions).values(**ended, **entered))
        connection.execute(insert(login_links).values(**ended, user_id=ann, code_hash=b"x"))
        connection.execute(
            insert(console_jobs).values(
                id="j", kind="export", digest="", starter="ann", act="own.read", back="/",
                can_cancel=True, started_at=OLD, seen_at=OLD,
            )
        )  # fmt: skip


async def test_every_kind_is_cleared_when_it_is_due(books: Books, tmp_path: Path) -> None:
    row_of_each_kind(books)
    made = retention(books, tmp_path)
    with books.database.transaction() as connection:
        before = {state.kind.name: state for state in made.measure(connection)}
        counted = made.count_due(connection, datetime.now(UTC))

    cleared = await made.clear_due()

    # The queue server ends them.
    assert before.pop("event_logs").due_at is None
    assert {name for name, state in before.items() if state.lag(datetime.now(UTC))} == set(before)
    assert cleared == {
        name: 3 if name in ("webhooks", "request_metadata") else 1 for name in before
    }
    assert counted == cleared
    with books.database.transaction() as connection:
        assert not any(made.count_due(connection, datetime.now(UTC)).values())
        after = {state.kind.name: state for state in made.measure(connection)}
    assert after.pop("event_logs").cleared == 0
    assert {state.cleared for state in after.values()} == {1, 3}
    assert all(not state.lag(datetime.now(UTC)) for state in after.values())
    assert await made.clear_due() == {}
    lag = metrics.RETENTION_LAG_SECONDS.labels("outputs")._value.get()
    assert lag == 0
    assert tagged(books) == 0


async def test_what_has_no_retention_is_kept(books: Books, tmp_path: Path) -> None:
    row_of_each_kind(books)
    endless = dict.fromkeys(("webhook_retention_days", *EVERYTHING), "forever")

    cleared = await retention(books, tmp_path, **endless).clear_due()

    assert cleared is not None
    kept = {"request_metadata", "batch_metadata", "feedback", "webhooks", "audit_events"}
    kept |= {"batches", "budget_windows"}
    assert kept.isdisjoint(cleared)
    assert tagged(books) == 3


async def test_one_process_clears_at_a_time(books: Books, tmp_path: Path) -> None:
    row_of_each_kind(books)
    crashed = Lease(books.database, "retention", held_s=60)
    assert await crashed.acquire()

    assert await retention(books, tmp_path).clear_due() is None
    with books.database.transaction() as connection:
        connection.execute(update(chores).values(due_at=OLD))
    cleared = await retention(books, tmp_path).clear_due()

    assert cleared is not None
    assert len(cleared) == 16


async def test_a_kind_that_fails_stops_no_other(books: Books, tmp_path: Path) -> None:
    row_of_each_kind(books)
    kinds = all_kinds(Settings(**EVERYTHING), books.database, Blobs(tmp_path.as_uri()))

    async def fail() -> Any:
        raise ValueError("damaged")

    broken = [replace(kind, clear=fail) if kind.name == "media" else kind for kind in kinds]

    cleared = await Retention(books.database, broken).clear_due()

    assert cleared is not None
    assert set(cleared) == {kind.name for kind in kinds} - {"media", "event_logs"}


def test_metadata_is_cleared_in_batches_up_to_the_oldest_open_request(books: Books) -> None:
    ids = old_requests(books, 7, settled=False)
    books.settle(*(done(id) for id in (*ids[:4], *ids[5:])))

    def clear() -> list[int]:
        with books.database.transaction() as connection:
            before = OLD + timedelta(days=1)
            found = [REQUESTS.clear(connection, before, limit=3) for _ in range(3)]
        return [each.rows for each in found]

    assert clear() == [3, 1, 0]
    assert tagged(books) == 2
    books.settle(done(ids[4]))
    assert clear() == [3, 0, 0]
    assert tagged(books) == 0


def test_receipts_can_lose_personal_columns_only(books: Books) -> None:
    (id,) = old_requests(books, 1)
    here = update(receipts).where(receipts.c.request_id == id)

    def change(column: Column[Any], value: Any) -> None:
        with books.database.transaction() as connection:
            connection.execute(here.values({column: value}))

    for column in receipts.c:
        with pytest.raises(DBAPIError, match="append-only"):
            change(column, _other(column))
    for column in (receipts.c["metadata"], receipts.c.error):
        change(column, null())
        change(column, null())
        with pytest.raises(DBAPIError, match="append-only"):
            change(column, {"a": "b"})


def test_old_budget_windows_are_deleted_and_not_missed(books: Books) -> None:
    orders = [books.order(accepted_at=OLD), books.order(accepted_at=OLD), books.order()]
    with books.database.transaction() as connection:
        for window in ("hour", "total"):
            create_budget(connection, books.account.id, 10**9, window=window)
        connection.execute(update(budgets).values(created_at=OLD - timedelta(days=1)))
        hold(connection, orders)
    (charged, *_) = orders
    books.settle(done(charged.request_id))

    def windows() -> int:
        with books.database.snapshot() as connection:
            assert reconcile(connection, now=datetime.now(UTC)) == []
            return len(connection.execute(select(budget_windows)).all())

    def clear() -> int:
        before = datetime.now(UTC) - timedelta(days=300)
        with books.database.transaction() as connection:
            return delete_old_windows(connection, before, limit=5)

    assert windows() == 3
    assert clear() == 0  # a request is open in it
    books.settle(done(orders[1].request_id))
    assert clear() == 1
    assert windows() == 2
    with books.database.transaction() as connection:
        refund(connection, charged.request_id, key="refund", actor="ann", reason="late")
    assert windows() == 2
    with books.database.transaction() as connection:
        connection.execute(delete(budget_windows).where(budget_windows.c.starts_us > 0))
    with books.database.snapshot() as connection:
        (missing,) = reconcile(connection, now=datetime.now(UTC))
    assert missing.rule == "R9"


def test_lines_of_a_batch_that_could_not_run_go_with_it(books: Books) -> None:
    row_of_each_kind(books)
    with books.database.transaction() as connection:
        id = connection.execute(select(batches.c.id)).scalar_one()
        line = {"batch_id": id, "line": 1, "succeeded": False, "result": b""}
        connection.execute(insert(batch_results).values(**line))

        assert _delete_batches(connection, OLD, limit=5) == 0
        assert _delete_batches(connection, OLD + timedelta(days=1), limit=5) == 1
        assert connection.execute(select(batch_results)).first() is None


def _other(column: Column[Any]) -> Any:
    """A value of a column's type that it does not have."""
    if isinstance(column.type, UtcDateTime):
        return OLD
    if isinstance(column.type, JSON):
        return {"a": "b"}
    return 10**6 if isinstance(column.type, Integer) else "other"


@pytest.fixture
def statements(database: Database) -> Iterator[list[tuple[str, Any]]]:
    seen: list[tuple[str, Any]] = []

    def note(connection, cursor, statement, parameters, context, many):  # type: ignore[no-untyped-def]  # an event's
        seen.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    yield seen
    event.remove(database.engine, "before_cursor_execute", note)


async def test_every_statement_uses_an_index(
    books: Books, tmp_path: Path, statements: list[tuple[str, Any]]
) -> None:
    row_of_each_kind(books)
    made = retention(books, tmp_path)
    statements.clear()

    with books.database.transaction() as connection:
        made.measure(connection)
        made.count_due(connection, datetime.now(UTC))
    # All of them in this thread, and on this engine.
    for kind in made._kinds:
        await kind.clear()

    postgresql = books.database.engine.dialect.name == "postgresql"
    explain = "EXPLAIN " if postgresql else "EXPLAIN QUERY PLAN "
    ours = [(one, of) for one, of in statements if one.startswith(("SELECT", "UPDATE", "DELETE"))]
    assert len(ours) > 15
    with books.database.transaction() as connection:
        if postgresql:
            connection.execute(text("SET LOCAL enable_seqscan = off"))
        for statement, parameters in ours:
            plan: list[Row[Any]] = list(
                connection.exec_driver_sql(explain + statement, parameters).all()
            )
            lines = [str(row[-1]).strip() for row in plan]
            assert [line for line in lines if _reads_whole_table(line)] == [], statement


def _reads_whole_table(line: str) -> bool:
    """Whether a line of a plan scans a table; SQLite's scans that use an index are ordered."""
    if any(f" {table}" in line for table in ("retention", "audit_horizon")):
        return False  # a row of each kind, and one row
    if line == "SCAN CONSTANT ROW" or line.startswith("SCAN anon"):
        return False  # the rows that a bounded search has found
    return "Seq Scan" in line or (line.startswith("SCAN") and "USING" not in line)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("output_retention_hours", "forever", "cannot be 'forever'; use a number of hours"),
        ("file_retention_days", "0", "days above 0, at most 36500, or 'forever'"),
        ("audit_retention_days", "soon", "days from 1 to 36500, or 'forever'"),
        ("metadata_retention_days", "0.5", "days from 1 to 36500, or 'forever'"),
        ("upload_retention_hours", "inf", "hours above 0, at most 876000"),
    ],
)
def test_retentions_that_are_not_valid_are_refused(
    name: str, value: str, accepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"TOLLGATE_{name.upper()}", value)

    with pytest.raises(ValidationError, match=f"TOLLGATE_{name.upper()}") as refused:
        Settings()

    assert accepted in str(refused.value)


def test_forever_is_no_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLGATE_WEBHOOK_RETENTION_DAYS", "forever")

    assert Settings().webhook_retention_days is None
    assert Settings().metadata_retention_days is None


def test_audit_events_are_due_at_midnight(books: Books, tmp_path: Path) -> None:
    with books.database.transaction() as connection:
        record(connection, Author("ann", "cli"), "catalog.load", "x", now=OLD.replace(hour=5))
        states = retention(books, tmp_path).measure(connection)
        (at,) = connection.execute(select(audit_events.c.at)).scalars()

    (due_at,) = [state.due_at for state in states if state.kind.name == "audit_events"]
    midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
    assert due_at == midnight + timedelta(days=301)

"""The audit log: append-only, in the transaction of the act, deleted by its retention only."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Connection, delete, select, text, update
from sqlalchemy.exc import DBAPIError

from gateway.accounts.accounts import list_accounts
from gateway.audit_log import (
    AuditEvent,
    AuditFilter,
    Author,
    delete_expired,
    list_events,
    record,
)
from gateway.catalog.store import LiveCatalog
from gateway.operations import accounts, keys
from gateway.operations.accounts import AccountBody, AccountChange
from gateway.operations.audit import export_page, list_page
from gateway.operations.keys import KeyBody
from gateway.retention.clearing import Retention
from gateway.retention.kinds import all_kinds
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.tables.audit import audit_events, audit_horizon
from gateway.up.first_start import prepare
from tests.ledger.books import PEPPER
from workers.contract.blobs import Blobs

OPERATOR = Author("ann", "cli", reason="a test")
NOW = datetime(2026, 3, 10, tzinfo=UTC)


def events(database: Database, **wanted: object) -> list[AuditEvent]:
    with database.snapshot() as connection:
        found = list_events(connection, AuditFilter(**wanted), limit=1000)  # type: ignore[arg-type]  # by name
    return found[::-1]


def act(connection: Connection, days_ago: int = 0) -> None:
    record(connection, OPERATOR, "catalog.load", "catalog", now=NOW - timedelta(days=days_ago))


@pytest.mark.parametrize(
    "change",
    [
        update(audit_events).values(actor="nobody"),
        update(audit_events).values(at=NOW - timedelta(days=900)),
        delete(audit_events),
    ],
    ids=["author", "moment", "delete"],
)
def test_sql_refuses_to_change_or_delete_events(
    database: Database,
    change: update | delete,  # type: ignore[valid-type]  # statements
) -> None:
    with database.transaction() as connection:
        act(connection)

    with pytest.raises(DBAPIError, match="append-only"), database.transaction() as connection:
        connection.execute(change)

    assert [event.actor for event in events(database)] == ["ann"]


def test_postgresql_refuses_to_truncate_the_log(database: Database) -> None:
    if database.engine.dialect.name == "sqlite":
        return
    with pytest.raises(DBAPIError, match="append-only"), database.transaction() as connection:
        connection.execute(text("TRUNCATE audit_events"))


def test_retention_deletes_old_events_only_and_is_recorded(database: Database) -> None:
    with database.transaction() as connection:
        for days_ago in (40, 31, 30, 1):
            act(connection, days_ago)
    before = NOW - timedelta(days=30)

    with database.transaction() as connection:
        done = [delete_expired(connection, before, limit=1) for _ in range(3)]

    assert done == [1, 1, 0]
    kept = events(database)
    assert sorted(event.at for event in kept)[:2] == [before, NOW - timedelta(days=1)]
    (expired,) = [event for event in kept if event.act == "audit.expire"]
    assert (expired.actor, expired.origin) == ("retention", "system")
    assert expired.after == {"deleted_before": before.isoformat()}


def test_horizon_of_the_retention_only_moves_forward(database: Database) -> None:
    with database.transaction() as connection:
        act(connection, 40)
        delete_expired(connection, NOW - timedelta(days=30), limit=10)

    for change in (
        update(audit_horizon).values(deleted_before=NOW - timedelta(days=31)),
        delete(audit_horizon),
    ):
        with pytest.raises(DBAPIError, match="append-only"), database.transaction() as connection:
            connection.execute(change)


def test_an_act_that_fails_leaves_no_event_and_an_event_that_fails_no_act(
    database: Database,
) -> None:
    with database.engine.connect() as connection:
        accounts.create(connection, OPERATOR, AccountBody(name="a"))
        connection.rollback()

    assert events(database) == []
    with database.transaction() as connection:
        connection.execute(text("ALTER TABLE audit_events RENAME TO gone"))
    with pytest.raises(DBAPIError), database.transaction() as connection:
        accounts.create(connection, OPERATOR, AccountBody(name="b"))
    with database.snapshot() as connection:
        assert list_accounts(connection) == []


def test_a_change_records_only_what_differs(database: Database) -> None:
    with database.transaction() as connection:
        accounts.create(connection, OPERATOR, AccountBody(name="acme"))
        accounts.change(connection, OPERATOR, "acme", AccountChange(status="suspended", name="x"))

    _, changed = events(database)
    assert (changed.act, changed.reason) == ("account.change", "a test")
    assert changed.before == {"name": "acme", "status": "active"}
    assert changed.after == {"name": "x", "status": "suspended"}


def test_the_secret_of_a_key_is_not_in_its_event(database: Database) -> None:
    with database.transaction() as connection:
        accounts.create(connection, OPERATOR, AccountBody(name="acme"))
        made = keys.create(connection, OPERATOR, "acme", KeyBody(), pepper=PEPPER)

    with database.snapshot() as connection:
        stored = str(connection.execute(select(audit_events)).all())
    assert made["prefix"] in stored
    assert made["secret"] not in stored


def test_pages_are_complete_and_filters_combine(database: Database) -> None:
    with database.transaction() as connection:
        for name in ("a", "b", "c", "d", "e"):
            made = accounts.create(connection, OPERATOR, AccountBody(name=name))
            other = Author("bob", "http")
            accounts.change(connection, other, name, AccountChange(status="suspended"))

    with database.snapshot() as connection:
        found, cursor = [], None
        while True:
            page, cursor = list_page(connection, AuditFilter(), limit=3, cursor=cursor)
            found += page
            if cursor is None:
                break
    assert [view["id"] for view in found] == sorted((v["id"] for v in found), reverse=True)
    assert len(found) == 10
    assert len(events(database, actor="bob")) == 5
    assert [event.actor for event in events(database, subject=f"account {made['id']}")] == [
        "ann",
        "bob",
    ]
    assert len(events(database, account_id=made["id"], act="account.change", origin="http")) == 1
    assert events(database, ends_at=NOW - timedelta(days=9000)) == []


def test_export_has_every_event_and_no_formulas(database: Database) -> None:
    with database.transaction() as connection:
        for number in range(1100):
            record(connection, Author("=1+1", "cli"), "catalog.load", f"catalog {number}")

    parts: dict[str, bytes] = {"jsonl": b"", "csv": b""}
    with database.snapshot() as connection:
        for format in ("jsonl", "csv"):
            cursor: str | None = None
            while True:
                part, cursor = export_page(
                    connection,
                    AuditFilter(),
                    format=format,  # type: ignore[arg-type]  # of two literals
                    cursor=cursor,
                )
                parts[format] += part
                if cursor is None:
                    break

    lines = [msgspec.json.decode(line) for line in parts["jsonl"].splitlines()]
    rows = list(csv.DictReader(io.StringIO(parts["csv"].decode())))
    assert len({line["id"] for line in lines}) == len(lines) == 1100
    assert [row["id"] for row in rows] == [line["id"] for line in lines]
    assert lines[0]["actor"] == "=1+1"
    assert {row["actor"] for row in rows} == {"'=1+1"}


def test_texts_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(ValueError, match="the actor has 201 characters"):
        Author("x" * 201, "cli")
    with pytest.raises(ValueError, match="the reason contains U"):
        Author("x", "cli", reason="a\u202eb")


def test_the_first_start_is_recorded(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    settings.home.mkdir()

    prepare(settings)

    database = Database(settings.sql_url)
    try:
        found = events(database)
    finally:
        database.dispose()
    assert [event.act for event in found] == [
        "database.migrate",
        "account.create",
        "key.create",
        "key.create",
        "credit.add",
        "user.create",
        "member.set",
    ]
    assert {(event.actor, event.origin) for event in found} == {("tollgate up", "system")}
    assert len({event.call_id for event in found}) == 1


async def test_retention_deletes_events_if_it_is_set(database: Database, tmp_path: Path) -> None:
    with database.transaction() as connection:
        record(connection, OPERATOR, "catalog.load", "old", now=NOW - timedelta(days=900))
        record(connection, OPERATOR, "catalog.load", "new")

    blobs = Blobs(tmp_path.as_uri())
    await Retention(database, all_kinds(Settings(), database, blobs)).clear_due()
    assert len(events(database)) == 2
    kept = Settings(audit_retention_days=30)
    await Retention(database, all_kinds(kept, database, blobs)).clear_due()

    assert [event.subject for event in events(database)] == ["new", "audit log"]
    await database.close()


async def test_loading_a_catalog_is_recorded_if_it_changes_something_or_was_asked_for(
    database: Database, tmp_path: Path
) -> None:
    file = tmp_path / "catalog.yaml"

    def sell(amount: str) -> None:
        file.write_text(
            "models:\n  - name: m\n    task: text-to-image\n    engine: echo\n"
            f'    price: [{{unit: image, amount: "{amount}"}}]\n'
        )

    sell("0.01")
    await LiveCatalog.open(file, database)
    live = await LiveCatalog.open(file, database)
    await live.reload(OPERATOR)
    sell("0.02")
    await live.reload(OPERATOR)

    found = [(event.actor, dict(event.after or {})) for event in events(database)]
    prices = [after.pop("prices") for _, after in found]
    first, unchanged, second = [after.pop("sha256", None) for _, after in found]
    assert unchanged is None
    assert first != second == sha256(file.read_bytes()).hexdigest()
    assert found == [
        ("start of a gateway", {"models": 1, "changed": ["m"]}),
        ("ann", {"models": 1, "changed": []}),
        ("ann", {"models": 1, "changed": ["m"]}),
    ]
    assert [list(each) for each in prices] == [["m"], [], ["m"]]
    await database.close()

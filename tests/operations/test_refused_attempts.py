"""Refused administrative attempts are recorded, and a flood of them is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import select

from gateway.accounts import refused_attempts
from gateway.accounts.refused_attempts import CALLS_MAX, INTERVAL_S, RefusedAttempts
from gateway.sql.database import Database
from gateway.tables.audit import audit_events
from tests.ledger.books import open_books


def recorded(database: Database) -> list[Mapping[str, Any]]:
    query = select(audit_events).where(audit_events.c.act == "access.refuse")
    with database.snapshot() as connection:
        return list(connection.execute(query.order_by(audit_events.c.id)).mappings())


async def test_a_key_has_at_most_one_event_a_minute(database: Database) -> None:
    books, other = open_books(database, credit=0), open_books(database, credit=0)
    refused = RefusedAttempts(database)

    refused.note(books.key, "POST /v1/admin/prices")
    await refused.flush(now=0)
    for number in range(1000):
        refused.note(books.key, f"GET /v1/admin/{number % 100}")
    refused.note(other.key, "GET /v1/admin/audit")
    await refused.flush(now=INTERVAL_S - 1)
    await refused.flush(now=INTERVAL_S)
    await refused.flush(now=10 * INTERVAL_S)

    first, of_other, flood = recorded(database)
    assert (first["actor"], first["key_id"]) == (books.key.prefix, books.key.id)
    assert first["account_id"] == books.account.id
    assert first["after"] == {"attempts": 1, "calls": {"POST /v1/admin/prices": 1}}
    assert of_other["key_id"] == other.key.id
    assert flood["after"]["attempts"] == 1000
    assert len(flood["after"]["calls"]) == CALLS_MAX


async def test_attempts_are_kept_if_they_cannot_be_written(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = open_books(database, credit=0)
    refused = RefusedAttempts(database)
    refused.note(books.key, "POST /v1/admin/prices")

    def fail(*_: Any, **__: Any) -> None:
        refused.note(books.key, "POST /v1/admin/prices")
        raise OSError("no database")

    with monkeypatch.context() as patched:
        patched.setattr(refused_attempts, "record", fail)
        with pytest.raises(OSError, match="no database"):
            await refused.flush(now=0)
    await refused.flush(now=1)

    (event,) = recorded(database)
    assert event["after"] == {"attempts": 2, "calls": {"POST /v1/admin/prices": 2}}

"""The database: record its migrations."""

from __future__ import annotations

from sqlalchemy import Connection

from gateway.audit_log import Author, record


def record_migration(connection: Connection, old: str | None, new: str, *, author: Author) -> None:
    before = None if old is None else {"schema": old}
    record(connection, author, "database.migrate", "database", before=before, after={"schema": new})

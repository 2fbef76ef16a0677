"""The SQL tables of the audit log; they share the metadata of ``core``.

``audit_events`` is append-only: triggers refuse every UPDATE, and every DELETE of an event that is
not older than ``audit_horizon``, whose only row can only move forward.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKey, Index, Integer, String, Table

from gateway.sql.database import UtcDateTime
from gateway.tables.core import OptionalJson, RowId, metadata

audit_events = Table(
    "audit_events",
    metadata,
    # ``audit_`` and a UUID of version 7, so newer ones sort later.
    Column("id", String(38), primary_key=True),
    Column("at", UtcDateTime, nullable=False, index=True),
    Column("origin", String(8), nullable=False),
    Column("actor", String(200), nullable=False),
    # The key that authenticated the call; NULL if it was no call.
    Column("key_id", RowId, ForeignKey("keys.id")),
    Column("act", String(40), nullable=False),
    # The account concerned; NULL if none or all are.
    Column("account_id", RowId, ForeignKey("accounts.id")),
    Column("subject", String(300), nullable=False),
    Column("before", OptionalJson),
    Column("after", OptionalJson),
    Column("reason", String(500), nullable=False, server_default=""),
    # One call or one command can record several events.
    Column("call_id", String(200), nullable=False),
    CheckConstraint("origin IN ('http', 'cli', 'system')", name="origin"),
    Index(None, "account_id", "id"),
    Index(None, "actor", "id"),
    Index(None, "act", "id"),
    Index(None, "subject", "id"),
    Index(None, "call_id", "id"),
)

audit_horizon = Table(
    "audit_horizon",
    metadata,
    # Events before this moment can be deleted. Without a row, none can.
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("deleted_before", UtcDateTime, nullable=False),
    CheckConstraint("id = 1", name="only"),
)

"""The SQL table of requests that have something in the blob store; it shares the metadata of
``gateway.tables.core``.

A row is written before the first blob of its request is, and deleted after the last one, so the
store holds nothing that no row answers for.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Column, ForeignKey, Index, LargeBinary, String, Table, false

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RequestKey, RowId, metadata

media = Table(
    "media",
    metadata,
    # No foreign key: it comes before the hold and may outlive a refusal.
    Column("request_id", RequestKey, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("task", String(40), nullable=False),
    # What was asked for, for the dialects that show it; NULL until everything has been fetched.
    Column("asked", LargeBinary),
    # Whether its owner deleted it: nobody finds it any more.
    Column("forgotten", Boolean, nullable=False, server_default=false()),
    # When to look whether it may be cleared away.
    Column("clear_at", UtcDateTime, nullable=False, index=True),
    Index(None, "account_id", "request_id"),
)

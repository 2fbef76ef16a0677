"""The SQL table of accounts' feedback on their requests; it shares the metadata of ``core``."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKey, Index, Integer, String, Table, Text

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RequestKey, RowId, metadata

feedback = Table(
    "feedback",
    metadata,
    # Of a request that has ended; its receipt can be archived, so there is no foreign key.
    Column("request_id", RequestKey, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    # Copied from the receipt, so that archived requests count as well.
    Column("model", String(200), nullable=False),
    Column("task", String(40), nullable=False),
    Column("served_by", String(200), nullable=False),
    Column("settled_at", UtcDateTime, nullable=False),
    Column("rating", Integer),
    # A sorted JSON list as text, so that equal lists can be grouped.
    Column("labels", Text, nullable=False, server_default="[]"),
    Column("comment", Text, nullable=False, server_default=""),
    Column("created_at", UtcDateTime, nullable=False),
    Column("changed_at", UtcDateTime, nullable=False),
    CheckConstraint("rating BETWEEN 1 AND 5", name="rating"),
    Index(None, "account_id", "request_id"),
    Index(None, "settled_at"),
)

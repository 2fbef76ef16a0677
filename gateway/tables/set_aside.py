"""The SQL table of notes on rows that were set aside; it shares the metadata of ``core``."""

from __future__ import annotations

from sqlalchemy import Column, Integer, String, Table, Text

from gateway.sql.database import UtcDateTime
from gateway.tables.core import metadata

set_aside = Table(
    "set_aside",
    metadata,
    Column("kind", String(16), primary_key=True),
    Column("name", String(255), primary_key=True),
    Column("reason", String(500), nullable=False),
    Column("times", Integer, nullable=False, server_default="1"),
    Column("first_at", UtcDateTime, nullable=False),
    Column("last_at", UtcDateTime, nullable=False),
    # Of a result that could not be read: what the upstream returned, as JSON.
    Column("content", Text),
)

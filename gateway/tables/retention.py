"""The SQL table of what retention has cleared; it shares the metadata of ``core``."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, String, Table

from gateway.sql.database import UtcDateTime
from gateway.tables.core import metadata

retention = Table(
    "retention",
    metadata,
    Column("kind", String(40), primary_key=True),
    # Id of the last row that was cleared, of kinds whose rows stay and lose columns only.
    Column("position", String(40)),
    # Number of rows cleared so far, and when the last ones were.
    Column("cleared", BigInteger, nullable=False, server_default="0"),
    Column("cleared_at", UtcDateTime),
)

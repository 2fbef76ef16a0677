"""The SQL table of the last use of keys; it shares the metadata of ``core``.

It is apart from ``keys``, whose rows are locked by the transactions of requests.
"""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Table

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RowId, metadata

key_uses = Table(
    "key_uses",
    metadata,
    Column("key_id", RowId, ForeignKey("keys.id"), primary_key=True, autoincrement=False),
    Column("used_at", UtcDateTime, nullable=False),
)

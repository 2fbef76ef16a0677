"""The SQL tables of what was cleared and erased; they share the metadata of ``core``.

``erasures`` is append-only. Events of the audit log about its subjects can lose their details.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, String, Table

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RowId, metadata

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

erasures = Table(
    "erasures",
    metadata,
    # An account or a user, as events of the audit log name it, and the account it belonged to.
    Column("subject", String(300), primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("at", UtcDateTime, nullable=False),
)

"""The SQL tables of webhook deliveries; they share the metadata of ``gateway.tables.core``.

A delivery is written in the transaction that settles its request. After its end it is kept for the
retention. Open deliveries have no ``ended_at``.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKey, Index, Integer, String, Table

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RequestKey, RowId, metadata

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("request_id", RequestKey, ForeignKey("receipts.request_id"), primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("url", String(2000), nullable=False),
    # Attempts since ``queued_at``, after which the delivery is given up, and attempts in total.
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("tried", Integer, nullable=False, server_default="0"),
    Column("due_at", UtcDateTime, nullable=False),
    Column("queued_at", UtcDateTime, nullable=False),
    Column("outcome", String(16)),
    Column("ended_at", UtcDateTime, index=True),
    CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name="ended"),
    CheckConstraint("outcome IN ('delivered', 'gone', 'failed')", name="outcome"),
    Index(None, "account_id", "request_id"),
    Index(None, "account_id", "outcome", "request_id"),
    Index(None, "outcome", "request_id"),
)
Index(
    "ix_webhook_deliveries_open",
    webhook_deliveries.c.account_id,
    webhook_deliveries.c.due_at,
    sqlite_where=webhook_deliveries.c.ended_at.is_(None),
    postgresql_where=webhook_deliveries.c.ended_at.is_(None),
)

webhook_attempts = Table(
    "webhook_attempts",
    metadata,
    Column(
        "request_id",
        RequestKey,
        ForeignKey("webhook_deliveries.request_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("started_at", UtcDateTime, nullable=False),
    Column("duration_ms", Integer, nullable=False),
    # HTTP status of the receiver; without one, the class of the error.
    Column("code", Integer),
    Column("error", String(32)),
    # The first characters of what the receiver answered.
    Column("answer", String(200)),
)

"""The SQL tables of payments; they share the metadata of ``gateway.tables.core``."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    String,
    Table,
    UniqueConstraint,
)

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RowId, metadata

payments = Table(
    "payments",
    metadata,
    # Payments requested from a provider; booked by one transfer once they are paid.
    Column("id", String(40), primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("provider", String(20), nullable=False),
    Column("reference", String(255), nullable=False),
    Column("intent", String(255)),
    Column("amount_nanos", BigInteger, nullable=False),
    Column("returned_nanos", BigInteger, nullable=False, server_default="0"),
    Column("status", String(16), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("transfer_id", RowId, ForeignKey("transfers.id"), index=True),
    UniqueConstraint("provider", "reference"),
    Index(None, "provider", "intent"),
    CheckConstraint("amount_nanos > 0", name="amount"),
    CheckConstraint(
        "status IN ('open', 'paid', 'expired', 'failed', 'refunded', 'disputed')", name="status"
    ),
)

payment_events = Table(
    "payment_events",
    metadata,
    Column("provider", String(20), primary_key=True),
    Column("event_id", String(255), primary_key=True),
    Column("kind", String(80), nullable=False),
    Column("received_at", UtcDateTime, nullable=False),
)

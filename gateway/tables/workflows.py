"""The SQL tables of workflows; they share the metadata of ``gateway.tables.core``.

``steps`` has a row for each attempt of a step of an open request, written before it is queued; its
result is added later. When the request is closed, its rows are replaced by ``receipt_steps``, which
is append-only; a step that is still running keeps its row until it has been stopped.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Integer,
    LargeBinary,
    String,
    Table,
)

from gateway.sql.database import UtcDateTime
from gateway.tables.core import OptionalJson, RequestKey, RowId, metadata

steps = Table(
    "steps",
    metadata,
    # No foreign key: the row of a running step is kept longer than the hold.
    Column("request_id", RequestKey, primary_key=True),
    Column("name", String(40), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("model", String(200), nullable=False),
    Column("job", LargeBinary, nullable=False),
    Column("placed_at", UtcDateTime, nullable=False),
    # NULL until the attempt has ended; so are all following columns.
    Column("status", String(16)),
    Column("ended_at", UtcDateTime),
    Column("error", OptionalJson),
    Column("usage", OptionalJson),
    Column("timings", OptionalJson),
    Column("output", LargeBinary),
    CheckConstraint("status IN ('succeeded', 'failed', 'cancelled', 'expired')", name="status"),
)

receipt_steps = Table(
    "receipt_steps",
    metadata,
    Column("request_id", RequestKey, ForeignKey("receipts.request_id"), primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("name", String(40), nullable=False),
    Column("model", String(200), nullable=False),
    Column("task", String(40), nullable=False),
    Column("price_id", RowId, ForeignKey("prices.id"), nullable=False),
    Column("status", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("charge_nanos", BigInteger, nullable=False),
    Column("usage", JSON, nullable=False),
    Column("timings", JSON, nullable=False),
    Column("error", OptionalJson),
    Column("placed_at", UtcDateTime),
    Column("ended_at", UtcDateTime),
    CheckConstraint("charge_nanos >= 0", name="charge"),
    CheckConstraint("charge_nanos = 0 OR status = 'succeeded'", name="charged"),
    CheckConstraint(
        "status IN ('succeeded', 'failed', 'cancelled', 'expired', 'stopped', 'not_run')",
        name="status",
    ),
)

"""The SQL tables of usage: sums by minute, hour and day, and when a key was last used.

They share the metadata of ``core``. Hours and days are sealed and kept. Minutes are those since the
last sealed hour, so that a report reads few receipts; an hour is built from them.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Column, ForeignKey, Index, String, Table

from gateway.sql.database import UtcDateTime
from gateway.tables.core import QUANTITIES, RowId, metadata

BOOKED_SUMS: Final = ("requests", "charge_nanos", "refund_nanos", *QUANTITIES)
"""Sums of ``usage_hourly`` that its seals cover."""

USAGE_SUMS: Final = (*BOOKED_SUMS, "expense_nanos", "expensed")
"""All sums. The last two are the cost to the operator, and of how many requests it is known."""


def _cell(span: str, *further: str) -> list[Column[Any]]:
    """Return the primary key of sums: account, start of the span, further numbers, model, task and
    outcome."""
    return [
        Column("account_id", RowId, primary_key=True, autoincrement=False),
        Column(span, UtcDateTime, primary_key=True),
        *(Column(name, RowId, primary_key=True, autoincrement=False) for name in further),
        Column("model", String(200), primary_key=True),
        Column("task", String(40), primary_key=True),
        Column("outcome", String(16), primary_key=True),
    ]


usage_minutes = Table(
    "usage_minutes",
    metadata,
    Column("minute", UtcDateTime, primary_key=True),
    Column("built_at", UtcDateTime, nullable=False),
)

usage_minutely = Table(
    "usage_minutely",
    metadata,
    *_cell("minute", "key_id"),
    *(Column(name, BigInteger, nullable=False) for name in USAGE_SUMS),
    Index(None, "minute"),
)

usage_hours = Table(
    "usage_hours",
    metadata,
    Column("hour", UtcDateTime, primary_key=True),
    Column("rows", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("charge_nanos", BigInteger, nullable=False),
    Column("refund_nanos", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("built_at", UtcDateTime, nullable=False),
)

usage_hourly = Table(
    "usage_hourly",
    metadata,
    *_cell("hour", "key_id"),
    *(Column(name, BigInteger, nullable=False) for name in BOOKED_SUMS),
    Column("expense_nanos", BigInteger, nullable=False, server_default="0"),
    Column("expensed", BigInteger, nullable=False, server_default="0"),
    Index(None, "hour", "model"),
    Index(None, "key_id", "hour"),
)

usage_days = Table(
    "usage_days",
    metadata,
    Column("day", UtcDateTime, primary_key=True),
    Column("rows", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("built_at", UtcDateTime, nullable=False),
)

usage_daily = Table(
    "usage_daily",
    metadata,
    # 0: of all accounts together.
    *_cell("day"),
    *(Column(name, BigInteger, nullable=False) for name in USAGE_SUMS),
    Index(None, "day", "model"),
)

# Apart from ``keys``, whose rows are locked by the transactions of requests.
key_uses = Table(
    "key_uses",
    metadata,
    Column("key_id", RowId, ForeignKey("keys.id"), primary_key=True, autoincrement=False),
    Column("used_at", UtcDateTime, nullable=False),
)

"""The SQL tables beside ``price_periods``; they share the metadata of ``gateway.tables.core``.

``price_version`` has one row. Triggers increment it with every row inserted into
``price_periods``, ``cancelled_prices`` or ``batch_discounts``, so that a gateway learns from one
row whether its prices and discounts are current. The writer locks the row until it commits, so a
version that can be read covers all changes up to it. The row also tells how often a catalog was
loaded by somebody, and the digest of the last one, so that every gateway loads it.

``price_changes`` is a journal, written by the same triggers: the models and accounts whose prices
a version has changed. A changed discount is a change of the model's list price. Old rows are
deleted.

``cancelled_prices`` is append-only. A period with a row there has no effect.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKeyConstraint,
    Integer,
    String,
    Table,
)

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RowId, metadata

ONLY: Final = 1
"""Id of the only row of ``price_version``."""

price_version = Table(
    "price_version",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False, server_default="0"),
    Column("catalog_loads", BigInteger, nullable=False, server_default="0"),
    Column("catalog_sha256", String(64), nullable=False, server_default=""),
    CheckConstraint("id = 1", name="only"),
)

price_changes = Table(
    "price_changes",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("model", String(200), primary_key=True),
    Column("account_id", RowId, primary_key=True, autoincrement=False),
)

cancelled_prices = Table(
    "cancelled_prices",
    metadata,
    Column("model", String(200), primary_key=True),
    Column("account_id", RowId, primary_key=True, autoincrement=False),
    Column("effective_from", UtcDateTime, primary_key=True),
    Column("cancelled_at", UtcDateTime, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("reason", String(500), nullable=False),
    ForeignKeyConstraint(
        ["model", "account_id", "effective_from"],
        ["price_periods.model", "price_periods.account_id", "price_periods.effective_from"],
        name="fk_cancelled_prices_period",
    ),
    CheckConstraint("cancelled_at < effective_from", name="ahead"),
)

"""The SQL tables of invoices and rebates; they share the metadata of ``core``."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
)

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RowId, metadata

rebates = Table(
    "rebates",
    metadata,
    # Share of a month's spending above ``from_nanos`` that is refunded; account 0: the default.
    Column("account_id", RowId, primary_key=True, autoincrement=False),
    Column("from_nanos", BigInteger, primary_key=True, autoincrement=False),
    Column("basis_points", Integer, nullable=False),
    CheckConstraint("from_nanos >= 0", name="from"),
    CheckConstraint("basis_points >= 0 AND basis_points <= 10000", name="basis_points"),
)

invoices = Table(
    "invoices",
    metadata,
    # Final; corrected by credit notes. ``carried_in`` + lines = total in cents + ``carried_out``.
    Column("id", RowId, primary_key=True),
    Column("number", String(40), nullable=False, unique=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("month", String(7), nullable=False),
    Column("corrects", RowId, ForeignKey("invoices.id")),
    Column("total_cents", BigInteger, nullable=False),
    Column("carried_in_nanos", BigInteger, nullable=False),
    Column("carried_out_nanos", BigInteger, nullable=False),
    Column("opening_nanos", BigInteger, nullable=False),
    Column("closing_nanos", BigInteger, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("reason", String(500), nullable=False, server_default=""),
    Column("issued_at", UtcDateTime, nullable=False),
    CheckConstraint("kind IN ('invoice', 'credit_note')", name="kind"),
    Index(None, "account_id", "month"),
)

invoice_lines = Table(
    "invoice_lines",
    metadata,
    Column("invoice_id", RowId, ForeignKey("invoices.id"), primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("kind", String(16), nullable=False),
    Column("model", String(200)),
    Column("unit", String(32)),
    Column("quantity", String(64)),
    Column("description", String(500), nullable=False, server_default=""),
    Column("amount_nanos", BigInteger, nullable=False),
)

counters = Table(
    "counters",
    metadata,
    # Numbers without gaps, taken under the row's lock in the transaction that uses them.
    Column("name", String(40), primary_key=True),
    Column("value", BigInteger, nullable=False),
)

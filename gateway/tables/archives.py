"""The SQL tables of archived months; they share the metadata of ``gateway.tables.core``.

A row of ``archives`` says that the receipts and charges of a sealed month are in files. What was
removed from the ledger is carried by the other three tables, in the transaction that removes it, so
every balance and every sum is complete at any moment. Triggers allow the deletion of a receipt, its
steps and its charge only while the archive of their month has the state ``removing``, which only a
verified archive of the month's own seal can reach.

No foreign key refers to accounts or keys: it would lock rows that requests lock, and neither is
ever deleted.
"""

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
from gateway.tables.core import OptionalJson, RequestKey, RowId, metadata

archives = Table(
    "archives",
    metadata,
    Column("month", String(7), ForeignKey("periods.month"), primary_key=True),
    Column("state", String(16), nullable=False),
    # Part of the keys of its files: an attempt never overwrites the files of another.
    Column("nonce", String(32), nullable=False),
    # The seal of the month.
    Column("sha256", String(64), nullable=False),
    Column("manifest", OptionalJson),
    # The first and the last request in its files.
    Column("first_id", RequestKey),
    Column("last_id", RequestKey),
    # What is in the files only.
    Column("removed_receipts", BigInteger, nullable=False, server_default="0"),
    Column("removed_transfers", BigInteger, nullable=False, server_default="0"),
    Column("removed_nanos", BigInteger, nullable=False, server_default="0"),
    Column("changed_at", UtcDateTime, nullable=False),
    CheckConstraint(
        "state IN ('writing', 'verified', 'removing', 'removed', 'restoring')", name="state"
    ),
    CheckConstraint(
        "removed_receipts >= 0 AND removed_transfers >= 0 AND removed_nanos >= 0", name="removed"
    ),
)

archived_charges = Table(
    "archived_charges",
    metadata,
    # Consecutive charges of an account that were removed: one entry in place of their transfers.
    Column("account_id", RowId, primary_key=True, autoincrement=False),
    # Versions of the account after the first and the last of them, as in ``transfers``.
    Column("first_version", BigInteger, primary_key=True, autoincrement=False),
    Column("last_version", BigInteger, nullable=False),
    Column("month", String(7), ForeignKey("archives.month"), nullable=False, index=True),
    # The last of them.
    Column("transfer_id", RowId, nullable=False, unique=True),
    Column("booked_at", UtcDateTime, nullable=False),
    Column("posted_after", BigInteger, nullable=False),
    Column("transfers", Integer, nullable=False),
    Column("requests", Integer, nullable=False),
    Column("amount_nanos", BigInteger, nullable=False),
    # The part of the amount whose transfers are in the ledger again.
    Column("returned_nanos", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("first_version <= last_version", name="versions"),
    CheckConstraint("returned_nanos >= 0 AND returned_nanos <= amount_nanos", name="returned"),
    Index(None, "account_id", "transfer_id"),
)

archived_spending = Table(
    "archived_spending",
    metadata,
    # Charges of removed receipts, by key.
    Column("month", String(7), ForeignKey("archives.month"), primary_key=True),
    Column("key_id", RowId, primary_key=True, autoincrement=False),
    Column("charge_nanos", BigInteger, nullable=False),
    CheckConstraint("charge_nanos >= 0", name="charge"),
)

archived_windows = Table(
    "archived_windows",
    metadata,
    # Charges of removed receipts, by budget window.
    Column("month", String(7), ForeignKey("archives.month"), primary_key=True),
    Column("budget_id", RowId, primary_key=True, autoincrement=False),
    Column("starts_us", BigInteger, primary_key=True, autoincrement=False),
    Column("charge_nanos", BigInteger, nullable=False),
    CheckConstraint("charge_nanos >= 0", name="charge"),
)

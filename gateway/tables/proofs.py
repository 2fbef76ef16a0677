"""The SQL tables of the nightly proof; they share the metadata of ``gateway.tables.core``.

The sums with which a closed month was proven, account by account. The next proof starts from them
and reads later rows only. Nothing else depends on them: without a row, an account is proven from
its beginning. The findings of the last proofs are in ``reconciliations``.

No foreign key refers to accounts or keys: it would lock rows that requests lock, and neither is
ever deleted.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Index, String, Table

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RowId, metadata

proven_accounts = Table(
    "proven_accounts",
    metadata,
    # An account's ledger up to the end of a closed month: the last of its transfers before the
    # first of a later month, and the balance after it.
    Column("account_id", RowId, primary_key=True, autoincrement=False),
    Column("month", String(7), nullable=False),
    Column("transfer_id", RowId, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("posted_nanos", BigInteger, nullable=False),
    # Later transfers were booked at this moment or later. With clocks that differ, it can be in
    # the month itself.
    Column("booked_since", UtcDateTime, nullable=False),
)

proven_keys = Table(
    "proven_keys",
    metadata,
    # A key's charges less refunds, up to the end of its account's month.
    Column("key_id", RowId, primary_key=True, autoincrement=False),
    Column("account_id", RowId, nullable=False, index=True),
    Column("spent_nanos", BigInteger, nullable=False),
)

proven_windows = Table(
    "proven_windows",
    metadata,
    # An account's charges less refunds in a budget window, likewise.
    Column("account_id", RowId, primary_key=True, autoincrement=False),
    Column("budget_id", RowId, primary_key=True, autoincrement=False),
    Column("starts_us", BigInteger, primary_key=True, autoincrement=False),
    Column("spent_nanos", BigInteger, nullable=False),
    Index(None, "account_id", "starts_us"),
)

proven_months = Table(
    "proven_months",
    metadata,
    # When the rows of a closed month were last compared with its seal, and whether they agreed.
    Column("month", String(7), primary_key=True),
    Column("read_at", UtcDateTime, nullable=False),
    Column("agrees", Boolean, nullable=False),
)

reconciliations = Table(
    "reconciliations",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("started_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime, nullable=False),
    Column("findings", JSON, nullable=False),
)

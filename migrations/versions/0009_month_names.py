"""Months of the books have the name of a month; rows that a typing error left are deleted.

Revision: 0009
"""

from __future__ import annotations

import re

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

MONTH = "month LIKE '20__-__' AND substr(month, 6) BETWEEN '01' AND '12'"
NAME = re.compile(r"20[0-9]{2}-(?:0[1-9]|1[0-2])", re.ASCII)


def upgrade() -> None:
    # Such a row never held a receipt: what is booked goes by the clock, which names real months.
    connection = op.get_bind()
    for month in connection.execute(sa.text("SELECT month FROM periods")).scalars().all():
        if not NAME.fullmatch(month):
            connection.execute(
                sa.text("DELETE FROM periods WHERE month = :month"), {"month": month}
            )
    if connection.dialect.name == "postgresql":
        op.create_check_constraint(op.f("ck_periods_month"), "periods", MONTH)
        return
    # SQLite cannot add a constraint to a table: make it anew.
    op.rename_table("periods", "periods_0002")
    op.create_table(
        "periods",
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("state", sa.String(8), server_default="open", nullable=False),
        sa.Column("closed_at", UtcDateTime(), nullable=True),
        sa.Column("receipts", sa.BigInteger(), nullable=True),
        sa.Column("charge_nanos", sa.BigInteger(), nullable=True),
        sa.Column("transfers", sa.BigInteger(), nullable=True),
        sa.Column("sha256", sa.String(64), nullable=True),
        sa.CheckConstraint("state IN ('open', 'closing', 'closed')", name=op.f("ck_periods_state")),
        sa.CheckConstraint(MONTH, name=op.f("ck_periods_month")),
        sa.PrimaryKeyConstraint("month", name=op.f("pk_periods")),
    )
    columns = "month, state, closed_at, receipts, charge_nanos, transfers, sha256"
    op.execute(f"INSERT INTO periods ({columns}) SELECT {columns} FROM periods_0002")
    op.drop_table("periods_0002")


def downgrade() -> None:
    raise RuntimeError("a ledger is not downgraded; restore a backup instead")

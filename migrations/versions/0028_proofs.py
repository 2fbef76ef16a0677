"""The nightly proof: the sums at the end of each account's proven months.

Revision: 0028
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "proven_accounts",
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("transfer_id", ROW_ID, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("posted_nanos", sa.BigInteger(), nullable=False),
        sa.Column("booked_since", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("account_id", name=op.f("pk_proven_accounts")),
    )
    op.create_table(
        "proven_keys",
        sa.Column("key_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("spent_nanos", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_proven_keys")),
    )
    op.create_index(op.f("ix_proven_keys_account_id"), "proven_keys", ["account_id"])
    op.create_table(
        "proven_windows",
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("budget_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("starts_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("spent_nanos", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "account_id", "budget_id", "starts_us", name=op.f("pk_proven_windows")
        ),
    )
    op.create_index(
        op.f("ix_proven_windows_account_id_starts_us"),
        "proven_windows",
        ["account_id", "starts_us"],
    )
    op.create_table(
        "proven_months",
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("read_at", UtcDateTime(), nullable=False),
        sa.Column("agrees", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("month", name=op.f("pk_proven_months")),
    )


def downgrade() -> None:
    for name in ("proven_months", "proven_windows", "proven_keys", "proven_accounts"):
        op.drop_table(name)

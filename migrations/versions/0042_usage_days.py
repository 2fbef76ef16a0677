"""Usage by day: sums of the sealed hours of a day, by account and of all accounts.

A running gateway builds the days of earlier hours.

Revision: 0042
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
CELL = ("account_id", "day", "model", "task", "outcome")
SUMS = (
    *("requests", "charge_nanos", "refund_nanos", "input_tokens", "cached_input_tokens"),
    *("output_tokens", "images", "video_ms", "audio_ms", "characters", "steps", "gpu_us"),
    *("expense_nanos", "expensed"),
)


def upgrade() -> None:
    op.create_table(
        "usage_days",
        sa.Column("day", UtcDateTime(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("built_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("day", name=op.f("pk_usage_days")),
    )
    op.create_table(
        "usage_daily",
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("day", UtcDateTime(), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("task", sa.String(length=40), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMS),
        sa.PrimaryKeyConstraint(*CELL, name=op.f("pk_usage_daily")),
    )
    op.create_index(op.f("ix_usage_daily_day_model"), "usage_daily", ["day", "model"])


def downgrade() -> None:
    op.drop_table("usage_daily")
    op.drop_table("usage_days")

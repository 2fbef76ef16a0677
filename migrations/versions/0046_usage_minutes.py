"""Usage by minute, since the last sealed hour.

A running gateway builds them. Without a minute a report reads receipts, as before.

Revision: 0046
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0046"
down_revision = "0045"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
CELL = ("account_id", "minute", "key_id", "model", "task", "outcome")
SUMS = (
    *("requests", "charge_nanos", "refund_nanos", "input_tokens", "cached_input_tokens"),
    *("output_tokens", "images", "video_ms", "audio_ms", "characters", "steps", "gpu_us"),
    *("expense_nanos", "expensed"),
)


def upgrade() -> None:
    op.create_table(
        "usage_minutes",
        sa.Column("minute", UtcDateTime(), nullable=False),
        sa.Column("built_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("minute", name=op.f("pk_usage_minutes")),
    )
    op.create_table(
        "usage_minutely",
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("minute", UtcDateTime(), nullable=False),
        sa.Column("key_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("task", sa.String(length=40), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMS),
        sa.PrimaryKeyConstraint(*CELL, name=op.f("pk_usage_minutely")),
    )
    op.create_index(op.f("ix_usage_minutely_minute"), "usage_minutely", ["minute"])


def downgrade() -> None:
    op.drop_table("usage_minutely")
    op.drop_table("usage_minutes")

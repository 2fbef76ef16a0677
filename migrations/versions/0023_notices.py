"""Notices: subscriptions, what was told, its deliveries and their attempts.

Revision: 0023
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "notice_subscriptions",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("url", sa.String(length=2000), nullable=False),
        sa.Column("kinds", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notice_subscriptions")),
        sa.UniqueConstraint(
            "account_id", "url", name=op.f("uq_notice_subscriptions_account_id_url")
        ),
    )
    op.create_table(
        "notices",
        sa.Column("id", sa.String(length=39), nullable=False),
        sa.Column("key", sa.String(length=400), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("subject", sa.String(length=300), nullable=False),
        sa.Column("title", sa.String(length=400), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("lasting", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notices")),
        sa.UniqueConstraint("key", name=op.f("uq_notices_key")),
    )
    op.create_index(
        "ix_notices_ending",
        "notices",
        ["created_at"],
        sqlite_where=sa.text("lasting = 0"),
        postgresql_where=sa.text("NOT lasting"),
    )
    op.create_index(op.f("ix_notices_account_id_id"), "notices", ["account_id", "id"])
    op.create_index(op.f("ix_notices_kind_id"), "notices", ["kind", "id"])
    op.create_table(
        "notice_deliveries",
        sa.Column("id", sa.String(length=39), nullable=False),
        sa.Column("notice_id", sa.String(length=39), nullable=False),
        sa.Column("subscription_id", ROW_ID, nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("url", sa.String(length=2000), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("tried", sa.Integer(), server_default="0", nullable=False),
        sa.Column("due_at", UtcDateTime(), nullable=False),
        sa.Column("queued_at", UtcDateTime(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint(
            "(outcome IS NULL) = (ended_at IS NULL)", name=op.f("ck_notice_deliveries_ended")
        ),
        sa.CheckConstraint(
            "outcome IN ('delivered', 'gone', 'failed')", name=op.f("ck_notice_deliveries_outcome")
        ),
        sa.ForeignKeyConstraint(
            ["notice_id"],
            ["notices.id"],
            name=op.f("fk_notice_deliveries_notice_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notice_deliveries")),
    )
    op.create_index(op.f("ix_notice_deliveries_notice_id"), "notice_deliveries", ["notice_id"])
    op.create_index(
        op.f("ix_notice_deliveries_subscription_id"), "notice_deliveries", ["subscription_id"]
    )
    op.create_index(
        "ix_notice_deliveries_open",
        "notice_deliveries",
        ["account_id", "due_at"],
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_table(
        "notice_attempts",
        sa.Column("delivery_id", sa.String(length=39), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=False),
        sa.Column("duration_ms", sa.Integer(), nullable=False),
        sa.Column("code", sa.Integer(), nullable=True),
        sa.Column("error", sa.String(length=32), nullable=True),
        sa.ForeignKeyConstraint(
            ["delivery_id"],
            ["notice_deliveries.id"],
            name=op.f("fk_notice_attempts_delivery_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("delivery_id", "number", name=op.f("pk_notice_attempts")),
    )
    op.create_index(
        "ix_keys_expiring",
        "keys",
        ["account_id", "expires_at"],
        sqlite_where=sa.text("expires_at IS NOT NULL"),
        postgresql_where=sa.text("expires_at IS NOT NULL"),
    )

"""Webhook deliveries are kept after their end, with their attempts.

Revision: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

OPEN = sa.text("ended_at IS NULL")


def upgrade() -> None:
    op.drop_index(op.f("ix_webhook_deliveries_due_at"), table_name="webhook_deliveries")
    for column in (
        sa.Column("tried", sa.Integer(), server_default="0", nullable=False),
        sa.Column("queued_at", UtcDateTime(), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
    ):
        op.add_column("webhook_deliveries", column)
    # The open ones: their attempts were counted, but not kept.
    op.execute("UPDATE webhook_deliveries SET queued_at = due_at, tried = attempts")
    with op.batch_alter_table("webhook_deliveries") as deliveries:
        deliveries.alter_column("queued_at", existing_type=UtcDateTime(), nullable=False)
        deliveries.create_check_constraint(
            op.f("ck_webhook_deliveries_ended"), "(outcome IS NULL) = (ended_at IS NULL)"
        )
        deliveries.create_check_constraint(
            op.f("ck_webhook_deliveries_outcome"), "outcome IN ('delivered', 'gone', 'failed')"
        )
    for columns in (
        ["account_id", "request_id"],
        ["account_id", "outcome", "request_id"],
        ["outcome", "request_id"],
        ["ended_at"],
    ):
        name = op.f(f"ix_webhook_deliveries_{'_'.join(columns)}")
        op.create_index(name, "webhook_deliveries", columns, unique=False)
    op.create_index(
        op.f("ix_webhook_deliveries_open"),
        "webhook_deliveries",
        ["account_id", "due_at"],
        unique=False,
        sqlite_where=OPEN,
        postgresql_where=OPEN,
    )
    op.create_table(
        "webhook_attempts",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=False),
        sa.Column("duration_ms", sa.Integer(), nullable=False),
        sa.Column("code", sa.Integer(), nullable=True),
        sa.Column("error", sa.String(length=32), nullable=True),
        sa.ForeignKeyConstraint(
            ["request_id"],
            ["webhook_deliveries.request_id"],
            name=op.f("fk_webhook_attempts_request_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("request_id", "number", name=op.f("pk_webhook_attempts")),
    )

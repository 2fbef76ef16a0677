"""Feedback of accounts on their requests.

Revision: 0032
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "feedback",
        sa.Column("request_id", sa.String(36), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("task", sa.String(40), nullable=False),
        sa.Column("served_by", sa.String(200), nullable=False),
        sa.Column("settled_at", UtcDateTime(), nullable=False),
        sa.Column("rating", sa.Integer(), nullable=True),
        sa.Column("labels", sa.Text(), server_default="[]", nullable=False),
        sa.Column("comment", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("changed_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint("rating BETWEEN 1 AND 5", name=op.f("ck_feedback_rating")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_feedback_account_id_accounts")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_feedback")),
    )
    op.create_index(
        op.f("ix_feedback_account_id_request_id"), "feedback", ["account_id", "request_id"]
    )
    op.create_index(op.f("ix_feedback_settled_at"), "feedback", ["settled_at"])


def downgrade() -> None:
    op.drop_table("feedback")

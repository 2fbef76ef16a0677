"""Sight of prompts and outputs that owners give to operators, and what operators asked for.

Revision: 0038
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "content_grants",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("reason", sa.String(length=500), nullable=False),
        sa.Column("starts_at", UtcDateTime(), nullable=False),
        sa.Column("ends_at", UtcDateTime(), nullable=False),
        sa.Column("ended_by", sa.String(length=200), nullable=True),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_content_grants_account_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_content_grants")),
    )
    op.create_index(op.f("ix_content_grants_account_id"), "content_grants", ["account_id"])
    op.create_index(op.f("ix_content_grants_ends_at"), "content_grants", ["ends_at"])
    op.create_table(
        "content_asks",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=True),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("reason", sa.String(length=500), nullable=False),
        sa.Column("asked_at", UtcDateTime(), nullable=False),
        sa.Column("ends_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_content_asks_account_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_content_asks")),
    )
    op.create_index(op.f("ix_content_asks_account_id"), "content_asks", ["account_id"])


def downgrade() -> None:
    op.drop_table("content_asks")
    op.drop_table("content_grants")

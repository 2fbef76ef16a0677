"""Jobs of the console: work that a page has started, with its progress and its result.

Revision: 0041
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "console_jobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("starter", sa.String(length=200), nullable=False),
        sa.Column("act", sa.String(length=32), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=True),
        sa.Column("back", sa.String(length=4000), nullable=False),
        sa.Column("state", sa.String(length=12), server_default="running", nullable=False),
        sa.Column("done", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=True),
        sa.Column("can_cancel", sa.Boolean(), nullable=False),
        sa.Column("cancelling", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("problem", sa.String(length=1000), server_default="", nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=False),
        sa.Column("seen_at", UtcDateTime(), nullable=False),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint(
            "state IN ('running', 'done', 'failed', 'cancelled')",
            name=op.f("ck_console_jobs_state"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_console_jobs")),
    )
    op.create_index(op.f("ix_console_jobs_kind_digest"), "console_jobs", ["kind", "digest"])
    running = sa.text("state = 'running'")
    op.create_index(
        "uq_console_jobs_running",
        "console_jobs",
        ["kind", "digest"],
        unique=True,
        sqlite_where=running,
        postgresql_where=running,
    )
    op.create_index(op.f("ix_console_jobs_started_at"), "console_jobs", ["started_at"])


def downgrade() -> None:
    op.drop_table("console_jobs")

"""Bounds of an account's files, and room that is reserved for those that arrive.

Revision: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "storage_limits",
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("files_max", sa.BigInteger(), nullable=True),
        sa.Column("bytes_max", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_storage_limits_account_id")
        ),
        sa.PrimaryKeyConstraint("account_id", name=op.f("pk_storage_limits")),
    )
    op.create_table(
        "file_reservations",
        sa.Column("file_id", sa.String(length=40), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_file_reservations_account_id")
        ),
        sa.PrimaryKeyConstraint("file_id", name=op.f("pk_file_reservations")),
    )
    op.create_index(
        op.f("ix_file_reservations_account_id"), "file_reservations", ["account_id"], unique=False
    )
    # The sum of an account's bytes is read from the index alone.
    op.create_index(
        op.f("ix_files_account_id_bytes"), "files", ["account_id", "bytes"], unique=False
    )

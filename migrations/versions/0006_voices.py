"""Voices of accounts and the consents that they were made with.

Revision: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
NAMED = sa.text("clear_at IS NULL AND consent_id IS NOT NULL")


def upgrade() -> None:
    op.create_table(
        "voice_recordings",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("consent_id", sa.String(length=40), nullable=True),
        sa.Column("language", sa.String(length=35), nullable=True),
        sa.Column("transcript", sa.Text(), server_default="", nullable=False),
        sa.Column("description", sa.Text(), server_default="", nullable=False),
        sa.Column("blob_key", sa.String(length=400), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=True),
        sa.Column("sha256", sa.String(length=64), nullable=True),
        sa.Column("content_type", sa.String(length=100), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("clear_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint(
            "(consent_id IS NULL) <> (language IS NULL)", name=op.f("ck_voice_recordings_kind")
        ),
        sa.CheckConstraint(
            "clear_at IS NOT NULL OR blob_key IS NOT NULL", name=op.f("ck_voice_recordings_stored")
        ),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_voice_recordings_account_id")
        ),
        sa.ForeignKeyConstraint(
            ["consent_id"], ["voice_recordings.id"], name=op.f("fk_voice_recordings_consent_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_voice_recordings")),
    )
    for columns in (["account_id", "id"], ["consent_id"], ["clear_at"]):
        name = op.f(f"ix_voice_recordings_{'_'.join(columns)}")
        op.create_index(name, "voice_recordings", columns, unique=False)
    op.create_index(
        op.f("uq_voice_recordings_name"),
        "voice_recordings",
        ["account_id", "name"],
        unique=True,
        sqlite_where=NAMED,
        postgresql_where=NAMED,
    )

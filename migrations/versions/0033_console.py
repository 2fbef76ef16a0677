"""Sessions of the console, and the one-time links by which people enter it.

Revision: 0033
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("token_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("user_id", ROW_ID, nullable=True),
        sa.Column("key_id", ROW_ID, nullable=True),
        sa.Column("method", sa.String(length=8), nullable=False),
        sa.Column("csrf", sa.LargeBinary(length=32), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("seen_at", UtcDateTime(), nullable=False),
        sa.Column("proved_at", UtcDateTime(), nullable=False),
        sa.Column("ends_at", UtcDateTime(), nullable=False),
        sa.Column("revoked_at", UtcDateTime(), nullable=True),
        sa.Column("refused_at", UtcDateTime(), nullable=True),
        sa.Column("lasting", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("network", sa.String(length=64), nullable=False),
        sa.Column("agent", sa.String(length=200), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=True),
        sa.Column("zone", sa.String(length=64), nullable=True),
        sa.Column("theme", sa.String(length=8), server_default="system", nullable=False),
        sa.Column("pending", sa.JSON(none_as_null=True), nullable=True),
        sa.CheckConstraint(
            "(user_id IS NULL) <> (key_id IS NULL)", name=op.f("ck_sessions_visitor")
        ),
        sa.CheckConstraint("method IN ('link', 'key', 'oidc')", name=op.f("ck_sessions_method")),
        sa.CheckConstraint("theme IN ('system', 'light', 'dark')", name=op.f("ck_sessions_theme")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_sessions_user_id")),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_sessions_key_id")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_sessions_account_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_sessions_token_hash")),
    )
    for column in ("user_id", "key_id", "ends_at"):
        op.create_index(op.f(f"ix_sessions_{column}"), "sessions", [column])
    op.create_table(
        "login_links",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("token_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("code_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("user_id", ROW_ID, nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("ends_at", UtcDateTime(), nullable=False),
        sa.Column("used_at", UtcDateTime(), nullable=True),
        sa.Column("wrong_codes", sa.Integer(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_login_links_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_login_links")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_login_links_token_hash")),
    )
    for column in ("code_hash", "user_id", "ends_at"):
        op.create_index(op.f(f"ix_login_links_{column}"), "login_links", [column])


def downgrade() -> None:
    op.drop_table("login_links")
    op.drop_table("sessions")

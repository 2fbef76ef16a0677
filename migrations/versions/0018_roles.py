"""Users, members of accounts, and the roles of administrators' keys.

Revision: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        # SQLite adds a column with its CHECK in one statement only.
        op.execute(
            "ALTER TABLE keys ADD COLUMN role VARCHAR(16) "
            "CONSTRAINT ck_keys_role CHECK (role IN ('operator', 'finance', 'auditor'))"
        )
    else:
        op.add_column("keys", sa.Column("role", sa.String(length=16), nullable=True))
        op.create_check_constraint(
            op.f("ck_keys_role"), "keys", "role IN ('operator', 'finance', 'auditor')"
        )
    # Until now, every administrator could do everything.
    op.execute("UPDATE keys SET role = 'operator' WHERE CAST(scopes AS TEXT) LIKE '%\"admin\"%'")
    op.create_table(
        "users",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("email", sa.String(length=320), nullable=True),
        sa.Column("issuer", sa.String(length=500), nullable=True),
        sa.Column("subject", sa.String(length=255), nullable=True),
        sa.Column("role", sa.String(length=16), nullable=True),
        sa.Column("status", sa.String(length=16), server_default="active", nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("last_login_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint(
            "role IN ('operator', 'finance', 'auditor')", name=op.f("ck_users_role")
        ),
        sa.CheckConstraint("status IN ('active', 'disabled')", name=op.f("ck_users_status")),
        sa.CheckConstraint("(issuer IS NULL) = (subject IS NULL)", name=op.f("ck_users_identity")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email", name=op.f("uq_users_email")),
        sa.UniqueConstraint("issuer", "subject", name=op.f("uq_users_issuer_subject")),
    )
    op.create_table(
        "members",
        sa.Column("user_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.CheckConstraint("role IN ('owner', 'member', 'viewer')", name=op.f("ck_members_role")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_members_user_id")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_members_account_id")
        ),
        sa.PrimaryKeyConstraint("user_id", "account_id", name=op.f("pk_members")),
    )
    op.create_index(op.f("ix_members_account_id"), "members", ["account_id"])

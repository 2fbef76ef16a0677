"""Keys of members, with their role in the account.

Revision: 0025
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ROLES = "member_role IN ('owner', 'member', 'viewer')"
MEMBER = "(user_id IS NULL) = (member_role IS NULL)"


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        # SQLite adds a column with its reference and CHECK in one statement only.
        op.execute("ALTER TABLE keys ADD COLUMN user_id INTEGER REFERENCES users (id)")
        op.execute(
            "ALTER TABLE keys ADD COLUMN member_role VARCHAR(16) "
            f"CONSTRAINT ck_keys_member_role CHECK ({ROLES}) "
            f"CONSTRAINT ck_keys_member CHECK ({MEMBER})"
        )
    else:
        op.add_column("keys", sa.Column("user_id", ROW_ID, nullable=True))
        op.add_column("keys", sa.Column("member_role", sa.String(length=16), nullable=True))
        op.create_foreign_key(op.f("fk_keys_user_id"), "keys", "users", ["user_id"], ["id"])
        op.create_check_constraint(op.f("ck_keys_member_role"), "keys", ROLES)
        op.create_check_constraint(op.f("ck_keys_member"), "keys", MEMBER)
    op.create_index(op.f("ix_keys_user_id"), "keys", ["user_id"])

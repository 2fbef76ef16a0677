"""Keys that are limited to models, that replace others, and their last use.

Revision: 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("keys", sa.Column("models", sa.JSON(none_as_null=True), nullable=True))
    if op.get_bind().dialect.name == "sqlite":
        # SQLite adds a column with its reference in one statement only.
        op.execute("ALTER TABLE keys ADD COLUMN replaces INTEGER REFERENCES keys (id)")
    else:
        op.add_column("keys", sa.Column("replaces", ROW_ID, nullable=True))
        op.create_foreign_key(op.f("fk_keys_replaces"), "keys", "keys", ["replaces"], ["id"])
    op.create_index(op.f("ix_keys_replaces"), "keys", ["replaces"])
    op.create_table(
        "key_uses",
        sa.Column("key_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("used_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_key_uses_key_id")),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_key_uses")),
    )

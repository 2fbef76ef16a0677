"""What retention has cleared; receipts can lose their metadata and the text of their error.

Every other column of a receipt and of its steps stays append-only, and so do their rows.

Revision: 0020
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

PERSONAL = {"receipts": ("metadata", "error"), "receipt_steps": ("error",)}
"""Columns that can be set to NULL. None of them is part of a month's seal."""


def upgrade() -> None:
    op.create_table(
        "retention",
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("position", sa.String(length=40), nullable=True),
        sa.Column("cleared", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cleared_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("kind", name=op.f("pk_retention")),
    )
    if op.get_bind().dialect.name == "postgresql":
        # The arguments are the personal columns.
        op.execute(
            "CREATE FUNCTION admit_erasure() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "DECLARE personal text[] := TG_ARGV; made jsonb; BEGIN "
            "IF TG_OP = 'UPDATE' THEN made := to_jsonb(NEW); "
            "IF made - personal = to_jsonb(OLD) - personal AND NOT EXISTS ("
            "SELECT 1 FROM unnest(personal) AS name WHERE made -> name <> 'null' "
            "AND made -> name <> to_jsonb(OLD) -> name) THEN RETURN NEW; END IF; END IF; "
            "RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
        )
    for table, personal in PERSONAL.items():
        _admit(table, personal)


def _admit(table: str, personal: tuple[str, ...]) -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"DROP TRIGGER {table}_append_only ON {table}")
        names = ", ".join(f"'{name}'" for name in personal)
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION admit_erasure({names})"
        )
        return
    columns = [column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)]
    changed = [f'NEW."{name}" IS NOT OLD."{name}"' for name in columns if name not in personal]
    filled = [
        f'(NEW."{name}" IS NOT NULL AND NEW."{name}" IS NOT OLD."{name}")' for name in personal
    ]
    op.execute(f"DROP TRIGGER {table}_no_update")
    op.execute(
        f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} "
        f"WHEN {' OR '.join((*changed, *filled))} "
        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
    )

"""The audit log: administrative acts with their authors.

Revision: 0016
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
INDEXED = ("account_id", "actor", "act", "subject", "call_id")


def upgrade() -> None:
    op.create_table(
        "audit_events",
        sa.Column("id", sa.String(length=38), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("origin", sa.String(length=8), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("key_id", ROW_ID, nullable=True),
        sa.Column("act", sa.String(length=40), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=True),
        sa.Column("subject", sa.String(length=300), nullable=False),
        sa.Column("before", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("after", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("reason", sa.String(length=500), server_default="", nullable=False),
        sa.Column("call_id", sa.String(length=200), nullable=False),
        sa.CheckConstraint(
            "origin IN ('http', 'cli', 'system')", name=op.f("ck_audit_events_origin")
        ),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_audit_events_key_id")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_audit_events_account_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_events")),
    )
    op.create_index(op.f("ix_audit_events_at"), "audit_events", ["at"])
    for column in INDEXED:
        op.create_index(op.f(f"ix_audit_events_{column}_id"), "audit_events", [column, "id"])
    op.create_table(
        "audit_horizon",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("deleted_before", UtcDateTime(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_audit_horizon_only")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_horizon")),
    )
    if op.get_bind().dialect.name == "sqlite":
        _guard_on_sqlite()
    else:
        _guard_on_postgresql()


def _guard_on_sqlite() -> None:
    refuse = "BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
    op.execute(
        "CREATE TRIGGER audit_events_no_update BEFORE UPDATE ON audit_events "
        + refuse.format(table="audit_events")
    )
    op.execute(
        "CREATE TRIGGER audit_events_no_delete BEFORE DELETE ON audit_events WHEN NOT EXISTS "
        "(SELECT 1 FROM audit_horizon WHERE OLD.at < deleted_before) "
        + refuse.format(table="audit_events")
    )
    op.execute(
        "CREATE TRIGGER audit_horizon_forward BEFORE UPDATE ON audit_horizon "
        "WHEN NEW.deleted_before < OLD.deleted_before " + refuse.format(table="audit_horizon")
    )
    op.execute(
        "CREATE TRIGGER audit_horizon_no_delete BEFORE DELETE ON audit_horizon "
        + refuse.format(table="audit_horizon")
    )


def _guard_on_postgresql() -> None:
    op.execute(
        "CREATE FUNCTION guard_audit_events() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF TG_OP = 'DELETE' THEN "
        "IF EXISTS (SELECT 1 FROM audit_horizon WHERE OLD.at < deleted_before) THEN "
        "RETURN OLD; END IF; END IF; "
        "RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    op.execute(
        "CREATE FUNCTION guard_audit_horizon() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF TG_OP = 'UPDATE' THEN IF NEW.deleted_before >= OLD.deleted_before THEN "
        "RETURN NEW; END IF; END IF; "
        "RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    for table in ("audit_events", "audit_horizon"):
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION guard_{table}()"
        )
        op.execute(
            f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )

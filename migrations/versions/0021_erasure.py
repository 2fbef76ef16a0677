"""Erasures of accounts and people, for which events of the audit log can lose their details.

Revision: 0021
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ERASED = (
    "EXISTS (SELECT 1 FROM erasures WHERE subject IN ('account ' || OLD.account_id, OLD.subject))"
)
DETAILS = ("before", "after", "reason")


def upgrade() -> None:
    op.create_table(
        "erasures",
        sa.Column("subject", sa.String(length=300), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_erasures_account_id")
        ),
        sa.PrimaryKeyConstraint("subject", name=op.f("pk_erasures")),
    )
    op.create_index(op.f("ix_erasures_account_id"), "erasures", ["account_id"])
    if op.get_bind().dialect.name == "sqlite":
        _on_sqlite()
    else:
        _on_postgresql()


def _on_sqlite() -> None:
    for event in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER erasures_no_{event.lower()} BEFORE {event} ON erasures "
            "BEGIN SELECT RAISE(ABORT, 'erasures is append-only'); END"
        )
    columns = [each["name"] for each in sa.inspect(op.get_bind()).get_columns("audit_events")]
    kept = [f'NEW."{name}" IS NOT OLD."{name}"' for name in columns if name not in DETAILS]
    details = ('NEW."before" IS NOT NULL', 'NEW."after" IS NOT NULL', "NEW.reason <> ''")
    op.execute("DROP TRIGGER audit_events_no_update")
    op.execute(
        "CREATE TRIGGER audit_events_no_update BEFORE UPDATE ON audit_events "
        f"WHEN {' OR '.join((*kept, *details))} OR NOT {ERASED} "
        "BEGIN SELECT RAISE(ABORT, 'audit_events is append-only'); END"
    )


def _on_postgresql() -> None:
    op.execute(
        "CREATE TRIGGER erasures_append_only BEFORE UPDATE OR DELETE ON erasures "
        "FOR EACH ROW EXECUTE FUNCTION refuse_change()"
    )
    names = ", ".join(f"'{name}'" for name in DETAILS)
    op.execute(
        "CREATE OR REPLACE FUNCTION guard_audit_events() RETURNS trigger LANGUAGE plpgsql AS $$ "
        "BEGIN IF TG_OP = 'DELETE' THEN "
        "IF EXISTS (SELECT 1 FROM audit_horizon WHERE OLD.at < deleted_before) THEN "
        "RETURN OLD; END IF; "
        f"ELSIF to_jsonb(NEW) - ARRAY[{names}] = to_jsonb(OLD) - ARRAY[{names}] "
        "AND NEW.before IS NULL AND NEW.after IS NULL AND NEW.reason = '' "
        f"AND {ERASED} THEN RETURN NEW; END IF; "
        "RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )

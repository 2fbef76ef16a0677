"""Archived months: their marks, what carries the removed charges, and the guards.

Revision: 0022
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
STEPS = (
    "('writing', 'verified'), ('verified', 'removing'), ('removing', 'removed'), "
    "('removed', 'removing'), ('removing', 'restoring'), ('removed', 'restoring')"
)
"""Changes of state that an archive can make; from ``writing`` it can also begin anew."""
REFUSED_BY = {
    "receipts": "admit_erasure('metadata', 'error')",
    "receipt_steps": "admit_erasure('error')",
    "transfers": "refuse_change()",
}
SEALED = (
    "EXISTS (SELECT 1 FROM periods WHERE month = NEW.month AND state = 'closed' "
    "AND sha256 = NEW.sha256)"
)
KEPT = (
    "NEW.month = OLD.month AND NEW.sha256 = OLD.sha256 AND (OLD.state = 'writing' OR "
    "(NEW.nonce = OLD.nonce AND CAST(NEW.manifest AS TEXT) = CAST(OLD.manifest AS TEXT)))"
)


def upgrade() -> None:
    op.create_table(
        "archives",
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("nonce", sa.String(length=32), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("manifest", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("first_id", sa.String(length=36), nullable=True),
        sa.Column("last_id", sa.String(length=36), nullable=True),
        sa.Column("removed_receipts", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("removed_transfers", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("removed_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("changed_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint(
            "state IN ('writing', 'verified', 'removing', 'removed', 'restoring')",
            name=op.f("ck_archives_state"),
        ),
        sa.CheckConstraint(
            "removed_receipts >= 0 AND removed_transfers >= 0 AND removed_nanos >= 0",
            name=op.f("ck_archives_removed"),
        ),
        sa.ForeignKeyConstraint(["month"], ["periods.month"], name=op.f("fk_archives_month")),
        sa.PrimaryKeyConstraint("month", name=op.f("pk_archives")),
    )
    op.create_table(
        "archived_charges",
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("first_version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("last_version", sa.BigInteger(), nullable=False),
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("transfer_id", ROW_ID, nullable=False),
        sa.Column("booked_at", UtcDateTime(), nullable=False),
        sa.Column("posted_after", sa.BigInteger(), nullable=False),
        sa.Column("transfers", sa.Integer(), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("amount_nanos", sa.BigInteger(), nullable=False),
        sa.Column("returned_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint(
            "first_version <= last_version", name=op.f("ck_archived_charges_versions")
        ),
        sa.CheckConstraint(
            "returned_nanos >= 0 AND returned_nanos <= amount_nanos",
            name=op.f("ck_archived_charges_returned"),
        ),
        sa.ForeignKeyConstraint(
            ["month"], ["archives.month"], name=op.f("fk_archived_charges_month")
        ),
        sa.PrimaryKeyConstraint("account_id", "first_version", name=op.f("pk_archived_charges")),
        sa.UniqueConstraint("transfer_id", name=op.f("uq_archived_charges_transfer_id")),
    )
    op.create_index(op.f("ix_archived_charges_month"), "archived_charges", ["month"])
    op.create_index(
        op.f("ix_archived_charges_account_id_transfer_id"),
        "archived_charges",
        ["account_id", "transfer_id"],
    )
    op.create_table(
        "archived_spending",
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("key_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("charge_nanos", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("charge_nanos >= 0", name=op.f("ck_archived_spending_charge")),
        sa.ForeignKeyConstraint(
            ["month"], ["archives.month"], name=op.f("fk_archived_spending_month")
        ),
        sa.PrimaryKeyConstraint("month", "key_id", name=op.f("pk_archived_spending")),
    )
    op.create_table(
        "archived_windows",
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("budget_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("starts_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("charge_nanos", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("charge_nanos >= 0", name=op.f("ck_archived_windows_charge")),
        sa.ForeignKeyConstraint(
            ["month"], ["archives.month"], name=op.f("fk_archived_windows_month")
        ),
        sa.PrimaryKeyConstraint(
            "month", "budget_id", "starts_us", name=op.f("pk_archived_windows")
        ),
    )
    # A transfer that is deleted is looked for in the tables that refer to it.
    op.create_index(op.f("ix_lots_transfer_id"), "lots", ["transfer_id"])
    op.create_index(op.f("ix_payments_transfer_id"), "payments", ["transfer_id"])
    if op.get_bind().dialect.name == "sqlite":
        _guard_on_sqlite()
    else:
        _guard_on_postgresql()


def downgrade() -> None:
    if op.get_bind().exec_driver_sql("SELECT count(*) FROM archives").scalar():
        raise RuntimeError("months are archived; restore them first: tollgate archive list")
    sqlite = op.get_bind().dialect.name == "sqlite"
    for table in ("archived_windows", "archived_spending", "archived_charges", "archives"):
        op.drop_table(table)
    op.drop_index("ix_payments_transfer_id", "payments")
    op.drop_index("ix_lots_transfer_id", "lots")
    for table in ("receipts", "receipt_steps", "transfers"):
        if sqlite:
            op.execute(f"DROP TRIGGER {table}_no_delete")
            op.execute(
                f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
            continue
        op.execute(f"DROP TRIGGER {table}_no_delete ON {table}")
        op.execute(f"DROP FUNCTION guard_{table}()")
        _refuse_changes(table, "UPDATE OR DELETE")
    if not sqlite:
        op.execute("DROP FUNCTION guard_archives()")


def _removing(month: str) -> str:
    return f"EXISTS (SELECT 1 FROM archives WHERE state = 'removing' AND month = {month})"


def _refuse_changes(table: str, events: str) -> None:
    """Replace the trigger on PostgreSQL; its function stays the one of earlier migrations."""
    function = REFUSED_BY[table]
    op.execute(f"DROP TRIGGER {table}_append_only ON {table}")
    op.execute(
        f"CREATE TRIGGER {table}_append_only BEFORE {events} ON {table} "
        f"FOR EACH ROW EXECUTE FUNCTION {function}"
    )


def _guard_on_sqlite() -> None:
    def month(moment: str) -> str:
        return f"strftime('%Y-%m', {moment} / 1000000, 'unixepoch')"

    of_receipt = (
        "EXISTS (SELECT 1 FROM receipts JOIN archives ON archives.month = "
        f"{month('receipts.settled_at')} WHERE archives.state = 'removing' "
        "AND receipts.request_id = OLD.request_id)"
    )
    for table, allowed in (
        ("receipts", _removing(month("OLD.settled_at"))),
        ("receipt_steps", of_receipt),
        ("transfers", f"OLD.kind = 'charge' AND {_removing(month('OLD.booked_at'))}"),
    ):
        op.execute(f"DROP TRIGGER {table}_no_delete")
        op.execute(
            f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} WHEN NOT ({allowed}) "
            f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        )
    refuse = "BEGIN SELECT RAISE(ABORT, 'archives are not changed so'); END"
    op.execute(
        "CREATE TRIGGER archives_begin BEFORE INSERT ON archives "
        f"WHEN NOT (NEW.state = 'writing' AND {SEALED}) {refuse}"
    )
    op.execute(
        "CREATE TRIGGER archives_step BEFORE UPDATE ON archives "
        f"WHEN NOT ({KEPT} AND {SEALED} AND (NEW.state = OLD.state OR "
        f"(OLD.state, NEW.state) IN (VALUES {STEPS}))) {refuse}"
    )
    op.execute(
        "CREATE TRIGGER archives_end BEFORE DELETE ON archives "
        f"WHEN OLD.removed_receipts + OLD.removed_transfers > 0 {refuse}"
    )


def _guard_on_postgresql() -> None:
    def month(moment: str) -> str:
        return f"to_char({moment} AT TIME ZONE 'UTC', 'YYYY-MM')"

    of_receipt = (
        "EXISTS (SELECT 1 FROM receipts JOIN archives ON archives.month = "
        f"{month('receipts.settled_at')} WHERE archives.state = 'removing' "
        "AND receipts.request_id = OLD.request_id)"
    )
    for table, allowed in (
        ("receipts", _removing(month("OLD.settled_at"))),
        ("receipt_steps", of_receipt),
        ("transfers", f"OLD.kind = 'charge' AND {_removing(month('OLD.booked_at'))}"),
    ):
        _refuse_changes(table, "UPDATE")
        op.execute(
            f"CREATE FUNCTION guard_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF {allowed} THEN RETURN OLD; END IF; "
            "RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
        )
        op.execute(
            f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION guard_{table}()"
        )
    op.execute(
        "CREATE FUNCTION guard_archives() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF TG_OP = 'INSERT' THEN "
        f"IF NEW.state = 'writing' AND {SEALED} THEN RETURN NEW; END IF; "
        "ELSIF TG_OP = 'UPDATE' THEN "
        f"IF {KEPT} AND {SEALED} AND (NEW.state = OLD.state OR "
        f"(OLD.state, NEW.state) IN ({STEPS})) THEN RETURN NEW; END IF; "
        "ELSIF OLD.removed_receipts + OLD.removed_transfers = 0 THEN RETURN OLD; END IF; "
        "RAISE EXCEPTION 'archives are not changed so'; END $$"
    )
    op.execute(
        "CREATE TRIGGER archives_steps BEFORE INSERT OR UPDATE OR DELETE ON archives "
        "FOR EACH ROW EXECUTE FUNCTION guard_archives()"
    )

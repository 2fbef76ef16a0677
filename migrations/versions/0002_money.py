"""Money whole: lots, budgets, refunds, own prices, periods, invoices, payments, rollups.

Revision: 0002
"""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
APPEND_ONLY = ("refunds", "invoices", "invoice_lines", "payment_events")


def upgrade() -> None:
    op.create_table(
        "chores",
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("due_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_chores")),
    )
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
    )
    op.create_table(
        "payment_events",
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("event_id", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=80), nullable=False),
        sa.Column("received_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("provider", "event_id", name=op.f("pk_payment_events")),
    )
    op.create_table(
        "periods",
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("state", sa.String(length=8), server_default="open", nullable=False),
        sa.Column("closed_at", UtcDateTime(), nullable=True),
        sa.Column("receipts", sa.BigInteger(), nullable=True),
        sa.Column("charge_nanos", sa.BigInteger(), nullable=True),
        sa.Column("transfers", sa.BigInteger(), nullable=True),
        sa.Column("sha256", sa.String(length=64), nullable=True),
        sa.CheckConstraint("state IN ('open', 'closing', 'closed')", name=op.f("ck_periods_state")),
        sa.PrimaryKeyConstraint("month", name=op.f("pk_periods")),
    )
    op.create_table(
        "rebates",
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("from_nanos", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("basis_points", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "basis_points >= 0 AND basis_points <= 10000", name=op.f("ck_rebates_basis_points")
        ),
        sa.CheckConstraint("from_nanos >= 0", name=op.f("ck_rebates_from")),
        sa.PrimaryKeyConstraint("account_id", "from_nanos", name=op.f("pk_rebates")),
    )
    op.create_table(
        "reconciliations",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=False),
        sa.Column("finished_at", UtcDateTime(), nullable=False),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reconciliations")),
    )
    op.create_table(
        "usage_hourly",
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("hour", UtcDateTime(), nullable=False),
        sa.Column("key_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("task", sa.String(length=40), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("charge_nanos", sa.BigInteger(), nullable=False),
        sa.Column("refund_nanos", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("images", sa.BigInteger(), nullable=False),
        sa.Column("video_ms", sa.BigInteger(), nullable=False),
        sa.Column("audio_ms", sa.BigInteger(), nullable=False),
        sa.Column("characters", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("gpu_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "account_id", "hour", "key_id", "model", "task", "outcome", name=op.f("pk_usage_hourly")
        ),
    )
    op.create_index(
        op.f("ix_usage_hourly_hour_model"), "usage_hourly", ["hour", "model"], unique=False
    )
    op.create_index(
        op.f("ix_usage_hourly_key_id_hour"), "usage_hourly", ["key_id", "hour"], unique=False
    )
    op.create_table(
        "usage_hours",
        sa.Column("hour", UtcDateTime(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("charge_nanos", sa.BigInteger(), nullable=False),
        sa.Column("refund_nanos", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("built_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("hour", name=op.f("pk_usage_hours")),
    )
    op.create_table(
        "invoices",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("number", sa.String(length=40), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("corrects", ROW_ID, nullable=True),
        sa.Column("total_cents", sa.BigInteger(), nullable=False),
        sa.Column("carried_in_nanos", sa.BigInteger(), nullable=False),
        sa.Column("carried_out_nanos", sa.BigInteger(), nullable=False),
        sa.Column("opening_nanos", sa.BigInteger(), nullable=False),
        sa.Column("closing_nanos", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("reason", sa.String(length=500), server_default="", nullable=False),
        sa.Column("issued_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint("kind IN ('invoice', 'credit_note')", name=op.f("ck_invoices_kind")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_invoices_account_id")
        ),
        sa.ForeignKeyConstraint(["corrects"], ["invoices.id"], name=op.f("fk_invoices_corrects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoices")),
        sa.UniqueConstraint("number", name=op.f("uq_invoices_number")),
    )
    op.create_index(
        op.f("ix_invoices_account_id_month"), "invoices", ["account_id", "month"], unique=False
    )
    op.create_table(
        "rate_limits",
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("key_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", sa.Integer(), nullable=True),
        sa.Column("concurrent_max", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_rate_limits_account_id")
        ),
        sa.PrimaryKeyConstraint("account_id", "key_id", "model", name=op.f("pk_rate_limits")),
    )
    op.create_table(
        "budgets",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("key_id", ROW_ID, nullable=True),
        sa.Column("model", sa.String(length=200), nullable=True),
        sa.Column("name", sa.String(length=200), server_default="", nullable=False),
        sa.Column("window", sa.String(length=8), nullable=False),
        sa.Column("tz", sa.String(length=64), nullable=False),
        sa.Column("limit_nanos", sa.BigInteger(), nullable=False),
        sa.Column("hard", sa.Boolean(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint(
            "\"window\" IN ('hour', 'day', 'month', 'total')", name=op.f("ck_budgets_window")
        ),
        sa.CheckConstraint("limit_nanos >= 0", name=op.f("ck_budgets_limit")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_budgets_account_id")
        ),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_budgets_key_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budgets")),
    )
    op.create_index(op.f("ix_budgets_account_id"), "budgets", ["account_id"], unique=False)
    op.create_table(
        "invoice_lines",
        sa.Column("invoice_id", ROW_ID, nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=True),
        sa.Column("unit", sa.String(length=32), nullable=True),
        sa.Column("quantity", sa.String(length=64), nullable=True),
        sa.Column("description", sa.String(length=500), server_default="", nullable=False),
        sa.Column("amount_nanos", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["invoice_id"], ["invoices.id"], name=op.f("fk_invoice_lines_invoice_id")
        ),
        sa.PrimaryKeyConstraint("invoice_id", "seq", name=op.f("pk_invoice_lines")),
    )
    op.create_table(
        "lots",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("amount_nanos", sa.BigInteger(), nullable=False),
        sa.Column("remaining_nanos", sa.BigInteger(), nullable=False),
        sa.Column("priority", sa.Integer(), server_default="100", nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=True),
        sa.Column("transfer_id", ROW_ID, nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint("kind IN ('paid', 'promo', 'free')", name=op.f("ck_lots_kind")),
        sa.CheckConstraint(
            "remaining_nanos >= 0 AND remaining_nanos <= amount_nanos",
            name=op.f("ck_lots_remaining"),
        ),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_lots_account_id")),
        sa.ForeignKeyConstraint(
            ["transfer_id"], ["transfers.id"], name=op.f("fk_lots_transfer_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lots")),
    )
    op.create_index(
        "ix_lots_expiring",
        "lots",
        ["expires_at"],
        unique=False,
        sqlite_where=sa.text("remaining_nanos > 0 AND expires_at IS NOT NULL"),
        postgresql_where=sa.text("remaining_nanos > 0 AND expires_at IS NOT NULL"),
    )
    op.create_index(
        "ix_lots_open",
        "lots",
        ["account_id"],
        unique=False,
        sqlite_where=sa.text("remaining_nanos > 0"),
        postgresql_where=sa.text("remaining_nanos > 0"),
    )
    op.create_table(
        "payments",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("reference", sa.String(length=255), nullable=False),
        sa.Column("intent", sa.String(length=255), nullable=True),
        sa.Column("amount_nanos", sa.BigInteger(), nullable=False),
        sa.Column("returned_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("transfer_id", ROW_ID, nullable=True),
        sa.CheckConstraint(
            "status IN ('open', 'paid', 'expired', 'failed', 'refunded', 'disputed')",
            name=op.f("ck_payments_status"),
        ),
        sa.CheckConstraint("amount_nanos > 0", name=op.f("ck_payments_amount")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_payments_account_id")
        ),
        sa.ForeignKeyConstraint(
            ["transfer_id"], ["transfers.id"], name=op.f("fk_payments_transfer_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_payments")),
        sa.UniqueConstraint("provider", "reference", name=op.f("uq_payments_provider_reference")),
    )
    op.create_index(op.f("ix_payments_account_id"), "payments", ["account_id"], unique=False)
    op.create_index(
        op.f("ix_payments_provider_intent"), "payments", ["provider", "intent"], unique=False
    )
    op.create_table(
        "budget_windows",
        sa.Column("budget_id", ROW_ID, nullable=False),
        sa.Column("starts_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("limit_nanos", sa.BigInteger(), nullable=False),
        sa.Column("spent_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("held_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("hard", sa.Boolean(), nullable=False),
        sa.CheckConstraint(
            "NOT hard OR spent_nanos + held_nanos <= limit_nanos",
            name=op.f("ck_budget_windows_limit"),
        ),
        sa.CheckConstraint("held_nanos >= 0", name=op.f("ck_budget_windows_held")),
        sa.ForeignKeyConstraint(
            ["budget_id"], ["budgets.id"], name=op.f("fk_budget_windows_budget_id")
        ),
        sa.PrimaryKeyConstraint("budget_id", "starts_us", name=op.f("pk_budget_windows")),
    )
    op.create_table(
        "refunds",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("amount_nanos", sa.BigInteger(), nullable=False),
        sa.Column("transfer_id", ROW_ID, nullable=False),
        sa.Column("booked_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint("kind IN ('refund', 'correction')", name=op.f("ck_refunds_kind")),
        sa.CheckConstraint("amount_nanos > 0", name=op.f("ck_refunds_amount")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_refunds_account_id")
        ),
        sa.ForeignKeyConstraint(
            ["request_id"], ["receipts.request_id"], name=op.f("fk_refunds_request_id")
        ),
        sa.ForeignKeyConstraint(
            ["transfer_id"], ["transfers.id"], name=op.f("fk_refunds_transfer_id")
        ),
        sa.PrimaryKeyConstraint("request_id", "seq", name=op.f("pk_refunds")),
        sa.UniqueConstraint("transfer_id", name=op.f("uq_refunds_transfer_id")),
    )
    op.create_index(
        op.f("ix_refunds_account_id_booked_at"),
        "refunds",
        ["account_id", "booked_at"],
        unique=False,
    )
    op.create_index(op.f("ix_refunds_booked_at"), "refunds", ["booked_at"], unique=False)
    op.add_column(
        "accounts",
        sa.Column("report_tz", sa.String(length=64), server_default="UTC", nullable=False),
    )
    op.add_column(
        "accounts",
        sa.Column("allowance_nanos", sa.BigInteger(), server_default="0", nullable=False),
    )
    op.add_column(
        "accounts", sa.Column("bounded", sa.Boolean(), server_default=sa.false(), nullable=False)
    )
    op.add_column("holds", sa.Column("windows", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("holds", sa.Column("held_tokens", sa.BigInteger(), nullable=True))
    op.add_column("holds", sa.Column("cut", sa.String(length=32), nullable=True))
    op.add_column("receipts", sa.Column("windows", sa.JSON(none_as_null=True), nullable=True))
    op.create_index(
        op.f("ix_receipts_settled_at"),
        "receipts",
        ["settled_at"],
        unique=False,
        postgresql_using="brin",
    )
    _widen_price_periods()
    for table in APPEND_ONLY:
        _refuse_changes(table)
    _open_breakage()
    _open_lots()


def downgrade() -> None:
    raise RuntimeError("a ledger is not downgraded; restore a backup instead")


def _widen_price_periods() -> None:
    """A period says who began it, and one of an account's own may end without another price."""
    source = "source IN ('catalog', 'operator')"
    listed = "account_id <> 0 OR price_id IS NOT NULL"
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("price_periods", "price_id", existing_type=ROW_ID, nullable=True)
        op.add_column(
            "price_periods",
            sa.Column("source", sa.String(16), server_default="catalog", nullable=False),
        )
        op.add_column(
            "price_periods", sa.Column("actor", sa.String(200), server_default="", nullable=False)
        )
        op.add_column(
            "price_periods", sa.Column("reason", sa.String(500), server_default="", nullable=False)
        )
        op.create_check_constraint(op.f("ck_price_periods_source"), "price_periods", source)
        op.create_check_constraint(op.f("ck_price_periods_list"), "price_periods", listed)
        return
    # SQLite cannot change a column: make the table anew. Its triggers go with the old one.
    op.rename_table("price_periods", "price_periods_0001")
    op.create_table(
        "price_periods",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("account_id", ROW_ID, autoincrement=False, server_default="0", nullable=False),
        sa.Column("effective_from", UtcDateTime(), nullable=False),
        sa.Column("price_id", ROW_ID, nullable=True),
        sa.Column("source", sa.String(16), server_default="catalog", nullable=False),
        sa.Column("actor", sa.String(200), server_default="", nullable=False),
        sa.Column("reason", sa.String(500), server_default="", nullable=False),
        sa.CheckConstraint(source, name=op.f("ck_price_periods_source")),
        sa.CheckConstraint(listed, name=op.f("ck_price_periods_list")),
        sa.ForeignKeyConstraint(
            ["price_id"], ["prices.id"], name=op.f("fk_price_periods_price_id")
        ),
        sa.PrimaryKeyConstraint(
            "model", "account_id", "effective_from", name=op.f("pk_price_periods")
        ),
    )
    op.execute(
        "INSERT INTO price_periods (model, account_id, effective_from, price_id) "
        "SELECT model, account_id, effective_from, price_id FROM price_periods_0001"
    )
    op.execute("DROP TRIGGER price_periods_no_delete")
    op.drop_table("price_periods_0001")
    _refuse_changes("price_periods")


def _refuse_changes(table: str) -> None:
    """What is booked is never edited or deleted, whoever asks."""
    if op.get_bind().dialect.name == "sqlite":
        for event in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{event.lower()} BEFORE {event} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
        return
    op.execute(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
        "FOR EACH ROW EXECUTE FUNCTION refuse_change()"
    )


def _open_breakage() -> None:
    """Customers' accounts have positive numbers, so this one cannot be taken."""
    accounts = sa.table(
        "accounts",
        sa.column("id", ROW_ID),
        sa.column("name", sa.String),
        sa.column("kind", sa.String),
        sa.column("created_at", UtcDateTime),
    )
    breakage = {
        "id": -1,
        "name": "system:breakage",
        "kind": "system",
        "created_at": datetime.now(UTC),
    }
    op.bulk_insert(accounts, [breakage])


def _open_lots() -> None:
    """Balances of before become one paid lot each, so that lots and balance agree from now on."""
    statement = sa.text(
        "INSERT INTO lots (account_id, kind, amount_nanos, remaining_nanos, created_at) "
        "SELECT id, 'paid', posted_nanos, posted_nanos, :now FROM accounts "
        "WHERE kind = 'customer' AND posted_nanos > 0"
    ).bindparams(sa.bindparam("now", datetime.now(UTC), UtcDateTime()))
    op.execute(statement)

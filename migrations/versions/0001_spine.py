"""The spine: accounts, keys, prices, holds, receipts, transfers, outputs, webhooks.

Revision: 0001
"""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
APPEND_ONLY = ("prices", "price_periods", "receipts", "transfers")


def upgrade() -> None:
    op.create_table(
        "accounts",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), server_default="active", nullable=False),
        sa.Column("posted_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("held_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("credit_limit_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("version", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint(
            "kind <> 'customer' OR posted_nanos - held_nanos >= -credit_limit_nanos",
            name=op.f("ck_accounts_covered"),
        ),
        sa.CheckConstraint("kind IN ('customer', 'system')", name=op.f("ck_accounts_kind")),
        sa.CheckConstraint(
            "status IN ('active', 'suspended', 'closed')", name=op.f("ck_accounts_status")
        ),
        sa.CheckConstraint("credit_limit_nanos >= 0", name=op.f("ck_accounts_credit_limit")),
        sa.CheckConstraint("held_nanos >= 0", name=op.f("ck_accounts_held")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_accounts")),
        sa.UniqueConstraint("name", name=op.f("uq_accounts_name")),
    )
    op.create_table(
        "prices",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("components", sa.JSON(), nullable=False),
        sa.Column("minimum_nanos", sa.BigInteger(), nullable=False),
        sa.Column("content_sha256", sa.String(length=64), nullable=False),
        sa.CheckConstraint("minimum_nanos >= 0", name=op.f("ck_prices_minimum")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prices")),
        sa.UniqueConstraint("model", "content_sha256", name=op.f("uq_prices_model_content_sha256")),
    )
    op.create_table(
        "idempotency",
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("body_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_idempotency_account_id")
        ),
        sa.PrimaryKeyConstraint("account_id", "key", name=op.f("pk_idempotency")),
    )
    op.create_index(op.f("ix_idempotency_created_at"), "idempotency", ["created_at"], unique=False)
    op.create_table(
        "keys",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("name", sa.String(length=200), server_default="", nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=True),
        sa.Column("revoked_at", UtcDateTime(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", sa.Integer(), nullable=True),
        sa.Column("spend_limit_nanos", sa.BigInteger(), nullable=True),
        sa.Column("spent_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("held_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("held_nanos >= 0", name=op.f("ck_keys_held")),
        sa.CheckConstraint(
            "spend_limit_nanos IS NULL OR spent_nanos + held_nanos <= spend_limit_nanos",
            name=op.f("ck_keys_spend_limit"),
        ),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_keys_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_keys_secret_hash")),
    )
    op.create_index(op.f("ix_keys_account_id"), "keys", ["account_id"], unique=False)
    op.create_table(
        "price_periods",
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("account_id", ROW_ID, server_default="0", autoincrement=False, nullable=False),
        sa.Column("effective_from", UtcDateTime(), nullable=False),
        sa.Column("price_id", ROW_ID, nullable=False),
        sa.ForeignKeyConstraint(
            ["price_id"], ["prices.id"], name=op.f("fk_price_periods_price_id")
        ),
        sa.PrimaryKeyConstraint(
            "model", "account_id", "effective_from", name=op.f("pk_price_periods")
        ),
    )
    op.create_table(
        "transfers",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("from_account", ROW_ID, nullable=False),
        sa.Column("to_account", ROW_ID, nullable=False),
        sa.Column("amount_nanos", sa.BigInteger(), nullable=False),
        sa.Column("posted_after", sa.BigInteger(), nullable=False),
        sa.Column("account_version", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("reason", sa.String(length=500), server_default="", nullable=False),
        sa.Column("booked_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint(
            "kind IN ('charge', 'topup', 'grant', 'refund', 'expiry', 'rebate', 'chargeback', 'correction')",
            name=op.f("ck_transfers_kind"),
        ),
        sa.CheckConstraint("amount_nanos > 0", name=op.f("ck_transfers_amount")),
        sa.CheckConstraint("from_account <> to_account", name=op.f("ck_transfers_accounts")),
        sa.ForeignKeyConstraint(
            ["from_account"], ["accounts.id"], name=op.f("fk_transfers_from_account")
        ),
        sa.ForeignKeyConstraint(
            ["to_account"], ["accounts.id"], name=op.f("fk_transfers_to_account")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transfers")),
        sa.UniqueConstraint("key", name=op.f("uq_transfers_key")),
    )
    op.create_index(
        op.f("ix_transfers_from_account_id"), "transfers", ["from_account", "id"], unique=False
    )
    op.create_index(
        op.f("ix_transfers_to_account_id"), "transfers", ["to_account", "id"], unique=False
    )
    op.create_table(
        "holds",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("key_id", ROW_ID, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("task", sa.String(length=40), nullable=False),
        sa.Column("price_id", ROW_ID, nullable=False),
        sa.Column("hold_nanos", sa.BigInteger(), nullable=False),
        sa.Column("job", sa.LargeBinary(), nullable=False),
        sa.Column("metadata", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("webhook", sa.String(length=2000), nullable=True),
        sa.Column("accepted_at", UtcDateTime(), nullable=False),
        sa.Column("deadline_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint("hold_nanos >= 0", name=op.f("ck_holds_hold")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_holds_account_id")),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_holds_key_id")),
        sa.ForeignKeyConstraint(["price_id"], ["prices.id"], name=op.f("fk_holds_price_id")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_holds")),
    )
    op.create_index(op.f("ix_holds_account_id"), "holds", ["account_id"], unique=False)
    op.create_index(op.f("ix_holds_deadline_at"), "holds", ["deadline_at"], unique=False)
    op.create_table(
        "receipts",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("key_id", ROW_ID, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("task", sa.String(length=40), nullable=False),
        sa.Column("price_id", ROW_ID, nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("hold_nanos", sa.BigInteger(), nullable=False),
        sa.Column("charge_nanos", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("images", sa.BigInteger(), nullable=False),
        sa.Column("video_ms", sa.BigInteger(), nullable=False),
        sa.Column("audio_ms", sa.BigInteger(), nullable=False),
        sa.Column("characters", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("gpu_us", sa.BigInteger(), nullable=False),
        sa.Column("attributes", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("timings", sa.JSON(), nullable=False),
        sa.Column("metadata", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("accepted_at", UtcDateTime(), nullable=False),
        sa.Column("settled_at", UtcDateTime(), nullable=False),
        sa.Column("transfer_id", ROW_ID, nullable=True),
        sa.CheckConstraint(
            "(outcome = 'charged') = (charge_nanos > 0) AND (outcome = 'charged') = (transfer_id IS NOT NULL)",
            name=op.f("ck_receipts_charged"),
        ),
        sa.CheckConstraint("outcome IN ('charged', 'released')", name=op.f("ck_receipts_outcome")),
        sa.CheckConstraint(
            "status IN ('succeeded', 'failed', 'cancelled', 'expired')",
            name=op.f("ck_receipts_status"),
        ),
        sa.CheckConstraint(
            "charge_nanos >= 0 AND charge_nanos <= hold_nanos", name=op.f("ck_receipts_charge")
        ),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_receipts_account_id")
        ),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_receipts_key_id")),
        sa.ForeignKeyConstraint(["price_id"], ["prices.id"], name=op.f("fk_receipts_price_id")),
        sa.ForeignKeyConstraint(
            ["transfer_id"], ["transfers.id"], name=op.f("fk_receipts_transfer_id")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_receipts")),
    )
    op.create_index(
        op.f("ix_receipts_account_id_settled_at_request_id"),
        "receipts",
        ["account_id", "settled_at", "request_id"],
        unique=False,
    )
    op.create_index(
        op.f("ix_receipts_account_id_request_id"),
        "receipts",
        ["account_id", "request_id"],
        unique=False,
    )
    op.create_index(
        op.f("ix_receipts_key_id_settled_at_request_id"),
        "receipts",
        ["key_id", "settled_at", "request_id"],
        unique=False,
    )
    op.create_index(op.f("ix_receipts_transfer_id"), "receipts", ["transfer_id"], unique=False)
    op.create_table(
        "outputs",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["receipts.request_id"], name=op.f("fk_outputs_request_id")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_outputs")),
    )
    op.create_index(op.f("ix_outputs_expires_at"), "outputs", ["expires_at"], unique=False)
    op.create_table(
        "webhook_deliveries",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("url", sa.String(length=2000), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("due_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_webhook_deliveries_account_id")
        ),
        sa.ForeignKeyConstraint(
            ["request_id"], ["receipts.request_id"], name=op.f("fk_webhook_deliveries_request_id")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_webhook_deliveries")),
    )
    op.create_index(
        op.f("ix_webhook_deliveries_due_at"), "webhook_deliveries", ["due_at"], unique=False
    )
    for table in APPEND_ONLY:
        _refuse_changes(table)
    _open_system_accounts()


def downgrade() -> None:
    raise RuntimeError("a ledger is not downgraded; restore a backup instead")


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
        "CREATE OR REPLACE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    op.execute(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
        "FOR EACH ROW EXECUTE FUNCTION refuse_change()"
    )


def _open_system_accounts() -> None:
    accounts = sa.table(
        "accounts",
        sa.column("id", ROW_ID),
        sa.column("name", sa.String),
        sa.column("kind", sa.String),
        sa.column("created_at", UtcDateTime),
    )
    now = datetime.now(UTC)
    op.bulk_insert(
        accounts,
        [
            {"id": id, "name": f"system:{name}", "kind": "system", "created_at": now}
            for id, name in ((1, "cash"), (2, "revenue"), (3, "promo"))
        ],
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SELECT setval(pg_get_serial_sequence('accounts', 'id'), 3)")

"""Files, batches, and the service class at whose price a request runs.

Revision: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for table in ("holds", "receipts"):
        op.add_column(
            table,
            sa.Column(
                "service_class", sa.String(length=16), server_default="standard", nullable=False
            ),
        )
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("purpose", sa.String(length=20), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("blob_key", sa.String(length=400), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("content_type", sa.String(length=100), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint("purpose IN ('batch', 'batch_output')", name=op.f("ck_files_purpose")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_files_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index(op.f("ix_files_account_id_id"), "files", ["account_id", "id"], unique=False)
    op.create_index(op.f("ix_files_expires_at"), "files", ["expires_at"], unique=False)
    op.create_table(
        "batches",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("key_id", ROW_ID, nullable=False),
        sa.Column("endpoint", sa.String(length=60), nullable=False),
        sa.Column("input_file_id", sa.String(length=40), nullable=False),
        sa.Column("completion_window", sa.String(length=16), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=True),
        *(
            sa.Column(name, sa.Integer(), server_default="0", nullable=False)
            for name in ("total", "completed", "failed")
        ),
        *(
            sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
            for name in ("input_tokens", "cached_input_tokens", "output_tokens", "cost_nanos")
        ),
        sa.Column("errors", sa.JSON(), nullable=True),
        sa.Column("ending", sa.String(length=16), nullable=True),
        sa.Column("output_file_id", sa.String(length=40), nullable=True),
        sa.Column("error_file_id", sa.String(length=40), nullable=True),
        sa.Column("output_expires_s", sa.Integer(), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.Column("in_progress_at", UtcDateTime(), nullable=True),
        sa.Column("finalizing_at", UtcDateTime(), nullable=True),
        sa.Column("cancelling_at", UtcDateTime(), nullable=True),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.Column("lease_token", sa.String(length=32), nullable=True),
        sa.Column("lease_until", UtcDateTime(), nullable=True),
        sa.CheckConstraint(
            "status IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', "
            "'expired', 'cancelling', 'cancelled')",
            name=op.f("ck_batches_status"),
        ),
        sa.CheckConstraint("completed + failed <= total", name=op.f("ck_batches_counts")),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_batches_account_id")
        ),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_batches_key_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    for columns in (["account_id", "id"], ["input_file_id"], ["ended_at"]):
        op.create_index(op.f(f"ix_batches_{'_'.join(columns)}"), "batches", columns, unique=False)
    op.create_table(
        "batch_results",
        sa.Column("batch_id", sa.String(length=40), nullable=False),
        sa.Column("line", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("succeeded", sa.Boolean(), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=True),
        sa.Column("result", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_results_batch_id")
        ),
        sa.PrimaryKeyConstraint("batch_id", "line", name=op.f("pk_batch_results")),
    )
    op.create_table(
        "batch_discounts",
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("effective_from", UtcDateTime(), nullable=False),
        sa.Column("discount", sa.String(length=12), nullable=True),
        sa.PrimaryKeyConstraint("model", "effective_from", name=op.f("pk_batch_discounts")),
    )
    _refuse_changes("batch_discounts")


def _refuse_changes(table: str) -> None:
    """What a price was made of is never edited or deleted, whoever asks."""
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

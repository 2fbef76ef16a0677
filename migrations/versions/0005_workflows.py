"""Workflows: the steps of open requests, and the lines that they leave on receipts.

Revision: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON_OR_NULL = sa.JSON(none_as_null=True)


def upgrade() -> None:
    op.create_table(
        "steps",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("job", sa.LargeBinary(), nullable=False),
        sa.Column("placed_at", UtcDateTime(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=True),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.Column("error", JSON_OR_NULL, nullable=True),
        sa.Column("usage", JSON_OR_NULL, nullable=True),
        sa.Column("timings", JSON_OR_NULL, nullable=True),
        sa.Column("output", sa.LargeBinary(), nullable=True),
        sa.CheckConstraint(
            "status IN ('succeeded', 'failed', 'cancelled', 'expired')",
            name=op.f("ck_steps_status"),
        ),
        sa.PrimaryKeyConstraint("request_id", "name", "attempt", name=op.f("pk_steps")),
    )
    op.create_table(
        "receipt_steps",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("task", sa.String(length=40), nullable=False),
        sa.Column("price_id", ROW_ID, nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("charge_nanos", sa.BigInteger(), nullable=False),
        sa.Column("usage", sa.JSON(), nullable=False),
        sa.Column("timings", sa.JSON(), nullable=False),
        sa.Column("error", JSON_OR_NULL, nullable=True),
        sa.Column("placed_at", UtcDateTime(), nullable=True),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint("charge_nanos >= 0", name=op.f("ck_receipt_steps_charge")),
        sa.CheckConstraint(
            "charge_nanos = 0 OR status = 'succeeded'", name=op.f("ck_receipt_steps_charged")
        ),
        sa.CheckConstraint(
            "status IN ('succeeded', 'failed', 'cancelled', 'expired', 'stopped', 'not_run')",
            name=op.f("ck_receipt_steps_status"),
        ),
        sa.ForeignKeyConstraint(
            ["price_id"], ["prices.id"], name=op.f("fk_receipt_steps_price_id")
        ),
        sa.ForeignKeyConstraint(
            ["request_id"], ["receipts.request_id"], name=op.f("fk_receipt_steps_request_id")
        ),
        sa.PrimaryKeyConstraint("request_id", "seq", name=op.f("pk_receipt_steps")),
    )
    _refuse_changes("receipt_steps")


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

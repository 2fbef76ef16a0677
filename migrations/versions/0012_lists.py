"""Indexes for lists and statistics, whose cost must not grow with the history.

The two for lists and that of batches' lines leave the ordinary rows out, so these cost nothing
more to write. That of a model's statistics costs each receipt one more entry. Building them locks
the tables for writing.

Revision: 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

NOT_SUCCEEDED = sa.text("status <> 'succeeded'")
NOT_CHARGES = sa.text("kind <> 'charge'")
LINES = sa.text("key LIKE 'batch%'")


def upgrade() -> None:
    op.create_index(
        op.f("ix_receipts_model_settled_at"), "receipts", ["model", "settled_at"], unique=False
    )
    op.create_index(
        "ix_receipts_not_succeeded",
        "receipts",
        ["account_id", "status", "request_id"],
        unique=False,
        sqlite_where=NOT_SUCCEEDED,
        postgresql_where=NOT_SUCCEEDED,
    )
    op.create_index(
        "ix_transfers_not_charges",
        "transfers",
        ["from_account", "id"],
        unique=False,
        sqlite_where=NOT_CHARGES,
        postgresql_where=NOT_CHARGES,
    )
    op.create_index(
        "ix_idempotency_lines",
        "idempotency",
        ["account_id", "key"],
        unique=False,
        sqlite_where=LINES,
        postgresql_where=LINES,
        postgresql_ops={"key": "varchar_pattern_ops"},
    )


def downgrade() -> None:
    op.drop_index("ix_idempotency_lines", table_name="idempotency")
    op.drop_index("ix_transfers_not_charges", table_name="transfers")
    op.drop_index("ix_receipts_not_succeeded", table_name="receipts")
    op.drop_index(op.f("ix_receipts_model_settled_at"), table_name="receipts")

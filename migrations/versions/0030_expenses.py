"""What requests cost the operator, and how they ran: on receipts and in the rollups of usage.

The seals of months and hours do not cover these columns, so earlier seals stay valid.

Revision: 0030
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

PERSONAL = ("metadata", "error")
"""Columns of receipts that can be set to NULL."""


def upgrade() -> None:
    op.add_column("receipts", sa.Column("run", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("receipts", sa.Column("expense_nanos", sa.BigInteger(), nullable=True))
    for name in ("expense_nanos", "expensed"):
        op.add_column(
            "usage_hourly",
            sa.Column(name, sa.BigInteger(), server_default="0", nullable=False),
        )
    if op.get_bind().dialect.name == "sqlite":
        _protect_receipts()


def _protect_receipts() -> None:
    """Create the trigger again: it names every column that cannot be changed."""
    columns = [column["name"] for column in sa.inspect(op.get_bind()).get_columns("receipts")]
    changed = [f'NEW."{name}" IS NOT OLD."{name}"' for name in columns if name not in PERSONAL]
    filled = [
        f'(NEW."{name}" IS NOT NULL AND NEW."{name}" IS NOT OLD."{name}")' for name in PERSONAL
    ]
    op.execute("DROP TRIGGER receipts_no_update")
    op.execute(
        "CREATE TRIGGER receipts_no_update BEFORE UPDATE ON receipts "
        f"WHEN {' OR '.join((*changed, *filled))} "
        "BEGIN SELECT RAISE(ABORT, 'receipts is append-only'); END"
    )

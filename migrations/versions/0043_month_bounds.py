"""The ids of what was booked in each closed month.

Revision: 0043
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0043"
down_revision = "0042"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "month_bounds",
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("first_request_id", sa.String(length=36), nullable=True),
        sa.Column("last_request_id", sa.String(length=36), nullable=True),
        sa.Column("first_transfer_id", ROW_ID, nullable=True),
        sa.Column("last_transfer_id", ROW_ID, nullable=True),
        sa.Column("later_transfer_id", ROW_ID, nullable=False),
        sa.PrimaryKeyConstraint("month", name=op.f("pk_month_bounds")),
    )


def downgrade() -> None:
    op.drop_table("month_bounds")

"""Limits of the device time that an account cancels.

Revision: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "rate_limits", sa.Column("cancelled_seconds_per_hour", sa.Integer(), nullable=True)
    )

"""Subscriptions to notices that are confirmed before anything is sent.

Revision: 0027
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("notice_subscriptions", sa.Column("confirmed_at", UtcDateTime(), nullable=True))
    # Operators created all of them.
    op.execute("UPDATE notice_subscriptions SET confirmed_at = created_at")

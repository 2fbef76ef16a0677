"""What was set aside because it cannot be worked on.

Revision: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "set_aside",
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("reason", sa.String(length=500), nullable=False),
        sa.Column("times", sa.Integer(), server_default="1", nullable=False),
        sa.Column("first_at", UtcDateTime(), nullable=False),
        sa.Column("last_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "name", name=op.f("pk_set_aside")),
    )

"""What receivers of webhooks answered: the first characters, beside the code.

Revision: 0036
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

TABLES = ("webhook_attempts", "notice_attempts")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("answer", sa.String(length=200), nullable=True))


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "answer")

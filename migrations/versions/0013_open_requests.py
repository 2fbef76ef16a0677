"""Counts of open requests in the rows of accounts and keys, for bounds that cost no query.

They start at the number of holds that are open now, without batch lines.

Revision: 0013
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table, column in (("accounts", "account_id"), ("keys", "key_id")):
        op.add_column(
            table, sa.Column("open_requests", sa.Integer(), server_default="0", nullable=False)
        )
        op.execute(
            f"UPDATE {table} SET open_requests = (SELECT COUNT(*) FROM holds "
            f"WHERE holds.{column} = {table}.id AND holds.service_class = 'standard') "
            f"WHERE id IN (SELECT {column} FROM holds)"
        )


def downgrade() -> None:
    for table in ("keys", "accounts"):
        op.drop_column(table, "open_requests")

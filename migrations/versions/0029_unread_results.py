"""Results of upstreams that could not be read, kept beside the rows that are set aside.

Revision: 0029
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("set_aside", sa.Column("content", sa.Text(), nullable=True))

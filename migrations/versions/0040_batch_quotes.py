"""What a batch costs at most: the sum of the quotes of its lines.

Revision: 0040
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("most_nanos", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("batches", "most_nanos")

"""Which version of a model runs an open request, if it is not the model that was ordered.

Revision: 0031
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("holds", sa.Column("served_by", sa.String(200), nullable=True))


def downgrade() -> None:
    op.drop_column("holds", "served_by")

"""The catalog that was loaded last, for all gateways.

Revision: 0035
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "price_version",
        sa.Column("catalog_loads", sa.BigInteger(), server_default="0", nullable=False),
    )
    op.add_column(
        "price_version",
        sa.Column("catalog_sha256", sa.String(64), server_default="", nullable=False),
    )


def downgrade() -> None:
    op.drop_column("price_version", "catalog_sha256")
    op.drop_column("price_version", "catalog_loads")

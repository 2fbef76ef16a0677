"""The version of all prices and discounts, which triggers increment.

By trigger, so that gateways of an earlier version increment it too while they are replaced.

Revision: 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

COUNTED = ("price_periods", "batch_discounts")
INCREMENT = "UPDATE price_version SET version = version + 1"


def upgrade() -> None:
    made = op.create_table(
        "price_version",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_price_version_only")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_price_version")),
    )
    op.bulk_insert(made, [{"id": 1, "version": 1}])
    if op.get_bind().dialect.name == "sqlite":
        for table in COUNTED:
            op.execute(
                f"CREATE TRIGGER {table}_version AFTER INSERT ON {table} BEGIN {INCREMENT}; END"
            )
        return
    op.execute(
        "CREATE FUNCTION increment_price_version() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {INCREMENT}; RETURN NULL; END $$"
    )
    for table in COUNTED:
        op.execute(
            f"CREATE TRIGGER {table}_version BEFORE INSERT ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION increment_price_version()"
        )

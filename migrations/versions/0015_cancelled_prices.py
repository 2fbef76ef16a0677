"""Prices that were taken back before they began.

Revision: 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

TABLE = "cancelled_prices"
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
PERIOD = ("model", "account_id", "effective_from")


def upgrade() -> None:
    op.create_table(
        TABLE,
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("effective_from", UtcDateTime(), nullable=False),
        sa.Column("cancelled_at", UtcDateTime(), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("reason", sa.String(length=500), nullable=False),
        sa.CheckConstraint("cancelled_at < effective_from", name=op.f("ck_cancelled_prices_ahead")),
        sa.ForeignKeyConstraint(
            PERIOD, [f"price_periods.{name}" for name in PERIOD], name="fk_cancelled_prices_period"
        ),
        sa.PrimaryKeyConstraint(*PERIOD, name=op.f("pk_cancelled_prices")),
    )
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            f"CREATE TRIGGER {TABLE}_version AFTER INSERT ON {TABLE} "
            "BEGIN UPDATE price_version SET version = version + 1; END"
        )
        for event in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {TABLE}_no_{event.lower()} BEFORE {event} ON {TABLE} "
                f"BEGIN SELECT RAISE(ABORT, '{TABLE} is append-only'); END"
            )
        return
    op.execute(
        f"CREATE TRIGGER {TABLE}_version BEFORE INSERT ON {TABLE} "
        "FOR EACH STATEMENT EXECUTE FUNCTION increment_price_version()"
    )
    op.execute(
        f"CREATE TRIGGER {TABLE}_append_only BEFORE UPDATE OR DELETE ON {TABLE} "
        "FOR EACH ROW EXECUTE FUNCTION refuse_change()"
    )

"""The journal of price changes, so that gateways read only what has changed.

It is written by triggers, so that gateways of an earlier version write it too while they are
replaced.

Revision: 0044
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0044"
down_revision = "0043"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ACCOUNTS = {"price_periods": "account_id", "cancelled_prices": "account_id", "batch_discounts": "0"}
"""The account of a row, by table; 0 is that of list prices."""
INCREMENT = "UPDATE price_version SET version = version + 1"


def upgrade() -> None:
    op.create_table(
        "price_changes",
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("account_id", ROW_ID, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("version", "model", "account_id", name=op.f("pk_price_changes")),
    )
    sqlite = op.get_bind().dialect.name == "sqlite"
    for table, account in ACCOUNTS.items():
        if sqlite:
            # One trigger, because the order of several is undefined.
            op.execute(f"DROP TRIGGER {table}_version")
            owner = account if account == "0" else f"NEW.{account}"
            _create_sqlite(
                table,
                f"{INCREMENT}; INSERT INTO price_changes (version, model, account_id) "
                f"SELECT version, NEW.model, {owner} FROM price_version",
            )
            continue
        op.execute(
            f"CREATE FUNCTION note_{table}() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO price_changes (version, model, account_id) "
            f"SELECT DISTINCT version, model, CAST({account} AS bigint) "
            "FROM inserted, price_version; RETURN NULL; END $$"
        )
        op.execute(
            f"CREATE TRIGGER {table}_changes AFTER INSERT ON {table} "
            "REFERENCING NEW TABLE AS inserted "
            f"FOR EACH STATEMENT EXECUTE FUNCTION note_{table}()"
        )


def downgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    for table in ACCOUNTS:
        if sqlite:
            op.execute(f"DROP TRIGGER {table}_version")
            _create_sqlite(table, INCREMENT)
        else:
            op.execute(f"DROP TRIGGER {table}_changes ON {table}")
            op.execute(f"DROP FUNCTION note_{table}()")
    op.drop_table("price_changes")


def _create_sqlite(table: str, body: str) -> None:
    op.execute(f"CREATE TRIGGER {table}_version AFTER INSERT ON {table} BEGIN {body}; END")

"""Organisations, which group accounts, and their budgets.

Revision: 0024
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
OWNER = "(account_id IS NULL) <> (organisation_id IS NULL)"
KEY = "key_id IS NULL OR organisation_id IS NULL"
COLUMNS = (
    'id, account_id, key_id, model, name, "window", tz, limit_nanos, hard, created_at, ended_at'
)
BUDGETS = """
CREATE TABLE budgets (
    id INTEGER NOT NULL,
    account_id INTEGER{null},
    key_id INTEGER,
    model VARCHAR(200),
    name VARCHAR(200) DEFAULT '' NOT NULL,
    "window" VARCHAR(8) NOT NULL,
    tz VARCHAR(64) NOT NULL,
    limit_nanos BIGINT NOT NULL,
    hard BOOLEAN NOT NULL,
    created_at BIGINT NOT NULL,
    ended_at BIGINT,
{more}
    CONSTRAINT pk_budgets PRIMARY KEY (id),
    CONSTRAINT ck_budgets_window CHECK ("window" IN ('hour', 'day', 'month', 'total')),
    CONSTRAINT ck_budgets_limit CHECK (limit_nanos >= 0),
    CONSTRAINT fk_budgets_account_id FOREIGN KEY(account_id) REFERENCES accounts (id),
    CONSTRAINT fk_budgets_key_id FOREIGN KEY(key_id) REFERENCES keys (id)
)
"""
MORE = f"""
    organisation_id INTEGER,
    overallot BOOLEAN DEFAULT 0 NOT NULL,
    CONSTRAINT ck_budgets_owner CHECK ({OWNER}),
    CONSTRAINT ck_budgets_key CHECK ({KEY}),
    CONSTRAINT fk_budgets_organisation_id
        FOREIGN KEY(organisation_id) REFERENCES organisations (id),
"""


def upgrade() -> None:
    op.create_table(
        "organisations",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_organisations")),
        sa.UniqueConstraint("name", name=op.f("uq_organisations_name")),
    )
    op.create_table(
        "organisation_accounts",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("organisation_id", ROW_ID, nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("joined_at", UtcDateTime(), nullable=False),
        sa.Column("left_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_organisation_accounts")),
        sa.ForeignKeyConstraint(
            ["organisation_id"],
            ["organisations.id"],
            name=op.f("fk_organisation_accounts_organisation_id"),
        ),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_organisation_accounts_account_id")
        ),
    )
    for column in ("organisation_id", "account_id"):
        op.create_index(
            op.f(f"ix_organisation_accounts_{column}"), "organisation_accounts", [column]
        )
    op.create_index(
        "uq_organisation_accounts_current",
        "organisation_accounts",
        ["account_id"],
        unique=True,
        sqlite_where=sa.text("left_at IS NULL"),
        postgresql_where=sa.text("left_at IS NULL"),
    )
    op.add_column(
        "accounts", sa.Column("organised", sa.Boolean(), server_default=sa.false(), nullable=False)
    )
    if op.get_bind().dialect.name == "sqlite":
        _write_anew(BUDGETS.format(null="", more=MORE))
        op.execute("CREATE INDEX ix_budgets_organisation_id ON budgets (organisation_id)")
        return
    op.alter_column("budgets", "account_id", existing_type=ROW_ID, nullable=True)
    op.add_column("budgets", sa.Column("organisation_id", ROW_ID, nullable=True))
    op.add_column(
        "budgets", sa.Column("overallot", sa.Boolean(), server_default=sa.false(), nullable=False)
    )
    op.create_foreign_key(
        op.f("fk_budgets_organisation_id"),
        "budgets",
        "organisations",
        ["organisation_id"],
        ["id"],
    )
    op.create_check_constraint(op.f("ck_budgets_owner"), "budgets", OWNER)
    op.create_check_constraint(op.f("ck_budgets_key"), "budgets", KEY)
    op.create_index(op.f("ix_budgets_organisation_id"), "budgets", ["organisation_id"])


def _write_anew(table: str) -> None:
    """Replace the table, because SQLite cannot change whether a column can be null.

    Its windows refer to it; their references are checked when the transaction ends.
    """
    for statement in (
        "PRAGMA defer_foreign_keys = ON",
        f"CREATE TEMPORARY TABLE old_budgets AS SELECT {COLUMNS} FROM budgets",
        "DROP TABLE budgets",
        table,
        f"INSERT INTO budgets ({COLUMNS}) SELECT {COLUMNS} FROM old_budgets",
        "DROP TABLE old_budgets",
        "CREATE INDEX ix_budgets_account_id ON budgets (account_id)",
    ):
        op.execute(statement)


def downgrade() -> None:
    owned = "SELECT count(*) FROM budgets WHERE organisation_id IS NOT NULL"
    if op.get_bind().exec_driver_sql(owned).scalar():
        raise RuntimeError("organisations have or had budgets, which count requests")
    op.drop_table("organisation_accounts")
    op.drop_column("accounts", "organised")
    if op.get_bind().dialect.name == "sqlite":
        _write_anew(BUDGETS.format(null=" NOT NULL", more=""))
    else:
        op.drop_column("budgets", "organisation_id")
        op.drop_column("budgets", "overallot")
        op.alter_column("budgets", "account_id", existing_type=ROW_ID, nullable=False)
    op.drop_table("organisations")

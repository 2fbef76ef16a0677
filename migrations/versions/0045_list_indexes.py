"""Indexes for pages of lists, and for the retention of budget windows.

They are of the prices of an account, of keys with limits of their own, and of the starts of budget
windows. On PostgreSQL they are built while bookings continue. No booking changes a column that they
have, so bookings cost as much as before.

Revision: 0045
"""

from __future__ import annotations

from alembic import op

from gateway.sql.migrations import build_index, drop_index

revision = "0045"
down_revision = "0044"
branch_labels = None
depends_on = None

PRICES = "ix_price_periods_account_id_model_effective_from"
LIMITED = "ix_keys_limited"
HAS_LIMIT = "requests_per_minute IS NOT NULL OR tokens_per_minute IS NOT NULL"
WINDOWS = "ix_budget_windows_starts_us"


def upgrade() -> None:
    connection = op.get_bind()
    build_index(
        connection,
        PRICES,
        "price_periods",
        columns="account_id, model, effective_from",
        where="",
    )
    build_index(connection, LIMITED, "keys", columns="account_id, id", where=HAS_LIMIT)
    build_index(connection, WINDOWS, "budget_windows", columns="starts_us", where="")


def downgrade() -> None:
    connection = op.get_bind()
    drop_index(connection, WINDOWS, "budget_windows")
    drop_index(connection, LIMITED, "keys")
    drop_index(connection, PRICES, "price_periods")

"""Lock order: the month's row, then accounts by id, then rows that belong to an account.

Keys, budgets, lots and holds belong to one account and are guarded by its lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import Connection, RowMapping, bindparam, select

from gateway.tables.core import accounts

_LOCK_ACCOUNTS: Final = (
    select(
        accounts.c.id,
        accounts.c.status,
        accounts.c.posted_nanos,
        accounts.c.held_nanos,
        accounts.c.credit_limit_nanos,
        accounts.c.version,
        accounts.c.bounded,
        accounts.c.open_requests,
    )
    .where(accounts.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(accounts.c.id)
    .with_for_update()
)


def lock_accounts(connection: Connection, ids: Iterable[int]) -> dict[int, RowMapping]:
    """Lock accounts in id order, which avoids deadlocks. Accounts that do not exist are absent."""
    rows = connection.execute(_LOCK_ACCOUNTS, {"ids": sorted(ids)}).mappings()
    return {row["id"]: row for row in rows}

"""Lock order: the month's row, then accounts by id, then rows that belong to an account.

Keys, budgets, lots and holds belong to one account and are guarded by its lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import Connection, select

from gateway.sql.statements import CompiledStatement, Row, any_of
from gateway.tables.core import accounts

_LOCK_ACCOUNTS: Final = CompiledStatement(
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
    .where(any_of(accounts.c.id, "ids"))
    .order_by(accounts.c.id)
    # Rows that refer to an account can be inserted meanwhile.
    .with_for_update(key_share=True)
)


def lock_accounts(connection: Connection, ids: Iterable[int]) -> dict[int, Row]:
    """Lock accounts in id order, which avoids deadlocks. Accounts that do not exist are absent."""
    return {row["id"]: row for row in _LOCK_ACCOUNTS.rows(connection, ids=sorted(ids))}

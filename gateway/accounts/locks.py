"""Lock order: the month's row, then accounts by id, then organisations by id, then other rows.

Keys, budgets, lots and holds belong to one account and are guarded by its lock. Budgets of an
organisation are guarded by the organisation's lock, and its membership by both. A transaction locks
all of its accounts before the first organisation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from sqlalchemy import Connection, select

from gateway.sql.statements import CompiledStatement, Row, any_of
from gateway.tables.core import accounts, budgets
from gateway.tables.organisations import organisation_accounts, organisations

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
        accounts.c.organised,
    )
    .where(any_of(accounts.c.id, "ids"))
    .order_by(accounts.c.id)
    # Rows that refer to an account can be inserted meanwhile.
    .with_for_update(key_share=True)
)

_LOCK_ORGANISATIONS: Final = CompiledStatement(
    select(organisations.c.id, organisation_accounts.c.account_id, organisation_accounts.c.left_at)
    .join(organisation_accounts, organisation_accounts.c.organisation_id == organisations.c.id)
    .where(
        any_of(organisation_accounts.c.account_id, "accounts"),
        # Others guard nothing that a request changes.
        select(budgets.c.id).where(budgets.c.organisation_id == organisations.c.id).exists(),
    )
    .order_by(organisations.c.id)
    .with_for_update(of=organisations, key_share=True)
)


class LockedOrganisations(NamedTuple):
    """Organisations with budgets, by account: those of current members, and those of members at
    any time, whose requests can still count there."""

    current: dict[int, set[int]]
    ever: dict[int, set[int]]


def lock_accounts(connection: Connection, ids: Iterable[int]) -> dict[int, Row]:
    """Lock accounts in id order, which avoids deadlocks. Accounts that do not exist are absent."""
    return {row["id"]: row for row in _LOCK_ACCOUNTS.rows(connection, ids=sorted(ids))}


def lock_organisations(connection: Connection, account_ids: Iterable[int]) -> LockedOrganisations:
    """Lock, in id order, the organisations with budgets that locked accounts belong to or left.

    A budget that an organisation without budgets gets meanwhile is not seen by the caller.
    """
    found = LockedOrganisations({}, {})
    for row in _LOCK_ORGANISATIONS.rows(connection, accounts=sorted(account_ids)):
        found.ever.setdefault(row["account_id"], set()).add(row["id"])
        if row["left_at"] is None:
            found.current.setdefault(row["account_id"], set()).add(row["id"])
    return found


def lock_organisation(connection: Connection, organisation_id: int) -> None:
    """Lock one organisation, with budgets or without."""
    connection.execute(
        select(organisations.c.id)
        .where(organisations.c.id == organisation_id)
        .with_for_update(key_share=True)
    )

"""Rebates: tiers of an account, or of all that have none."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection

from gateway.audit_log import Author, record
from gateway.billing.statements.close import ALL_ACCOUNTS, set_rebates, tiers_of
from gateway.operations.accounts import owner_id
from gateway.operations.refusals import refusals
from gateway.pricing import format_usd


@refusals()
def put(
    connection: Connection, author: Author, account: str | None, tiers: Mapping[int, int]
) -> None:
    """Replace the tiers: threshold in nano-dollars → basis points."""
    account_id = owner_id(connection, account)
    before = tiers_of(connection, account_id or ALL_ACCOUNTS)
    set_rebates(connection, account_id or ALL_ACCOUNTS, dict(tiers))
    record(
        connection,
        author,
        "rebate.set",
        "all accounts" if account_id is None else f"account {account_id}",
        account_id=account_id,
        before=_view(before),
        after=_view(tiers),
    )


def _view(tiers: Mapping[int, int]) -> dict[str, str]:
    return {format_usd(start): f"{points / 100:g} %" for start, points in sorted(tiers.items())}

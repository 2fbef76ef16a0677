"""Accounts: open, list, change."""

from __future__ import annotations

from typing import Literal, TypedDict

from sqlalchemy import Connection

from gateway.accounts.accounts import (
    Account,
    change_account,
    create_account,
    find_account,
    list_accounts,
)
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.operations.bodies import Body, Name, UsdAmount
from gateway.operations.refusals import refusals
from gateway.pricing import format_usd


class AccountBody(Body):
    name: Name
    credit_limit: UsdAmount = 0


class AccountChange(Body):
    credit_limit: UsdAmount | None = None
    allowance: UsdAmount | None = None
    status: Literal["active", "suspended", "closed"] | None = None
    report_tz: str | None = None
    name: Name | None = None


class AccountView(TypedDict):
    object: Literal["account"]
    id: int
    name: str
    status: str
    posted: str
    held: str
    available: str
    credit_limit: str
    allowance: str
    report_tz: str
    created_at: str


@refusals()
def create(connection: Connection, body: AccountBody) -> AccountView:
    made = create_account(connection, body.name, credit_limit_nanos=body.credit_limit)
    return account_view(made)


def list_all(connection: Connection) -> list[AccountView]:
    return [account_view(each) for each in list_accounts(connection)]


def show(connection: Connection, account: str) -> AccountView:
    return account_view(find_owner(connection, account))


@refusals()
def change(connection: Connection, account: str, body: AccountChange) -> AccountView:
    changed = change_account(
        connection,
        find_owner(connection, account).id,
        credit_limit_nanos=body.credit_limit,
        allowance_nanos=body.allowance,
        status=body.status,
        report_tz=body.report_tz,
        name=body.name,
    )
    return account_view(changed)


def find_owner(connection: Connection, account: str | int) -> Account:
    """Find an account by name or number. Raise ``NotFound``, or ``AmbiguousAccount``."""
    try:
        return find_account(connection, account)
    except LookupError:
        raise NotFound(
            "account_not_found", f"Unknown account {account!r}.", param="account"
        ) from None


def owner_id(connection: Connection, account: str | None) -> int | None:
    """Find the id of an account by name or number; None, for all accounts, if none is named."""
    return None if account is None else find_owner(connection, account).id


def account_view(account: Account) -> AccountView:
    return {
        "object": "account",
        "id": account.id,
        "name": account.name,
        "status": account.status,
        "posted": format_usd(account.posted_nanos),
        "held": format_usd(account.held_nanos),
        "available": format_usd(account.available_nanos),
        "credit_limit": format_usd(account.credit_limit_nanos),
        "allowance": format_usd(account.allowance_nanos),
        "report_tz": account.report_tz,
        "created_at": timestamp(account.created_at),
    }

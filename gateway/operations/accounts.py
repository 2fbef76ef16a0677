"""Accounts: open, list, change."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from sqlalchemy import Connection

from gateway.accounts.accounts import (
    Account,
    Status,
    change_account,
    create_account,
    find_account,
    list_accounts,
)
from gateway.accounts.locks import lock_accounts
from gateway.audit_log import Author, record
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.operations.bodies import Body, Name, UsdAmount
from gateway.operations.pages import cut_page, read_cursor
from gateway.operations.refusals import refusals
from gateway.pricing import format_usd

TERMS: Final = frozenset({"credit_limit", "allowance"})
"""Fields of a change that belong to finance."""


class AccountBody(Body):
    name: Name
    credit_limit: UsdAmount = 0


class AccountChange(Body):
    credit_limit: UsdAmount | None = None
    allowance: UsdAmount | None = None
    status: Literal["active", "suspended", "closed"] | None = None
    report_tz: str | None = None
    name: Name | None = None
    keep_inputs: bool | None = None


class OwnAccountChange(Body):
    """What the owner of an account can change of it."""

    keep_inputs: bool


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
    keep_inputs: bool
    created_at: str


@refusals()
def create(connection: Connection, author: Author, body: AccountBody) -> AccountView:
    made = create_account(connection, body.name, credit_limit_nanos=body.credit_limit)
    view = account_view(made)
    record(connection, author, "account.create", subject(made), account_id=made.id, after=view)
    return view


def list_page(
    connection: Connection,
    *,
    status: Status | None,
    name: str | None,
    limit: int,
    cursor: str | None,
) -> tuple[list[AccountView], str | None]:
    """List accounts in order of their numbers, and return the cursor of the next page."""
    after = read_cursor(cursor, "an account")
    found = list_accounts(connection, status=status, name=name, limit=limit + 1, after=after)
    page, more = cut_page(found, limit)
    return [account_view(each) for each in page], more


def show(connection: Connection, account: str) -> AccountView:
    return account_view(find_owner(connection, account))


@refusals()
def change(
    connection: Connection, author: Author, account: str, body: AccountChange
) -> AccountView:
    found = find_owner(connection, account)
    lock_accounts(connection, [found.id])
    found = find_account(connection, found.id)
    changed = change_account(
        connection,
        found.id,
        credit_limit_nanos=body.credit_limit,
        allowance_nanos=body.allowance,
        status=body.status,
        report_tz=body.report_tz,
        name=body.name,
        keep_inputs=body.keep_inputs,
    )
    view = account_view(changed)
    record(
        connection,
        author,
        "account.change",
        subject(changed),
        account_id=changed.id,
        before=account_view(found),
        after=view,
    )
    return view


def change_own(
    connection: Connection, author: Author, account_id: int, body: OwnAccountChange
) -> AccountView:
    """Change what is the owner's to decide."""
    change_ = AccountChange(keep_inputs=body.keep_inputs)
    return change(connection, author, f"id:{account_id}", change_)


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


def subject(account: Account) -> str:
    """Return an account's name in the audit log, which outlives a change of its own name."""
    return f"account {account.id}"


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
        "keep_inputs": account.keep_inputs,
        "created_at": timestamp(account.created_at),
    }

"""Which account a page is about. One that a visitor may not see does not exist for it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account
from gateway.console.visitors import Visitor
from gateway.errors import NotFound
from gateway.operations.accounts import find_owner

ALL: Final = "all"
"""In place of a name of an account: all of them. No account has this name."""


def account_of(connection: Connection, visitor: Visitor, named: str | None) -> Account | None:
    """Return the account of a page: the named one, otherwise the chosen one; None for all, also
    where ``all`` is named.

    Raise ``NotFound`` unless the visitor may see it.
    """
    if named == ALL and visitor.role is not None:
        return None
    if named is not None:
        found = find_owner(connection, named)
        if visitor.role is None and found.id not in visitor.memberships:
            raise NotFound("account_not_found", f"Unknown account {named!r}.", param="account")
        return found
    if visitor.account_id is not None:
        return find_account(connection, visitor.account_id)
    if visitor.role is None:
        raise NotFound("account_not_found", "This session has no account.")
    return None


def one_account(connection: Connection, visitor: Visitor, named: str | None) -> Account:
    """Return the account of a page that is about a single one. Raise ``ChooseAccount`` if none is
    chosen."""
    found = account_of(connection, visitor, named)
    if found is None:
        raise ChooseAccount()
    return found


class ChooseAccount(NotFound):
    """The page is about one account, and none is chosen."""

    def __init__(self) -> None:
        super().__init__(
            "account_not_found", "This page is about one account: choose it above.", param="account"
        )

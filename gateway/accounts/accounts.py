"""Accounts: who pays. Their balance changes only through the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, Connection, RowMapping, insert, select

from gateway.tables import accounts


@dataclass(frozen=True, slots=True)
class Account:
    id: int
    name: str
    status: str
    posted_nanos: int
    held_nanos: int
    credit_limit_nanos: int
    created_at: datetime

    @property
    def available_nanos(self) -> int:
        """What new requests may hold."""
        return self.posted_nanos - self.held_nanos + self.credit_limit_nanos


class AccountExists(Exception):
    """There is an account of this name."""


def create_account(connection: Connection, name: str, *, credit_limit_nanos: int = 0) -> Account:
    """Open an account with nothing in it. Raise ``AccountExists`` if the name is taken."""
    if connection.execute(select(accounts.c.id).where(accounts.c.name == name)).first():
        raise AccountExists(f"there is an account named {name!r}")
    row = connection.execute(
        insert(accounts)
        .values(
            name=name,
            kind="customer",
            credit_limit_nanos=credit_limit_nanos,
            created_at=datetime.now(UTC),
        )
        .returning(accounts)
    )
    return _account(row.mappings().one())


def find_account(connection: Connection, name_or_id: str | int) -> Account:
    """Find a customer's account by its name or number. Raise ``LookupError`` if there is none."""
    condition: ColumnElement[bool] = accounts.c.name == str(name_or_id)
    if isinstance(name_or_id, int):
        condition = accounts.c.id == name_or_id
    elif name_or_id.isdecimal():
        condition = condition | (accounts.c.id == int(name_or_id))
    row = connection.execute(
        select(accounts).where(accounts.c.kind == "customer", condition).order_by(accounts.c.id)
    )
    found = row.mappings().first()
    if found is None:
        raise LookupError(f"there is no account {name_or_id!r}")
    return _account(found)


def list_accounts(connection: Connection) -> list[Account]:
    rows = connection.execute(
        select(accounts).where(accounts.c.kind == "customer").order_by(accounts.c.id)
    )
    return [_account(row) for row in rows.mappings()]


def _account(row: RowMapping) -> Account:
    return Account(
        id=row["id"],
        name=row["name"],
        status=row["status"],
        posted_nanos=row["posted_nanos"],
        held_nanos=row["held_nanos"],
        credit_limit_nanos=row["credit_limit_nanos"],
        created_at=row["created_at"],
    )

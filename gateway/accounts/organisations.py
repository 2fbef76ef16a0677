"""Organisations: accounts grouped under a parent, with budgets and statements of all together.

Credit and balances stay with the accounts. An account belongs to one organisation at a time; each
stay is a row, so that the statement of a past month has the accounts of that month.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, func, insert, select, update

from gateway.accounts.allotments import check_allotments
from gateway.accounts.locks import lock_accounts, lock_organisation
from gateway.checks.decoding import ID_MAX, read_id
from gateway.checks.entered import check_account_name
from gateway.tables.core import accounts
from gateway.tables.organisations import organisation_accounts, organisations


@dataclass(frozen=True, slots=True)
class Organisation:
    id: int
    name: str
    created_at: datetime


class OrganisationExists(Exception):
    """The name is that of another organisation."""


class AlreadyMember(Exception):
    """The account belongs to an organisation."""


def create_organisation(connection: Connection, name: str) -> Organisation:
    """Create an organisation without accounts. Raise ``OrganisationExists`` if the name is taken,
    ``ValueError`` if it is not valid."""
    _check_name(connection, name, None)
    made = insert(organisations).values(name=name, created_at=datetime.now(UTC))
    return _organisation(connection.execute(made.returning(organisations)).one())


def find_organisation(connection: Connection, name_or_id: str | int) -> Organisation:
    """Find an organisation by name, or by number, which is never a name. Raise ``LookupError``."""
    text = str(name_or_id)
    number = read_id(text.removeprefix("id:"))
    known = organisations.c.name == text
    if number is not None and 0 < number <= ID_MAX:
        known = organisations.c.id == number
    row = connection.execute(select(organisations).where(known)).first()
    if row is None:
        raise LookupError(f"unknown organisation {text!r}")
    return _organisation(row)


def list_organisations(
    connection: Connection, *, limit: int | None = None, after: int = 0
) -> list[Organisation]:
    """List organisations in order of their numbers, those greater than ``after``."""
    query = select(organisations).where(organisations.c.id > after).order_by(organisations.c.id)
    return [_organisation(row) for row in connection.execute(query.limit(limit))]


def rename_organisation(connection: Connection, organisation_id: int, name: str) -> Organisation:
    """Rename an organisation. Raise as ``create_organisation``."""
    _check_name(connection, name, organisation_id)
    made = update(organisations).where(organisations.c.id == organisation_id).values(name=name)
    return _organisation(connection.execute(made.returning(organisations)).one())


def add_account(
    connection: Connection, organisation_id: int, account_id: int, *, now: datetime | None = None
) -> None:
    """Add an account; requests that it sends from now on count in the organisation's budgets.

    Raise ``AlreadyMember`` if it belongs to an organisation, ``Overallotted`` if its budgets do not
    fit into the organisation's.
    """
    lock_accounts(connection, [account_id])
    lock_organisation(connection, organisation_id)
    other = connection.execute(
        select(organisations.c.name)
        .join(organisation_accounts, organisation_accounts.c.organisation_id == organisations.c.id)
        .where(_current(account_id))
    ).scalar()
    if other is not None:
        raise AlreadyMember(f"account {account_id} belongs to {other!r}; remove it there first")
    connection.execute(
        insert(organisation_accounts).values(
            organisation_id=organisation_id,
            account_id=account_id,
            joined_at=now or datetime.now(UTC),
        )
    )
    connection.execute(update(accounts).where(accounts.c.id == account_id).values(organised=True))
    check_allotments(connection, [organisation_id])


def remove_account(
    connection: Connection, organisation_id: int, account_id: int, *, now: datetime | None = None
) -> None:
    """Remove an account; its running requests count in the organisation's budgets until they end.

    Raise ``LookupError`` if it is not a member.
    """
    lock_accounts(connection, [account_id])
    lock_organisation(connection, organisation_id)
    left = connection.execute(
        update(organisation_accounts)
        .where(_current(account_id), organisation_accounts.c.organisation_id == organisation_id)
        .values(left_at=now or datetime.now(UTC))
    )
    if not left.rowcount:
        raise LookupError(f"account {account_id} is not a member of this organisation")


def accounts_at(
    connection: Connection, organisation_id: int, moment: datetime | None = None
) -> list[int]:
    """Return the accounts of an organisation just before a moment, or now; ordered by number."""
    table = organisation_accounts
    query = select(table.c.account_id).where(table.c.organisation_id == organisation_id)
    if moment is None:
        query = query.where(table.c.left_at.is_(None))
    else:
        query = query.where(
            table.c.joined_at < moment, func.coalesce(table.c.left_at >= moment, True)
        )
    return list(connection.scalars(query.order_by(table.c.account_id)))


def organisations_of(
    connection: Connection, account_ids: Collection[int]
) -> dict[int, Organisation]:
    """Return the organisations that accounts belong to; accounts without one are absent."""
    table = organisation_accounts
    rows = connection.execute(
        select(table.c.account_id, *organisations.c)
        .join(organisations, organisations.c.id == table.c.organisation_id)
        .where(table.c.account_id.in_(sorted(account_ids)), table.c.left_at.is_(None))
    )
    return {row.account_id: _organisation(row) for row in rows}


def _current(account_id: int) -> ColumnElement[bool]:
    """SQL condition: the stay of an account that has not ended."""
    table = organisation_accounts
    return and_(table.c.account_id == account_id, table.c.left_at.is_(None))


def _check_name(connection: Connection, name: str, organisation_id: int | None) -> None:
    check_account_name(name, what="organisation")
    known = select(organisations.c.id).where(organisations.c.name == name)
    other = connection.execute(known).scalar()
    if other is not None and other != organisation_id:
        raise OrganisationExists(f"the organisation {name!r} already exists")


def _organisation(row: Row[Any]) -> Organisation:
    return Organisation(row.id, row.name, row.created_at)

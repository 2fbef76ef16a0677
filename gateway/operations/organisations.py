"""Organisations: create, list, rename; their accounts and statements."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, Literal, TypedDict

from pydantic import ConfigDict
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account
from gateway.accounts.organisations import (
    Organisation,
    accounts_at,
    add_account,
    create_organisation,
    find_organisation,
    list_organisations,
    remove_account,
    rename_organisation,
)
from gateway.audit_log import Author, record
from gateway.billing.statements.organisation import (
    OrganisationStatement,
    lines_csv,
    organisation_statement,
)
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.operations.accounts import find_owner
from gateway.operations.bodies import Body, Name
from gateway.operations.budgets import BudgetView, of_organisation
from gateway.operations.invoices import PAGE_FORMATS, StatementView, page, statement_view
from gateway.operations.pages import cut_page, read_cursor
from gateway.operations.refusals import refusals, sentence
from gateway.pricing import NANOS_PER_CENT, format_usd
from gateway.settings import Settings

FORMATS: Final = ("csv", *PAGE_FORMATS)
"""Formats of a statement besides JSON."""


class OrganisationBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "acme-group"}]})

    name: Name


class OrganisationView(TypedDict):
    """A group of accounts. Credit and balances stay with the accounts."""

    object: Literal["organisation"]
    id: int
    name: str
    created_at: str


class OrganisationAccountView(TypedDict):
    id: int
    name: str
    status: str
    posted: str
    held: str
    available: str


class OrganisationDetailView(OrganisationView):
    """An organisation with its accounts, the sums of their balances, and its budgets."""

    accounts: list[OrganisationAccountView]
    posted: str
    held: str
    available: str
    budgets: list[BudgetView]


class AccountStatementView(StatementView):
    """The statement of one account of an organisation."""

    account_id: int


class OrganisationStatementView(TypedDict):
    """The statements of a month of all accounts of an organisation; a draft while one of them is.
    Each amount is the sum of theirs."""

    object: Literal["organisation.statement"]
    organisation: str
    month: str
    draft: bool
    opening_balance: str
    closing_balance: str
    sum: str
    carried_in: str
    carried_out: str
    total: str
    accounts: list[AccountStatementView]


@refusals()
def create(connection: Connection, author: Author, body: OrganisationBody) -> OrganisationView:
    made = create_organisation(connection, body.name)
    view = _view(made)
    record(connection, author, "organisation.create", _subject(made), after=view)
    return view


def list_page(
    connection: Connection, *, limit: int, cursor: str | None
) -> tuple[list[OrganisationView], str | None]:
    """List organisations in order of their numbers, and return the cursor of the next page."""
    after = read_cursor(cursor, "an organisation")
    found, more = cut_page(list_organisations(connection, limit=limit + 1, after=after), limit)
    return [_view(each) for each in found], more


def show(connection: Connection, organisation: str) -> OrganisationDetailView:
    found = find(connection, organisation)
    accounts = [find_account(connection, id) for id in accounts_at(connection, found.id)]
    return {
        **_view(found),
        "accounts": [_account_view(each) for each in accounts],
        "posted": format_usd(sum(each.posted_nanos for each in accounts)),
        "held": format_usd(sum(each.held_nanos for each in accounts)),
        "available": format_usd(sum(each.available_nanos for each in accounts)),
        "budgets": of_organisation(connection, found),
    }


@refusals()
def rename(
    connection: Connection, author: Author, organisation: str, body: OrganisationBody
) -> OrganisationView:
    found = find(connection, organisation)
    view = _view(rename_organisation(connection, found.id, body.name))
    before = _view(found)
    record(connection, author, "organisation.change", _subject(found), before=before, after=view)
    return view


@refusals()
def add(
    connection: Connection, author: Author, organisation: str, account: str
) -> OrganisationDetailView:
    """Add an account, which belongs to no other organisation."""
    found, owner = find(connection, organisation), find_owner(connection, account)
    add_account(connection, found.id, owner.id)
    after = {"account": owner.name}
    record(
        connection,
        author,
        "organisation.add",
        _subject(found),
        account_id=owner.id,
        after=after,
    )
    return show(connection, organisation)


@refusals()
def remove(
    connection: Connection, author: Author, organisation: str, account: str
) -> OrganisationDetailView:
    """Remove an account; its running requests count in the organisation's budgets until they
    end."""
    found, owner = find(connection, organisation), find_owner(connection, account)
    remove_account(connection, found.id, owner.id)
    before = {"account": owner.name}
    record(
        connection,
        author,
        "organisation.remove",
        _subject(found),
        account_id=owner.id,
        before=before,
    )
    return show(connection, organisation)


@refusals(param="month")
def statement_of(connection: Connection, organisation: str, month: str) -> OrganisationStatement:
    """Read or draft the statements of an organisation's accounts."""
    found = find(connection, organisation)
    return organisation_statement(connection, found, month, now=datetime.now(UTC))


def encode_statement(made: OrganisationStatement, settings: Settings, format: str) -> bytes:
    """Encode a statement in one of ``FORMATS``."""
    return lines_csv(made) if format == "csv" else page(made, settings, format)


def organisation_statement_view(made: OrganisationStatement) -> OrganisationStatementView:
    return {
        "object": "organisation.statement",
        "organisation": made.organisation.name,
        "month": made.month,
        "draft": made.draft,
        "opening_balance": format_usd(made.opening_nanos),
        "closing_balance": format_usd(made.closing_nanos),
        "sum": format_usd(made.sum_nanos),
        "carried_in": format_usd(made.carried_in_nanos),
        "carried_out": format_usd(made.carried_out_nanos),
        "total": format_usd(made.total_cents * NANOS_PER_CENT),
        "accounts": [
            {**statement_view(each), "account_id": each.account_id} for each in made.accounts
        ],
    }


def find(connection: Connection, organisation: str) -> Organisation:
    """Find an organisation by name or number. Raise ``NotFound``."""
    try:
        return find_organisation(connection, organisation)
    except LookupError as error:
        raise NotFound("organisation_not_found", sentence(error), param="organisation") from None


def account_ids(connection: Connection, organisation: str) -> Sequence[int]:
    """Return the accounts of an organisation. Raise ``NotFound``."""
    return accounts_at(connection, find(connection, organisation).id)


def _subject(organisation: Organisation) -> str:
    return f"organisation {organisation.id}"


def _view(organisation: Organisation) -> OrganisationView:
    return {
        "object": "organisation",
        "id": organisation.id,
        "name": organisation.name,
        "created_at": timestamp(organisation.created_at),
    }


def _account_view(account: Account) -> OrganisationAccountView:
    return {
        "id": account.id,
        "name": account.name,
        "status": account.status,
        "posted": format_usd(account.posted_nanos),
        "held": format_usd(account.held_nanos),
        "available": format_usd(account.available_nanos),
    }

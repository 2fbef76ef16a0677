"""Budgets of accounts and of organisations: create, list, change, end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, TypedDict

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names, find_account
from gateway.accounts.allotments import Share, allotments
from gateway.accounts.budgets import (
    Budget,
    BudgetState,
    Window,
    budget_states,
    change_budget,
    create_budget,
    create_organisation_budget,
    end_budget,
    find_budget,
    list_budgets,
    lock_budget,
)
from gateway.accounts.organisations import (
    Organisation,
    find_organisation,
    organisations_of,
)
from gateway.audit_log import Author, record
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.operations.bodies import Body, Id, Label, Name, UsdAmount
from gateway.operations.keys import own_key
from gateway.operations.limits import check_model
from gateway.operations.pages import cut_page, read_cursor
from gateway.operations.refusals import refusals
from gateway.pricing import format_usd


class NewBudgetBody(Body):
    """What every budget to be created has. Without model, it covers all of them together."""

    limit: UsdAmount
    window: Window
    hard: bool = True
    model: Name | None = None
    name: Label = ""
    tz: Annotated[str, Field(max_length=64)] | None = None


class BudgetBody(NewBudgetBody):
    """A budget to be created. Without key or model, it covers all of them together."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"account": "acme", "limit": "25.00", "window": "day", "name": "daily"}]
        },
    )

    account: Name | Id
    key: Id | None = None


class OrganisationBudgetBody(NewBudgetBody):
    """A budget of all accounts of an organisation together. ``overallot``: whether budgets of the
    accounts may sum to more."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"limit": "500", "window": "month", "name": "2026"}]},
    )

    overallot: bool = False


class KeyBudgetBody(NewBudgetBody):
    """A budget of one key, by its prefix or number, that an owner of the account creates."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"key": "tg_x4Lq81z", "limit": "5", "window": "day"}]},
    )

    key: Name | Id


class BudgetChange(Body):
    """Change of a budget; omitted fields keep their value. ``overallot`` is only for those of
    organisations."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"limit": "40.00"}]})

    limit: UsdAmount | None = None
    hard: bool | None = None
    overallot: bool | None = None


class BudgetView(TypedDict):
    """A budget and the usage of its current window. Either ``account`` or ``organisation`` is null;
    the budgets of an organisation's accounts take up ``allotted``, which an account does not see.
    """

    object: Literal["budget"]
    id: int
    account: str | None
    organisation: str | None
    key: int | None
    model: str | None
    name: str
    window: Window
    tz: str
    hard: bool
    starts_at: str | None
    ends_at: str | None
    limit: str
    spent: str
    held: str
    remaining: str
    exceeded: bool
    overallot: bool | None
    allotted: str | None
    unallotted: str | None
    created_at: str


@refusals()
def create_for_organisation(
    connection: Connection, author: Author, organisation: str, body: OrganisationBudgetBody
) -> BudgetView:
    check_model(connection, body.model)
    made = create_organisation_budget(
        connection,
        find_organisation(connection, organisation).id,
        body.limit,
        window=body.window,
        hard=body.hard,
        overallot=body.overallot,
        model=body.model,
        name=body.name,
        tz=body.tz,
    )
    view = _view(connection, made)
    record(connection, author, "budget.create", _subject(made), after=view)
    return view


@refusals()
def create(connection: Connection, author: Author, body: BudgetBody) -> BudgetView:
    check_model(connection, body.model)
    account_id = find_account(connection, body.account).id
    return _create(connection, author, account_id, body.key, body)


@refusals()
def create_for_key(
    connection: Connection, author: Author, account_id: int, body: KeyBudgetBody
) -> BudgetView:
    """Create a budget of a key of the caller's account."""
    check_model(connection, body.model)
    key_id = own_key(connection, account_id, str(body.key))
    return _create(connection, author, account_id, key_id, body)


def _create(
    connection: Connection,
    author: Author,
    account_id: int,
    key_id: int | None,
    body: NewBudgetBody,
) -> BudgetView:
    made = create_budget(
        connection,
        account_id,
        body.limit,
        window=body.window,
        hard=body.hard,
        key_id=key_id,
        model=body.model,
        name=body.name,
        tz=body.tz,
    )
    view = _view(connection, made)
    record(connection, author, "budget.create", _subject(made), account_id=account_id, after=view)
    return view


def check_key_budget(connection: Connection, account_id: int, budget_id: int) -> None:
    """Raise ``NotFound`` unless a budget is that of a key of an account, whose owners manage it."""
    with contextlib.suppress(LookupError):
        found = find_budget(connection, budget_id)
        if found.account_id == account_id and found.key_id is not None:
            return
    raise NotFound("not_found", f"No key of this account has the budget {budget_id}.")


@refusals()
def list_page(
    connection: Connection,
    *,
    account: str | None,
    organisation: str | None,
    key: int | None,
    model: str | None,
    limit: int,
    cursor: str | None,
) -> tuple[list[BudgetView], str | None]:
    """List the budgets in force in order of their numbers, and return the cursor of the next
    page."""
    after = read_cursor(cursor, "a budget")
    of = None if organisation is None else find_organisation(connection, organisation).id
    found = list_budgets(
        connection,
        None if account is None else find_account(connection, account).id,
        organisation_id=of,
        key_id=key,
        model=model,
        limit=limit + 1,
        after=after,
    )
    page, more = cut_page(found, limit)
    return _views(connection, page), more


def of_account(connection: Connection, owner: Account) -> list[BudgetView]:
    """List the budgets that bound an account: its own, and those of its organisation."""
    found = list_budgets(connection, owner.id)
    organisation = organisations_of(connection, [owner.id]).get(owner.id)
    if organisation is not None:
        found += list_budgets(connection, organisation_id=organisation.id)
    views = _views(connection, found)
    for view in views:
        view["allotted"] = view["unallotted"] = None
    return views


def of_account_itself(connection: Connection, account_id: int) -> list[BudgetView]:
    """List the budgets of an account as a whole: none of its keys or of its organisation."""
    found = list_budgets(connection, account_id)
    return _views(connection, [each for each in found if each.key_id is None])


def of_organisation(connection: Connection, organisation: Organisation) -> list[BudgetView]:
    return _views(connection, list_budgets(connection, organisation_id=organisation.id))


@refusals()
def change(
    connection: Connection, author: Author, budget_id: int, body: BudgetChange
) -> BudgetView:
    before = _view(connection, lock_budget(connection, budget_id))
    changed = change_budget(
        connection,
        budget_id,
        limit_nanos=body.limit,
        hard=body.hard,
        overallot=body.overallot,
    )
    view = _view(connection, changed)
    record(
        connection,
        author,
        "budget.change",
        _subject(changed),
        account_id=changed.account_id,
        before=before,
        after=view,
    )
    return view


@refusals()
def end(connection: Connection, author: Author, budget_id: int) -> BudgetView:
    ended = end_budget(connection, budget_id)
    view = _view(connection, ended)
    record(
        connection, author, "budget.end", _subject(ended), account_id=ended.account_id, before=view
    )
    return view


def _subject(budget: Budget) -> str:
    return f"budget {budget.id}"


def _view(connection: Connection, budget: Budget) -> BudgetView:
    return _views(connection, [budget])[0]


def _views(connection: Connection, found: Sequence[Budget]) -> list[BudgetView]:
    accounts = {budget.account_id for budget in found if budget.account_id is not None}
    owners = {one.organisation_id for one in found if one.organisation_id is not None}
    names = account_names(connection, accounts)
    allotted = allotments(connection, owners) if owners else {}
    return [
        _budget_view(state, account=names.get(state.budget.account_id or 0), allotted=allotted)
        for state in budget_states(connection, found, datetime.now(UTC))
    ]


def _budget_view(
    state: BudgetState, *, account: str | None, allotted: Mapping[Share, int]
) -> BudgetView:
    budget, taken = state.budget, None
    if budget.organisation_id is not None:
        share = Share(budget.organisation_id, budget.window, budget.model)
        taken = allotted.get(share, 0)
    return {
        "object": "budget",
        "id": budget.id,
        "account": account,
        "organisation": budget.organisation,
        "key": budget.key_id,
        "model": budget.model,
        "name": budget.name,
        "window": budget.window,
        "tz": budget.tz,
        "hard": budget.hard,
        "starts_at": timestamp(state.starts_at) if budget.window != "total" else None,
        "ends_at": timestamp(state.ends_at) if state.ends_at else None,
        "limit": format_usd(budget.limit_nanos),
        "spent": format_usd(state.spent_nanos),
        "held": format_usd(state.held_nanos),
        "remaining": format_usd(state.remaining_nanos),
        "exceeded": state.remaining_nanos <= 0,
        "overallot": None if taken is None else budget.overallot,
        "allotted": None if taken is None else format_usd(taken),
        "unallotted": None if taken is None else format_usd(budget.limit_nanos - taken),
        "created_at": timestamp(budget.created_at),
    }

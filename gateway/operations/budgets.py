"""Budgets: create, list, change, end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, TypedDict

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names, find_account
from gateway.accounts.budgets import (
    Budget,
    BudgetState,
    Window,
    budget_states,
    change_budget,
    create_budget,
    end_budget,
    find_budget,
    list_budgets,
)
from gateway.accounts.locks import lock_accounts
from gateway.audit_log import Author, record
from gateway.checks.moments import timestamp
from gateway.operations.bodies import Body, Id, Label, Name, UsdAmount
from gateway.operations.limits import check_model
from gateway.operations.pages import cut_page, read_cursor
from gateway.operations.refusals import refusals
from gateway.pricing import format_usd


class BudgetBody(Body):
    """A budget to be created. Without key or model, it covers all of them together."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"account": "acme", "limit": "25.00", "window": "day", "name": "daily"}]
        },
    )

    account: Name | Id
    limit: UsdAmount
    window: Window
    hard: bool = True
    key: Id | None = None
    model: Name | None = None
    name: Label = ""
    tz: Annotated[str, Field(max_length=64)] | None = None


class BudgetChange(Body):
    """Change of a budget; omitted fields keep their value."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"limit": "40.00"}]})

    limit: UsdAmount | None = None
    hard: bool | None = None


class BudgetView(TypedDict):
    """A budget and the usage of its current window."""

    object: Literal["budget"]
    id: int
    account: str
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
    created_at: str


@refusals()
def create(connection: Connection, author: Author, body: BudgetBody) -> BudgetView:
    check_model(connection, body.model)
    made = create_budget(
        connection,
        find_account(connection, body.account).id,
        body.limit,
        window=body.window,
        hard=body.hard,
        key_id=body.key,
        model=body.model,
        name=body.name,
        tz=body.tz,
    )
    view = _view(connection, made)
    record(
        connection, author, "budget.create", _subject(made), account_id=made.account_id, after=view
    )
    return view


@refusals()
def list_page(
    connection: Connection,
    *,
    account: str | None,
    key: int | None,
    model: str | None,
    limit: int,
    cursor: str | None,
) -> tuple[list[BudgetView], str | None]:
    """List the budgets in force in order of their numbers, and return the cursor of the next
    page."""
    after = read_cursor(cursor, "a budget")
    found = list_budgets(
        connection,
        None if account is None else find_account(connection, account).id,
        key_id=key,
        model=model,
        limit=limit + 1,
        after=after,
    )
    page, more = cut_page(found, limit)
    return _views(connection, page), more


def of_account(connection: Connection, owner: Account) -> list[BudgetView]:
    return _views(connection, list_budgets(connection, owner.id))


@refusals()
def change(
    connection: Connection, author: Author, budget_id: int, body: BudgetChange
) -> BudgetView:
    lock_accounts(connection, [find_budget(connection, budget_id).account_id])
    before = _view(connection, find_budget(connection, budget_id))
    changed = change_budget(connection, budget_id, limit_nanos=body.limit, hard=body.hard)
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
    names = account_names(connection, {budget.account_id for budget in found})
    states = budget_states(connection, found, datetime.now(UTC))
    return [_budget_view(state, account=names[state.budget.account_id]) for state in states]


def _budget_view(state: BudgetState, *, account: str) -> BudgetView:
    budget = state.budget
    return {
        "object": "budget",
        "id": budget.id,
        "account": account,
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
        "created_at": timestamp(budget.created_at),
    }

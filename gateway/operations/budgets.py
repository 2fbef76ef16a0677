"""Budgets: create, list, change, end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, TypedDict

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account, list_accounts
from gateway.accounts.budgets import (
    Budget,
    BudgetState,
    Window,
    budget_states,
    change_budget,
    create_budget,
    end_budget,
    list_budgets,
)
from gateway.checks.moments import timestamp
from gateway.operations.bodies import Body, Id, Label, Name, UsdAmount
from gateway.operations.limits import check_model
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
def create(connection: Connection, body: BudgetBody) -> BudgetView:
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
    return _view(connection, made)


@refusals()
def list_all(connection: Connection, account: str | None) -> list[BudgetView]:
    """List the budgets in force, of one account or of all."""
    if account is not None:
        return of_account(connection, find_account(connection, account))
    return _views(connection, list_accounts(connection), list_budgets(connection))


def of_account(connection: Connection, owner: Account) -> list[BudgetView]:
    return _views(connection, [owner], list_budgets(connection, owner.id))


@refusals()
def change(connection: Connection, budget_id: int, body: BudgetChange) -> BudgetView:
    changed = change_budget(connection, budget_id, limit_nanos=body.limit, hard=body.hard)
    return _view(connection, changed)


@refusals()
def end(connection: Connection, budget_id: int) -> BudgetView:
    return _view(connection, end_budget(connection, budget_id))


def _view(connection: Connection, budget: Budget) -> BudgetView:
    return _views(connection, [find_account(connection, budget.account_id)], [budget])[0]


def _views(
    connection: Connection, owners: Sequence[Account], found: Sequence[Budget]
) -> list[BudgetView]:
    names = {owner.id: owner.name for owner in owners}
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

"""Budgets and rate limits of an account: what will be refused soon, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.accounts.budgets import WINDOWS
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.guards import needs
from gateway.console.queries import FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.scope import one_account
from gateway.console.views.budgets import budget_row
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound, TollgateError
from gateway.operations import budgets, limits
from gateway.operations.budgets import BudgetView
from gateway.operations.limits import RateLimitView


class LimitPages(Controller):
    path = "/limits"

    @get(guards=[needs("budgets.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _limits_page(request, visitor)

    @post(guards=[needs("budgets.write")])
    async def create(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, named = await read_form(request), Query(request).text("account")
        try:

            def make(connection: Connection) -> Account:
                account = one_account(connection, visitor, named)
                _create(connection, visitor, account, form)
                return account

            account = await request.services.database.write(make)
        except TollgateError as error:
            return await _limits_page(request, visitor, form.values(), error)
        return see_other(f"/console/limits?account=id:{account.id}")

    @post("/{budget_id:int}", guards=[needs("budgets.write")])
    async def change(
        self, request: ApiRequest, visitor: CurrentVisitor, budget_id: FromPath[int]
    ) -> Response[Any]:
        form, named = await read_form(request), Query(request).text("account")
        try:
            body = read_body(budgets.BudgetChange, {"limit": form.amount("limit") or ""})

            def alter(connection: Connection) -> Account:
                account = _of(connection, visitor, named, budget_id)
                budgets.change(connection, visitor.author(), budget_id, body)
                return account

            account = await request.services.database.write(alter)
        except TollgateError as error:
            return await _limits_page(request, visitor, None, error)
        return see_other(f"/console/limits?account=id:{account.id}")

    @post("/{budget_id:int}/end", guards=[needs("budgets.write")])
    async def end(
        self, request: ApiRequest, visitor: CurrentVisitor, budget_id: FromPath[int]
    ) -> Redirect:
        named = Query(request).text("account")

        def finish(connection: Connection) -> Account:
            account = _of(connection, visitor, named, budget_id)
            budgets.end(connection, visitor.author(), budget_id)
            return account

        account = await request.services.database.write(finish)
        return see_other(f"/console/limits?account=id:{account.id}")


def _create(
    connection: Connection, visitor: Visitor, account: Account, form: FormValues
) -> BudgetView:
    """Create a budget: roles of the installation any, owners one of a key."""
    sent: dict[str, Any] = {
        "limit": form.amount("limit") or "",
        "window": form.text("window"),
        "hard": form.text("hard") is not None,
        "name": form.text("name") or "",
    }
    if (model := form.text("model")) is not None:
        sent["model"] = model
    key = form.number("key")
    if visitor.role is None:
        body = read_body(budgets.KeyBudgetBody, {**sent, "key": key})
        return budgets.create_for_key(connection, visitor.author(), account.id, body)
    given = {**sent, "account": account.id, **({} if key is None else {"key": key})}
    return budgets.create(connection, visitor.author(), read_body(budgets.BudgetBody, given))


def _of(connection: Connection, visitor: Visitor, named: str | None, budget_id: int) -> Account:
    """Return the account whose budget is changed. Raise ``NotFound`` unless the visitor may."""
    account = one_account(connection, visitor, named)
    if visitor.role is None:
        budgets.check_key_budget(connection, account.id, budget_id)
    elif all(each["id"] != budget_id for each in budgets.of_account(connection, account)):
        raise NotFound("not_found", f"{account.name} has no budget {budget_id}.")
    return account


async def _limits_page(
    request: ApiRequest,
    visitor: Visitor,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    named = Query(request).text("account")

    def read(connection: Connection) -> tuple[Account, list[BudgetView], list[RateLimitView]]:
        account = one_account(connection, visitor, named)
        found = budgets.of_account(connection, account)
        return account, found, limits.of_account(connection, account)

    account, found, rates = await request.services.database.report(
        read, account_id=visitor.account_id
    )
    rows = [budget_row(each) for each in found]
    return await page(
        request,
        visitor,
        "limits.html",
        title=_title(account, sum(row.is_used_up for row in rows)),
        status=error.http_status if error else 200,
        account=account,
        rows=rows,
        rates=rates,
        windows=WINDOWS,
        values=values or {"window": "day", "hard": "yes"},
        problems=problems_of(error),
        mistake=error.message if error else None,
        may_write=visitor.may("budgets.write", account.id),
    )


def _title(account: Account, used_up: int) -> str:
    if not used_up:
        return f"No budget of {account.name} is used up"
    return f"{used_up} budget{'' if used_up == 1 else 's'} of {account.name} used up"


HANDLERS: Final[list[Any]] = [LimitPages]

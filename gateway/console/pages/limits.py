"""Budgets, rate limits and storage of an account: what will be refused soon, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.accounts.budgets import WINDOWS
from gateway.accounts.cancelled import CancelledTime
from gateway.accounts.limits import Limit, find_limit, list_limits
from gateway.accounts.rates import LimitUsage, Rate, rates_of
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.checks.decoding import read_id
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.queries import FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.running.asking import asked
from gateway.console.scope import one_account
from gateway.console.views.limits import budget_row, entered_values, limit_rows
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound, TollgateError, Unavailable
from gateway.ledger.concurrency import open_by_key
from gateway.operations import budgets, limits, storage
from gateway.operations.budgets import BudgetView
from gateway.operations.limits import RateLimitBody, RateLimitView
from gateway.operations.pages import cut_places, read_place
from gateway.operations.storage import StorageLimitBody, StorageView

NUMBERS: Final = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent",
    "cancelled_seconds_per_hour",
)
FORMS: Final = ("budget", "rate", "storage")
LISTS: Final = (
    ListColumns(
        "budgets",
        {
            "of": "Of",
            "bar": "Used as a bar",
            "spent": "Spent",
            "held": "Held",
            "limit": "Limit",
            "resets": "Resets",
        },
    ),
    ListColumns(
        "rates",
        {
            "model": "Model",
            "requests": "Requests a minute",
            "tokens": "Tokens a minute",
            "concurrent": "At a time",
            "cancelled": "Cancelled, s an hour",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class _Found:
    account: Account
    budgets: Sequence[BudgetView]
    limits: Sequence[Limit]
    more: str | None
    """The cursor of the next page of limits."""
    chosen: Limit | None
    """The limit that the address names, to be changed."""
    opened: Mapping[tuple[int, str], int]
    storage: StorageView


class LimitPages(Controller):
    path = "/limits"

    @get(guards=[needs("budgets.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _limits_page(request, visitor)

    @post("/rates", guards=[needs("limits.write")])
    async def set_rates(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, named = await read_form(request), Query(request).text("account")
        try:
            numbers = {name: form.number(name) for name in ("key", *NUMBERS)}
            sent = {"model": form.text("model"), **numbers}
            author = visitor.author(form.text("reason") or "")

            def put(connection: Connection) -> Account:
                account = one_account(connection, visitor, named)
                given = {name: value for name, value in sent.items() if value is not None}
                body = read_body(RateLimitBody, {"account": account.id, **given})
                limits.put(connection, author, body)
                return account

            account = await request.services.database.write(put)
        except TollgateError as error:
            return await _limits_page(request, visitor, form.values(), error, of="rate")
        return see_other(f"/console/limits?account=id:{account.id}#rates")

    @get("/rates/remove", guards=[needs("limits.write")])
    async def removal(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        """Show what removing a limit will do."""
        query, settings = Query(request), request.services.settings
        key, model = _place(query)

        def read(connection: Connection) -> tuple[Account, RateLimitView | None]:
            account = one_account(connection, visitor, query.text("account"))
            return account, limits.find(connection, account, key=key, model=model)

        account, limit = await request.services.database.read(read)
        if limit is None:
            raise NotFound("not_found", f"{account.name} has no such limit.")
        return await page(
            request,
            visitor,
            "limit_remove.html",
            title=f"Remove a limit of {account.name}",
            account=account,
            limit=limit,
            default=settings.key_concurrent if key else settings.account_concurrent,
            cancelled=settings.cancelled_seconds_per_hour,
        )

    @post("/rates/remove", guards=[needs("limits.write")])
    async def remove_rates(self, request: ApiRequest, visitor: CurrentVisitor) -> Redirect:
        query, form = Query(request), await read_form(request)
        author, (key, model) = visitor.author(form.text("reason") or ""), _place(query)

        def drop(connection: Connection) -> Account:
            account = one_account(connection, visitor, query.text("account"))
            limits.remove(connection, author, f"id:{account.id}", key=key, model=model)
            return account

        account = await request.services.database.write(drop)
        return see_other(f"/console/limits?account=id:{account.id}#rates")

    @post("/storage", guards=[needs("limits.write")])
    async def set_storage(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, named = await read_form(request), Query(request).text("account")
        settings = request.services.settings
        try:
            sent = {"files": form.number("files"), "bytes": form.number("bytes")}
            author = visitor.author(form.text("reason") or "")

            def put(connection: Connection) -> Account:
                account = one_account(connection, visitor, named)
                body = read_body(StorageLimitBody, {"account": account.id, **sent})
                storage.put(connection, author, body, settings)
                return account

            account = await request.services.database.write(put)
        except TollgateError as error:
            return await _limits_page(request, visitor, form.values(), error, of="storage")
        return see_other(f"/console/limits?account=id:{account.id}#storage")

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


def _place(query: Query) -> tuple[int | None, str | None]:
    """Return the key and the model of a limit. Raise ``NotFound`` if the key is not a number."""
    key = query.text("key")
    if key is not None and read_id(key) is None:
        raise NotFound("not_found", f"There is no key {key!r}.")
    return None if key is None else read_id(key), query.text("model")


async def _limits_page(
    request: ApiRequest,
    visitor: Visitor,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
    *,
    of: Literal["budget", "rate", "storage"] = "budget",
) -> Response[str]:
    """Show the page; ``of`` is the form whose mistake is ``error``."""
    query, services = Query(request), request.services
    named, (key, model) = query.text("account"), _place(query)

    def read(connection: Connection) -> _Found:
        account = one_account(connection, visitor, named)
        after, rows = read_place(query.text("cursor")), query.rows
        shown, more = cut_places(
            list_limits(connection, account.id, limit=rows + 1, after=after), rows, limits.place_of
        )
        return _Found(
            account,
            budgets.of_account(connection, account),
            shown,
            more,
            find_limit(connection, account.id, key_id=key, model=model),
            open_by_key(connection, account.id),
            storage.of_account(connection, account, services.settings),
        )

    found = await services.database.report(read, account_id=visitor.account_id)
    account = found.account
    rows = [budget_row(each, account.name) for each in found.budgets]
    used, cancelled_s = await _use(request, found)
    rates = limit_rows(found.limits, used=used, opened=found.opened, cancelled_s=cancelled_s)
    return await page(
        request,
        visitor,
        "limits.html",
        lists=LISTS,
        title=_title(account, sum(row.is_used_up for row in rows), sum(e.is_full for e in rates)),
        status=error.http_status if error else 200,
        account=account,
        rows=rows,
        rates=rates,
        pager=query.pages(found.more),
        use_is_known=used is not None,
        storage=found.storage,
        windows=WINDOWS,
        models=services.live.names(),
        values=values if values and of == "budget" else {"window": "day", "hard": "yes"},
        rate_values=values if values and of == "rate" else _chosen(found.chosen, key, model),
        storage_values=values or {} if of == "storage" else {},
        problems={name: problems_of(error) if name == of else {} for name in FORMS},
        mistakes={name: error.message if error and name == of else None for name in FORMS},
        may_write=visitor.may("budgets.write", account.id),
        may_limit=visitor.may("limits.write", account.id),
    )


async def _use(
    request: ApiRequest, found: _Found
) -> tuple[Sequence[LimitUsage] | None, int | None]:
    """Ask the queue server what is used of an account's limits; None if it does not answer."""
    services = request.services
    rates = rates_of(found.limits)
    if not any(each.cancelled_seconds_per_hour for each in found.limits):
        return (await _looked(request, rates)), None
    server = services.queue_server
    cancelled = CancelledTime(server.redis, namespace=server.namespace, default_s=None)
    return await _looked(request, rates), await asked(cancelled.used_s(found.account.id))


async def _looked(request: ApiRequest, rates: Sequence[Rate]) -> Sequence[LimitUsage] | None:
    try:
        return await asked(request.services.rates.look(rates))
    except Unavailable:
        return None


def _chosen(known: Limit | None, key: int | None, model: str | None) -> Mapping[str, str]:
    """Return the values of the limit that the address names, to change it."""
    if known is None:
        return {"key": "" if key is None else str(key), "model": model or ""}
    return entered_values(known)


def _title(account: Account, used_up: int, full: int) -> str:
    if not used_up and not full:
        return f"No limit of {account.name} is used up"
    parts = [(used_up, "budget"), (full, "rate limit")]
    words = " and ".join(f"{n} {name}{'' if n == 1 else 's'}" for n, name in parts if n)
    return f"{words} of {account.name} used up"


HANDLERS: Final[list[Any]] = [LimitPages]

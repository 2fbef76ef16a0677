"""Who can see what was said in an account, and whether its inputs are kept: the owner decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.accounts.content_grants import HOURS, ContentAsk, ContentGrant, grants_of, open_asks
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.guards import needs
from gateway.console.queries import FormValues, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.scope import one_account
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import TollgateError
from gateway.operations import accounts
from gateway.operations.accounts import OwnAccountChange, find_owner
from gateway.operations.entrance import content_grants
from gateway.operations.entrance.content_grants import AskBody, GrantBody


class AccessPages(Controller):
    path = "/"

    @get("/access", guards=[needs("access.read")])
    async def own(self, request: ApiRequest, visitor: CurrentVisitor) -> Redirect:
        account = await request.services.database.read(
            lambda connection: one_account(connection, visitor, None)
        )
        return see_other(_path(account.id))

    @get("/accounts/{account_id:int}/access", guards=[needs("access.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, account_id: FromPath[int]
    ) -> Response[str]:
        return await _page(request, visitor, account_id)

    @post("/accounts/{account_id:int}/access", guards=[needs("access.write")])
    async def give(
        self, request: ApiRequest, visitor: CurrentVisitor, account_id: FromPath[int]
    ) -> Response[Any]:
        form = await read_form(request)
        try:
            sent = {"hours": form.number("hours"), "reason": form.text("reason")}
            body = read_body(GrantBody, {k: v for k, v in sent.items() if v is not None})
            await request.services.database.write(
                lambda each: content_grants.grant(each, visitor.author(), account_id, body)
            )
        except TollgateError as error:
            return await _page(request, visitor, account_id, form, error)
        return see_other(_path(account_id))

    @post("/accounts/{account_id:int}/access/end", guards=[needs("access.write")])
    async def end(
        self, request: ApiRequest, visitor: CurrentVisitor, account_id: FromPath[int]
    ) -> Redirect:
        await request.services.database.write(
            lambda each: content_grants.end_grant(each, visitor.author(), account_id)
        )
        return see_other(_path(account_id))

    @post("/accounts/{account_id:int}/access/decline", guards=[needs("access.write")])
    async def decline(
        self, request: ApiRequest, visitor: CurrentVisitor, account_id: FromPath[int]
    ) -> Redirect:
        await request.services.database.write(
            lambda each: content_grants.decline(each, visitor.author(), account_id)
        )
        return see_other(_path(account_id))

    @post("/accounts/{account_id:int}/access/ask", guards=[needs("access.ask")])
    async def ask(
        self, request: ApiRequest, visitor: CurrentVisitor, account_id: FromPath[int]
    ) -> Response[Any]:
        form = await read_form(request)
        because = form.text("request")
        try:
            body = read_body(AskBody, {"reason": form.text("reason") or ""})

            def ask(connection: Connection) -> None:
                account = find_owner(connection, account_id)
                author = visitor.author()
                content_grants.ask_for(connection, author, account, body, request_id=because)

            await request.services.database.write(ask)
        except TollgateError as error:
            return await _page(request, visitor, account_id, form, error)
        return see_other(f"/console/requests/{because}#made" if because else _path(account_id))

    @post("/accounts/{account_id:int}/access/inputs", guards=[needs("access.write")])
    async def keep_inputs(
        self, request: ApiRequest, visitor: CurrentVisitor, account_id: FromPath[int]
    ) -> Redirect:
        form = await read_form(request)
        body = OwnAccountChange(keep_inputs=form.text("keep") == "yes")
        await request.services.database.write(
            lambda each: accounts.change_own(each, visitor.author(), account_id, body)
        )
        return see_other(_path(account_id))


def _path(account_id: int) -> str:
    return f"/console/accounts/{account_id}/access"


async def _page(
    request: ApiRequest,
    visitor: Visitor,
    account_id: int,
    form: FormValues | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    now = datetime.now(UTC)

    def read(
        connection: Connection,
    ) -> tuple[Account, list[ContentGrant], Sequence[ContentAsk]]:
        account = find_owner(connection, account_id)
        asks = open_asks(connection, [account.id], now=now)
        return account, grants_of(connection, account.id), asks

    account, grants, asks = await request.services.database.read(read)
    active = next((each for each in grants if each.ends_at > now), None)
    values: Mapping[str, str] = form.values() if form else {"hours": "1"}
    return await page(
        request,
        visitor,
        "stored/access.html",
        title=_title(account, active),
        status=error.http_status if error else 200,
        account=account,
        active=active,
        grants=grants,
        asks=asks,
        hours=[(str(each), f"{each} hour{'' if each == 1 else 's'}") for each in HOURS],
        kept_hours=request.services.settings.output_retention_hours,
        values=values,
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


def _title(account: Account, active: ContentGrant | None) -> str:
    if active is None:
        return f"Only the people of {account.name} see what was said"
    return f"Operators see what was said in {account.name} for now"


HANDLERS: Final[list[Any]] = [AccessPages]

"""Webhooks: what became of each delivery, sending one again, and the secret that signs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast, get_args

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names
from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs, proved
from gateway.console.once import author_once, new_once
from gateway.console.queries import ROWS, Query, read_form
from gateway.console.rendering import page
from gateway.console.scope import account_of, one_account
from gateway.console.views.files import TableFile
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound
from gateway.ids import is_request_id
from gateway.operations import webhooks
from gateway.webhooks.deliveries import Delivery, Status, find_delivery, list_deliveries

STATUSES: Final[tuple[Status, ...]] = get_args(Status)
EXAMPLE: Final = "https://example.com/hook"
FILE_COLUMNS: Final = (
    *("request_id", "account_id", "url", "status", "queued_at", "due_at", "ended_at", "attempts"),
)
LISTS: Final = (
    ListColumns(
        "webhooks",
        {
            "account": "Account",
            "state": "State",
            "to": "To",
            "attempts": "Attempts",
            "answer": "Last answer",
            "next": "Next try",
        },
    ),
)


class WebhookPages(Controller):
    path = "/webhooks"

    @get(guards=[needs("webhooks.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        status = cast("Status | None", query.one_of("status", STATUSES))

        def read(
            connection: Connection,
        ) -> tuple[Account | None, Sequence[Delivery], Mapping[int, str]]:
            account = account_of(connection, visitor, query.text("account"))
            found = list_deliveries(
                connection,
                account_id=account.id if account else None,
                limit=query.rows + 1,
                status=status,
                before=query.text("cursor"),
            )
            return account, found, account_names(connection, {each.account_id for each in found})

        account, found, names = await request.services.database.report(
            read, account_id=visitor.account_id
        )
        shown = found[: query.rows]
        return await page(
            request,
            visitor,
            "stored/webhooks.html",
            lists=LISTS,
            title=_title(account, shown, status),
            account=account,
            as_file=TableFile(
                "webhooks", FILE_COLUMNS, shown, names, is_cut=len(found) > len(shown)
            ),
            rows=shown,
            names=names,
            statuses=STATUSES,
            filters=query.values,
            narrowed=bool(query.narrowed - {"account"}),
            may_write=visitor.may("webhooks.write", account.id if account else None),
            base_url=str(request.base_url).rstrip("/"),
            example=EXAMPLE,
            once=new_once(),
            pager=query.pages(shown[-1].request_id if len(found) > ROWS else None),
        )

    @post("/{request_id:str}/resend", guards=[needs("webhooks.write")])
    async def resend(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Redirect:
        def send(connection: Connection) -> None:
            _check_delivery(connection, visitor, request_id)
            webhooks.resend(connection, visitor.author(), request_id, account_id=None)

        await request.services.database.write(send)
        return see_other(f"/console/requests/{request_id}#webhook")

    @post("/secret", guards=[needs("webhooks.write"), proved])
    async def secret(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, named = await read_form(request), Query(request).text("account")
        author, pepper = author_once(visitor, form), request.services.pepper

        def reveal(connection: Connection) -> tuple[Account, str | None]:
            account = one_account(connection, visitor, named)
            if not visitor.may("webhooks.write", account.id):
                raise NotFound("not_found", "There is no such account.")
            return account, webhooks.reveal_secret(connection, author, account.id, pepper=pepper)

        account, found = await request.services.database.write(reveal)
        if found is None:
            # The page was reloaded, and sent its form again.
            return see_other("/console/webhooks")
        return await page(
            request,
            visitor,
            "stored/webhook_secret.html",
            title=f"The secret that signs the webhooks of {account.name}",
            secret=found,
            account=account,
        )


def _check_delivery(connection: Connection, visitor: Visitor, request_id: str) -> None:
    """Raise ``NotFound`` unless there is a delivery that the visitor may send again."""
    known = is_request_id(request_id)
    found = find_delivery(connection, request_id, account_id=None) if known else None
    if found is None or not visitor.may("webhooks.write", found.account_id):
        raise NotFound("delivery_not_found", "There is no such delivery.")


def _title(account: Account | None, found: Sequence[Delivery], status: Status | None) -> str:
    of = f" of {account.name}" if account else ""
    failed = sum(each.status == "failed" for each in found)
    if failed and status is None:
        return f"{failed} of the latest webhooks{of} could not be delivered"
    return f"Webhooks{of}"


HANDLERS: Final[list[Any]] = [WebhookPages]

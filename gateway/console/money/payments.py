"""Payments: top-ups through the provider, and whether they have come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names
from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import address_of, needs
from gateway.console.queries import ROWS, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.scope import account_of, one_account
from gateway.console.views.files import TableFile
from gateway.console.views.formats import usd
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound, TollgateError
from gateway.payments.checkout import TopUp, begin_payment, read_amount
from gateway.payments.payments import Payment, list_payments, new_payment_id

STATES: Final[Mapping[str, tuple[str, str]]] = {
    # How a state reads, and its kind.
    "open": ("not paid yet", "open"),
    "paid": ("booked", "good"),
    "expired": ("expired", "idle"),
    "failed": ("failed", "bad"),
    "refunded": ("refunded", "warn"),
    "disputed": ("disputed", "warn"),
}
LISTS: Final = (
    ListColumns(
        "payments",
        {
            "account": "Account",
            "state": "State",
            "amount": "Amount, $",
            "returned": "Returned, $",
            "provider": "Provider",
            "reference": "Reference",
        },
    ),
)


class PaymentPages(Controller):
    path = "/payments"

    @get(guards=[needs("payments.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _list_page(request, visitor)

    @post(guards=[needs("payments.write")])
    async def top_up(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, services = await read_form(request), request.services
        try:
            amount = read_amount(form.amount("amount") or "", services.settings)
            account = await services.database.read(
                lambda connection: one_account(connection, visitor, None)
            )
            id, origin = new_payment_id(), address_of(request).origin
            wanted = TopUp(
                payment_id=id,
                account_id=account.id,
                account=account.name,
                amount_nanos=amount,
                success_url=f"{origin}/console/payments/{id}",
                cancel_url=f"{origin}/console/payments",
            )
            _, url = await begin_payment(
                services.database, services.payment_provider, wanted, author=visitor.author()
            )
        except TollgateError as error:
            return await _list_page(request, visitor, form.values(), error)
        return see_other(url)

    @get("/{payment_id:str}", guards=[needs("payments.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, payment_id: FromPath[str]
    ) -> Response[str]:
        def read(connection: Connection) -> tuple[Payment, str] | None:
            own = None if visitor.role else visitor.account_id
            if visitor.role is None and own is None:
                return None
            found = list_payments(connection, own, payment_id=payment_id)
            if not found:
                return None
            return found[0], account_names(connection, {found[0].account_id})[found[0].account_id]

        found = await request.services.database.read(read)
        if found is None:
            raise NotFound("payment_not_found", f"No such payment: {payment_id!r}.")
        payment, name = found
        return await page(
            request,
            visitor,
            "money/payment.html",
            title=_title(payment),
            payment=payment,
            account=name,
            states=STATES,
        )


async def _list_page(
    request: ApiRequest,
    visitor: Visitor,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    query, services = Query(request), request.services

    def read(connection: Connection) -> tuple[Account | None, list[Payment], dict[int, str]]:
        account = account_of(connection, visitor, query.text("account"))
        found = list_payments(
            connection,
            account.id if account else None,
            limit=query.rows + 1,
            after=query.text("cursor"),
        )
        return account, found, account_names(connection, {each.account_id for each in found})

    account, found, names = await services.database.report(read, account_id=visitor.account_id)
    more = found[query.rows - 1].id if len(found) > query.rows else None
    settings = services.settings
    return await page(
        request,
        visitor,
        "money/payments.html",
        lists=LISTS,
        title=f"Payments{f' of {account.name}' if account else ''}",
        status=error.http_status if error else 200,
        account=account,
        as_file=TableFile(
            "payments",
            (
                "id",
                "account_id",
                "provider",
                "reference",
                "amount_nanos",
                "returned_nanos",
                "status",
                "created_at",
            ),
            found[: query.rows],
            names,
            is_cut=more is not None,
        ),
        rows=found[:ROWS],
        names=names,
        states=STATES,
        is_configured=services.payment_provider is not None,
        may_pay=visitor.may("payments.write") and account is not None,
        least=settings.topup_min_usd,
        most=settings.topup_max_usd,
        values=values or {},
        problems=problems_of(error),
        mistake=error.message if error else None,
        filters=query.values,
        pager=query.pages(more),
    )


def _title(payment: Payment) -> str:
    amount = usd(payment.amount_nanos)
    if payment.status == "open":
        return f"{amount} has not come yet"
    return f"{amount} {STATES[payment.status][0]}"


HANDLERS: Final[list[Any]] = [PaymentPages]

"""Prices: what is sold at what price with what margin, and setting, ending and cancelling one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from sqlalchemy import Connection

from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.billing.usage.margins import BelowCost, count_below_cost
from gateway.billing.usage.report import Filters, Group, Span, usage
from gateway.catalog.selling.terms import OwnPrices
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs, require_proof
from gateway.console.money.offers import price_page, set_from_form, try_from_form
from gateway.console.queries import read_form
from gateway.console.rendering import page
from gateway.console.views.evidence import row_url
from gateway.console.views.files import TableFile
from gateway.console.views.formats import usd
from gateway.console.views.money import sum_rows, sum_total
from gateway.console.views.prices import price_rows
from gateway.console.visitors import CurrentVisitor
from gateway.errors import InvalidRequest, TollgateError
from gateway.operations import prices
from gateway.operations.prices import PriceCancelBody

MONTH: Final = timedelta(days=30)
LISTS: Final = (
    ListColumns(
        "prices",
        {
            "list_price": "List price",
            "since": "Since",
            "next": "Next change",
            "batches": "In batches",
            "own": "Own prices",
            "revenue": "Revenue, $",
            "margin": "Margin, $",
            "margin_share": "Margin",
        },
    ),
)


class PricePages(Controller):
    path = "/prices"

    @get(guards=[needs("margins.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        services, now = request.services, datetime.now(UTC)
        span = Span(now - MONTH, now, ZoneInfo(visitor.zone))

        def read(connection: Connection) -> tuple[Mapping[str, OwnPrices], list[Group]]:
            # Here, because it takes a while and this is not the event loop.
            earned = usage(connection, span, ["model"], Filters(), units=False)
            return services.live.own_prices(), earned

        own, earned = await services.database.report(read, account_id=None)
        entries = services.live.entries()
        since = {
            entry.name: datetime.fromtimestamp(services.live.priced_since(entry.name), UTC)
            for entry in entries
        }
        by_model = {row.labels["model"]: row for row in sum_rows(earned)}
        total = sum_total(earned)
        rows = price_rows(entries, own, by_model, since=since)
        return await page(
            request,
            visitor,
            "money/prices.html",
            lists=LISTS,
            title=f"{len(entries)} models on sale; margin of 30 days {usd(total.margin_nanos)}",
            rows=rows,
            as_file=TableFile(
                "prices",
                (
                    "name",
                    "prices",
                    "since",
                    "next_at",
                    "discount",
                    "own",
                    "earned.requests",
                    "earned.net_nanos",
                    "earned.margin_nanos",
                ),
                rows,
            ),
            total=total,
            proof=row_url({}, span, {}),
            proofs={entry.name: row_url({"model": entry.name}, span, {}) for entry in entries},
            span=span,
            may_write=visitor.may("prices.write"),
        )

    @get("/below-cost", guards=[needs("margins.read")])
    async def below_cost(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        """The part of the list that takes long; a page by itself without scripts."""
        since = datetime.now(UTC) - MONTH

        def read(connection: Connection) -> BelowCost:
            return count_below_cost(connection, since)

        found = await request.services.database.report(read, account_id=None)
        number = sum(found.requests.values())
        return await page(
            request,
            visitor,
            "money/below_cost.html",
            title=f"{number} request{'' if number == 1 else 's'} sold below cost",
            found=found,
            models=sorted(found.requests.items(), key=lambda each: (-each[1], each[0])),
            since=since,
        )

    @get("/{name:path}", guards=[needs("margins.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, name: FromPath[str]
    ) -> Response[Any]:
        return await price_page(request, visitor, name.lstrip("/"))

    @post("/{name:path}", guards=[needs("prices.write")])
    async def change(
        self, request: ApiRequest, visitor: CurrentVisitor, name: FromPath[str]
    ) -> Response[Any]:
        model, form = name.lstrip("/"), await request.form()
        do = form.get("do")
        if do == "try":
            return await try_from_form(request, visitor, model, form)
        if do == "cancel":
            return await _cancel(request, visitor, model)
        if do != "set":
            raise InvalidRequest("invalid_value", f"do is {do!r}; accepted: try, set, cancel.")
        await require_proof(request)
        return await set_from_form(request, visitor, model, form)


async def _cancel(request: ApiRequest, visitor: CurrentVisitor, model: str) -> Response[Any]:
    """Cancel a price that has not begun."""
    await require_proof(request)
    form, services = await read_form(request), request.services
    sent = {"model": model, "from": form.text("from") or "", "reason": form.text("reason") or ""}
    if account := form.text("account"):
        sent["account"] = account
    try:
        body = read_body(PriceCancelBody, sent)
        await services.database.write(
            lambda connection: prices.cancel(
                connection, visitor.author(), body, cache=services.live.prices
            )
        )
    except TollgateError as error:
        return await price_page(request, visitor, model, error=error)
    await services.live.refresh()
    return see_other(f"/console/prices/{model}")


HANDLERS: Final[list[Any]] = [PricePages]

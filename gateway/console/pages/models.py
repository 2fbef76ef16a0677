"""Models: the list, one with its price and contract, and the picker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, cast, get_args

from litestar import Controller, Response, get
from litestar.params import FromPath
from sqlalchemy import Connection

from gateway.accounts.accounts import account_names
from gateway.api.http.request import ApiRequest
from gateway.catalog.listing import batch_view, entry_view
from gateway.catalog.picking.filters import CatalogFilters, choose, facets, read_sort, read_words
from gateway.catalog.picking.pick import pick, read_wish
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.catalog.views import PickView
from gateway.console.guards import needs
from gateway.console.queries import Query
from gateway.console.rendering import page
from gateway.console.views.models import (
    ICONS,
    model_row,
    order_text,
    price_texts,
    price_versions,
    reason_of,
    shell_json,
    speed_rows,
)
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, unknown_model
from gateway.ledger.prices import LIST, PricePeriod, price_periods_of
from gateway.performance import WINDOWS, Window, output_kind

PROMPT: Final = {"prompt": "a lighthouse at dusk"}
SORTS: Final = (
    ("name", "name"),
    ("typical", "price, lowest first"),
    ("-typical", "price, highest first"),
    ("speed", "speed"),
)


@dataclass(frozen=True, slots=True)
class Offers:
    """The models as the account of a visitor is offered them, at its prices."""

    request: ApiRequest
    visitor: Visitor

    @property
    def account_id(self) -> int:
        return self.visitor.account_id or LIST

    @property
    def entries(self) -> Sequence[CatalogEntry]:
        return self.request.services.live.entries(self.account_id)

    @property
    def find(self) -> Callable[[str], CatalogEntry | None]:
        live, account_id = self.request.services.live, self.account_id
        return lambda name: live.entry(name, account_id)


class ModelPages(Controller):
    path = "/"

    @get("/models", guards=[needs("catalog.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query, services = Query(request), request.services
        offers = Offers(request, visitor)
        entries = offers.entries
        announcements = services.requests.health.announcements
        seconds = await services.performance.median_seconds(services.live.names())
        task = query.one_of("task", get_args(Task))
        filters = CatalogFilters(
            task=cast("Task | None", task),
            vendor=query.text("vendor"),
            available=True if query.text("available") else None,
            words=read_words(query.text("q")),
        )
        chosen = choose(
            entries,
            announcements,
            filters,
            find=offers.find,
            sort=read_sort(query.text("sort") or "name"),
            seconds=seconds,
        )
        rows = [
            model_row(
                entry,
                announcements,
                find=offers.find,
                for_operator=visitor.role is not None,
                seconds=seconds.get(entry.name),
                has_own_price=services.live.has_price_override(entry.name, offers.account_id),
            )
            for entry in chosen
        ]
        available = sum(row.available for row in rows)
        # What runs now comes first; the order within is the one asked for.
        rows.sort(key=lambda row: not row.available)
        return await page(
            request,
            visitor,
            "models.html",
            title=f"{available} of {len(rows)} models are available",
            rows=rows,
            total=len(entries),
            values=facets(entries),
            tasks=tuple(TASKS),
            sorts=SORTS,
            filters=query.values,
            healthy=services.requests.health.healthy,
        )

    @get("/models/{name:path}", guards=[needs("catalog.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, name: FromPath[str]
    ) -> Response[str]:
        services, offers = request.services, Offers(request, visitor)
        entry = offers.find(name.lstrip("/"))
        if entry is None:
            raise unknown_model(name.lstrip("/"), listed="the list of models")
        mine = None if visitor.role else {LIST, *visitor.memberships}

        def read(connection: Connection) -> tuple[list[PricePeriod], dict[int, str]]:
            found = [
                each
                for each in price_periods_of(connection, model=entry.name)
                if mine is None or each.account_id in mine
            ]
            return found, account_names(connection, {each.account_id for each in found})

        periods, names = await services.database.report(read, account_id=visitor.account_id)
        announcements = services.requests.health.announcements
        view = entry_view(
            entry, announcements, find=offers.find, for_operator=visitor.role is not None
        )
        return await page(
            request,
            visitor,
            "model.html",
            title=entry.name,
            entry=view,
            icon=ICONS[TASKS[entry.task].makes],
            reason=reason_of(view),
            prices=price_texts(entry),
            typical=order_text(view["typical_order"]),
            batch=batch_view(entry),
            has_own_price=services.live.has_price_override(entry.name, offers.account_id),
            versions=price_versions(periods, datetime.now(UTC)),
            names=names,
            served_by=[each for each in announcements if entry.name in each.models],
            load=services.requests.health.loads.get(entry.name),
            windows=tuple(WINDOWS),
            example=shell_json(view["examples"][0] if view["examples"] else PROMPT),
            base_url=str(request.base_url).rstrip("/"),
        )

    @get("/speed/{name:path}", guards=[needs("catalog.read")])
    async def speed(
        self, request: ApiRequest, visitor: CurrentVisitor, name: FromPath[str]
    ) -> Response[str]:
        """The part of a model's page that takes long; a page by itself without scripts."""
        entry = Offers(request, visitor).find(name.lstrip("/"))
        if entry is None:
            raise unknown_model(name.lstrip("/"), listed="the list of models")
        window = Query(request).one_of("window", tuple(WINDOWS)) or "24h"
        kind = output_kind(entry.task)
        stats = await request.services.performance.stats(
            entry.name, entry.slo, cast("Window", window), kind=kind
        )
        return await page(
            request,
            visitor,
            "speed.html",
            title=f"Speed of {entry.name}",
            model=entry.name,
            stats=stats,
            speeds=speed_rows(stats),
            window=window,
            windows=tuple(WINDOWS),
        )

    @get("/pick", guards=[needs("catalog.read")])
    async def pick(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query, services = Query(request), request.services
        offers = Offers(request, visitor)
        entries = offers.entries
        found: PickView | None = None
        problem: InvalidRequest | None = None
        if query.values:
            seconds = await services.performance.median_seconds(services.live.names())
            try:
                wish = read_wish(
                    entries,
                    task=query.text("task"),
                    role=query.text("role"),
                    text=query.text("q"),
                    budget_nanos=query.amount("budget"),
                )
                found = pick(
                    entries,
                    services.requests.health.announcements,
                    wish,
                    find=offers.find,
                    seconds=seconds,
                )
            except InvalidRequest as error:
                problem = error
        best = found["best"] if found else None
        return await page(
            request,
            visitor,
            "pick.html",
            title=_pick_title(found, best["name"] if best else None),
            status=200 if problem is None else problem.http_status,
            found=found,
            problem=problem,
            roles=sorted({role for entry in entries for role in entry.roles}),
            tasks=tuple(TASKS),
            filters=query.values,
        )


def _pick_title(found: PickView | None, best: str | None) -> str:
    if found is None:
        return "Which model?"
    return f"Take {best}" if best else "No model fits"


HANDLERS: Final[list[Any]] = [ModelPages]

"""Models: the list, one with its price and contract, and the picker."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast, get_args
from urllib.parse import urlencode

from litestar import Controller, Response, get
from litestar.params import FromPath
from sqlalchemy import Connection

from gateway.accounts.accounts import account_names
from gateway.api.http.request import ApiRequest
from gateway.billing.usage.report import Filters, read_span, usage
from gateway.catalog.availability import availability
from gateway.catalog.listing import batch_view, entry_view
from gateway.catalog.picking.filters import (
    CatalogFilters,
    choose,
    facets,
    read_sort,
    read_words,
    route_of,
)
from gateway.catalog.picking.pick import RESULTS, pick, read_wish
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Modality, Task
from gateway.catalog.views import EntryView, PickView
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.playground.code import code_of
from gateway.console.queries import Query
from gateway.console.rendering import page
from gateway.console.views.files import TableFile
from gateway.console.views.formats import duration
from gateway.console.views.models import (
    ICONS,
    model_row,
    order_text,
    price_texts,
    price_versions,
    reason_of,
    speed_rows,
)
from gateway.console.views.money import SumRow, sum_total
from gateway.console.views.offers import (
    COMPARED_MAX,
    SIZE_LABELS,
    VersionRow,
    calculate,
    compared,
    drawn_until,
    read_quantity,
    read_sizes,
    rows_of,
    version_rows,
)
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.dispatch.health import QueueHealth
from gateway.errors import InvalidRequest, unknown_model
from gateway.ledger.prices import LIST, price_periods_of, read_price
from gateway.performance import WINDOWS, Window, output_kind

QUESTION: Final = {"messages": [{"role": "user", "content": "What is a queue?"}]}
PROMPT: Final = {"prompt": "a lighthouse at dusk"}
SORTS: Final = (
    ("name", "name"),
    ("typical", "price, lowest first"),
    ("-typical", "price, highest first"),
    ("speed", "speed"),
)
LISTS: Final = (
    ListColumns(
        "models",
        {
            "task": "Task",
            "available": "Available",
            "typical": "One order, $",
            "order": "Order",
            "batch": "In a batch, $",
            "price": "Price",
            "context": "Context",
            "median": "Median",
            "p95": "p95",
            "success": "Success",
            "vendor": "Vendor",
            "licence": "Licence",
        },
    ),
    ListColumns(
        "picks",
        {
            "task": "Task",
            "typical": "One result, $",
            "results": "All results, $",
            "available": "Available",
            "why": "Why",
        },
    ),
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
        entries, sizes = offers.entries, read_sizes(query)
        health = services.requests.health
        announcements, healthy = health.announcements, health.healthy
        recent = await services.performance.recent(services.live.names())
        seconds = {name: found.median_s for name, found in recent.items()}
        task, most = query.one_of("task", get_args(Task)), query.amount("most")
        filters = CatalogFilters(
            task=cast("Task | None", task),
            makes=cast("Modality | None", query.one_of("makes", get_args(Modality))),
            vendor=query.text("vendor"),
            route=query.text("route"),
            good_for=query.text("good_for"),
            language=query.text("language"),
            voice=query.text("voice"),
            # While it is unknown, the filter would select what was available.
            available=True if query.text("available") and healthy else None,
            words=read_words(query.text("q")),
        )
        sort = read_sort(query.text("sort") or "name")
        chosen = choose(
            entries,
            announcements,
            filters,
            find=offers.find,
            sort=sort,
            seconds=seconds,
        )
        rows = [
            model_row(
                entry,
                announcements,
                find=offers.find,
                for_operator=visitor.role is not None,
                recent=recent.get(entry.name),
                has_own_price=services.live.has_price_override(entry.name, offers.account_id),
                healthy=healthy,
                sizes=sizes,
            )
            for entry in chosen
        ]
        if most is not None:
            rows = [row for row in rows if row.typical_nanos is not None]
            rows = [row for row in rows if (row.typical_nanos or 0) <= most]
        if sizes and sort in ("typical", "-typical"):
            sign = -1 if sort == "-typical" else 1
            rows.sort(key=lambda row: (row.typical_nanos is None, sign * (row.typical_nanos or 0)))
        available = sum(row.available is True for row in rows)
        # What runs now comes first; the order within is the one asked for.
        rows.sort(key=lambda row: not row.available)
        return await page(
            request,
            visitor,
            "models.html",
            lists=LISTS,
            title=f"{available} of {len(rows)} models are available"
            if healthy
            else f"{len(rows)} models; which are available is unknown",
            rows=rows,
            as_file=TableFile(
                "models",
                (
                    "name",
                    "task",
                    "also",
                    "available",
                    "reason",
                    "typical_nanos",
                    "typical",
                    "batch_nanos",
                    "prices",
                    "median_s",
                    "p95_s",
                    "success",
                    "context",
                    "vendor",
                    "license",
                    "good_for",
                ),
                rows,
            ),
            total=len(entries),
            values=facets(entries),
            options=_options(entries),
            sizes=SIZE_LABELS,
            compared_max=COMPARED_MAX,
            tasks=tuple(TASKS),
            sorts=SORTS,
            filters=query.values,
            **_queue_state(health),
        )

    @get("/compare", guards=[needs("catalog.read")])
    async def compare(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query, offers, services = Query(request), Offers(request, visitor), request.services
        asked = list(dict.fromkeys(request.query_params.getall("model", [])))
        entries = [entry for name in asked if (entry := offers.find(name)) is not None]
        seconds = await services.performance.median_seconds(services.live.names())
        sizes = read_sizes(query)
        models = []
        for entry in entries[:COMPARED_MAX]:
            missing = availability(entry, services.requests.health.announcements)
            took = seconds.get(entry.name)
            models.append(
                compared(
                    entry,
                    offers.find,
                    sizes=sizes,
                    available=missing is None,
                    reason=missing.reason if missing else None,
                    measured="" if took is None else duration(int(took * 1_000_000)),
                )
            )
        return await page(
            request,
            visitor,
            "compare.html",
            title=" or ".join(each.name for each in models) or "Which models?",
            models=models,
            rows=rows_of(models),
            left_out=[entry.name for entry in entries[COMPARED_MAX:]],
            sizes=SIZE_LABELS,
            filters=query.values,
            **_queue_state(services.requests.health),
        )

    @get("/models/{name:path}", guards=[needs("catalog.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, name: FromPath[str]
    ) -> Response[str]:
        services, offers, query = request.services, Offers(request, visitor), Query(request)
        entry = offers.find(name.lstrip("/"))
        model = name.lstrip("/") if entry is None else entry.name
        mine = None if visitor.role else {LIST, *visitor.memberships}
        now, cache = datetime.now(UTC), services.live.prices

        def read(connection: Connection) -> tuple[list[VersionRow], dict[int, str], SumRow]:
            found = price_periods_of(connection, model=model, account_ids=mine)
            history = version_rows(
                entry,
                offers.find,
                price_versions(found, now),
                found,
                lambda price_id: read_price(connection, price_id, cache),
            )
            return (
                history,
                account_names(connection, {each.account_id for each in found}),
                _used(connection, visitor, model),
            )

        history, names, used = await services.database.report(read, account_id=visitor.account_id)
        if entry is None:
            if not history:
                raise unknown_model(model, listed="the list of models")
            versions: dict[str, Any] = {"history": history, "names": names, "until": now}
            return await page(
                request, visitor, "model_gone.html", title=model, sold=False, **versions
            )
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
            history=history,
            sold=True,
            until=drawn_until(history, now),
            calculation=calculate(entry, query),
            chosen=query.values,
            used=used,
            names=names,
            workers=[
                each
                for each in announcements
                if entry.name in (*each.models, *each.loading, *each.unavailable)
            ],
            load=services.requests.health.loads.get(entry.name),
            windows=tuple(WINDOWS),
            code=code_of(str(request.base_url).rstrip("/"), _example(entry, view)),
            **_queue_state(services.requests.health),
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
        offers, health = Offers(request, visitor), services.requests.health
        entries = offers.entries
        found: PickView | None = None
        problem: InvalidRequest | None = None
        results = RESULTS
        sizes: Mapping[str, int] = {}
        if query.values:
            seconds = await services.performance.median_seconds(services.live.names())
            try:
                results, sizes = read_quantity(query, "results") or RESULTS, read_sizes(query)
                wish = read_wish(
                    entries,
                    task=query.text("task"),
                    role=query.text("role"),
                    text=query.text("q"),
                    budget_nanos=query.amount("budget"),
                    available=query.text("available") is not None and health.healthy,
                    language=query.text("language"),
                    license=query.text("license"),
                    seconds_max=read_quantity(query, "seconds"),
                )
                found = pick(
                    entries,
                    health.announcements,
                    wish,
                    find=offers.find,
                    seconds=seconds,
                    results=results,
                    sizes=sizes,
                )
            except InvalidRequest as error:
                problem = error
        best = found["best"] if found else None
        return await page(
            request,
            visitor,
            "pick.html",
            lists=LISTS,
            title=_pick_title(found, best["name"] if best else None),
            status=200 if problem is None else problem.http_status,
            found=found,
            languages=_options(entries)["language"],
            licences=sorted({entry.license for entry in entries if entry.license}),
            results=results,
            sizes=SIZE_LABELS,
            order_text=order_text,
            may_play=visitor.account_id is not None and visitor.may("play.read"),
            problem=problem,
            examples=_examples(entries),
            roles=sorted({role for entry in entries for role in entry.roles}),
            tasks=tuple(TASKS),
            filters=query.values,
            **_queue_state(health),
        )


def _queue_state(health: QueueHealth) -> dict[str, Any]:
    """Return whether availability is known, and otherwise when the queue server was last read,
    if it ever was."""
    is_read = not math.isinf(health.age_s)
    last = datetime.now(UTC) - timedelta(seconds=health.age_s) if is_read else None
    return {"healthy": health.healthy, "unknown_since": last}


def _example(entry: CatalogEntry, view: EntryView) -> dict[str, Any]:
    """Return a call of a model, as its page offers it."""
    if entry.task == "text-generation":
        return {"model": entry.name, "input": QUESTION}
    return {"model": entry.name, "input": view["examples"][0] if view["examples"] else PROMPT}


def _options(entries: Sequence[CatalogEntry]) -> dict[str, list[str]]:
    """Return the values of the filters that have no facet."""
    return {
        "makes": list(get_args(Modality)),
        "route": sorted({route_of(entry) for entry in entries}),
        "language": sorted({each for entry in entries for each in entry.known_languages}),
        "voice": sorted({each for entry in entries for each in entry.known_voices}),
    }


def _used(connection: Connection, visitor: Visitor, model: str) -> SumRow:
    """Return what was booked of a model in the last 30 days, in the account that is looked at."""
    sees_all = visitor.role is not None and visitor.account_id is None
    accounts = None if sees_all else (visitor.account_id or 0,)
    filters = Filters(account_ids=accounts, models=(model,))
    span = read_span(None, None, visitor.zone, now=datetime.now(UTC))
    return sum_total(usage(connection, span, ["model"], filters))


EXAMPLES: Final[Sequence[tuple[str, Mapping[str, str]]]] = (
    ("product photos, at most $0.05", {"q": "product photos", "budget": "0.05"}),
    ("a talking portrait", {"q": "talking portrait"}),
    ("chat with tools", {"task": "text-generation", "q": "tools"}),
)


def _examples(entries: Sequence[CatalogEntry]) -> list[tuple[str, str]]:
    """Return questions to the picker that this catalog has words for, with their addresses."""
    found = []
    for text, asked in EXAMPLES:
        try:
            read_wish(entries, task=asked.get("task"), text=asked["q"])
        except InvalidRequest:
            continue
        found.append((text, urlencode(asked)))
    return found


def _pick_title(found: PickView | None, best: str | None) -> str:
    if found is None:
        return "Which model?"
    return f"Take {best}" if best else "No model fits"


HANDLERS: Final[list[Any]] = [ModelPages]

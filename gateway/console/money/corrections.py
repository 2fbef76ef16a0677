"""Corrections: what a wrong price took, first as a dry run, then booked once per reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Any, Final
from urllib.parse import urlencode

from litestar import Controller, Response, get, post
from litestar.datastructures import FormMultiDict, MultiDict
from sqlalchemy import Connection

from gateway.accounts.accounts import account_names
from gateway.api.http.request import ApiRequest
from gateway.catalog.schema import CatalogEntry
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs, require_proof
from gateway.console.jobs.pages import start_job
from gateway.console.jobs.runner import Progress
from gateway.console.jobs.store import ConsoleJob, NewJob, digest_of, find_latest
from gateway.console.queries import ROWS, Query, local_moment, problems_of
from gateway.console.rendering import page
from gateway.console.views.formats import usd
from gateway.console.views.prices import (
    BLANK_LINES,
    LINE_FIELDS,
    NO_LINE,
    PriceLineFields,
    lines_of,
    read_lines,
    texts_of,
)
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, TollgateError, unknown_model
from gateway.operations import credit, prices
from gateway.operations.accounts import owner_id
from gateway.operations.credit import CorrectionView
from gateway.pricing import UNITS, Price, format_usd, parse_usd

LISTED: Final = 10_000
"""Requests of a correction that its result lists; the sums are those of all."""
_ONCE: Final = ("model", "account", "from", "to", "minimum")
LISTS: Final = (
    ListColumns(
        "corrections",
        {
            "paid": "Paid, $",
            "due": "Due, $",
            "back": "Back, $",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class CorrectionForm:
    """What was entered: which requests, and the price that would have been right."""

    values: Mapping[str, str]
    lines: Sequence[PriceLineFields]

    @classmethod
    def read(cls, fields: MultiDict[str] | FormMultiDict) -> CorrectionForm:
        values = {name: str(fields.get(name) or "").strip() for name in _ONCE}
        return cls(values, read_lines([fields.getall(name, []) for name in LINE_FIELDS]))

    @property
    def query(self) -> str:
        pairs = [(name, value) for name, value in self.values.items() if value]
        for line in self.lines:
            pairs += [(name, getattr(line, name)) for name in LINE_FIELDS]
        return urlencode(pairs)


@dataclass(frozen=True, slots=True)
class CorrectionPlan:
    """A valid form."""

    model: str
    price: Price
    starts_at: datetime
    ends_at: datetime
    account: str | None

    def digest(self, account_id: int | None) -> str:
        terms = prices.offer_digest(self.price)
        span = self.starts_at.isoformat(), self.ends_at.isoformat()
        return digest_of(self.model, terms, *span, account_id)


class CorrectionPages(Controller):
    path = "/prices/corrections"

    @get(guards=[needs("credit.write")])
    async def show(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _page(request, visitor, CorrectionForm.read(request.query_params))

    @post(guards=[needs("credit.write")])
    async def rehearse(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        """Start a dry run."""
        form = CorrectionForm.read(await request.form())
        try:
            plan = _plan(request, visitor, form)
            account_id = await _account_id(request, plan)
        except TollgateError as error:
            return await _page(request, visitor, form, error=error)
        back = f"/console/prices/corrections?{form.query}"
        job = NewJob(
            kind="correction",
            digest=plan.digest(account_id),
            starter=visitor.author().name,
            act="credit.write",
            back=back,
        )
        await start_job(request, job, partial(_run, request, visitor, plan, None))
        return see_other(back)

    @post("/post", guards=[needs("credit.write")])
    async def book(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        """Start the booking of a correction."""
        sent = await request.form()
        form = CorrectionForm.read(sent)
        reference, reason = (str(sent.get(name) or "").strip() for name in ("reference", "reason"))
        try:
            if not reference or not reason:
                raise InvalidRequest(
                    "missing_required_parameter",
                    "Enter a reason and a reference.",
                    param="reason" if reference else "reference",
                )
            await require_proof(request)
            plan = _plan(request, visitor, form)
            account_id = await _account_id(request, plan)
        except TollgateError as error:
            return await _page(request, visitor, form, error=error)
        back = f"/console/prices/corrections?{form.query}&{urlencode({'booked': reference})}"
        job = NewJob(
            kind="correction.book",
            digest=digest_of(plan.digest(account_id), reference),
            starter=visitor.author().name,
            act="credit.write",
            back=back,
            can_cancel=False,
        )
        await start_job(request, job, partial(_run, request, visitor, plan, (reference, reason)))
        return see_other(back)


async def _run(
    request: ApiRequest,
    visitor: Visitor,
    plan: CorrectionPlan,
    booking: tuple[str, str] | None,
    progress: Progress,
) -> dict[str, Any]:
    """Compute a correction, and book it if there is a reference and a reason."""
    services = request.services
    span = {"starts_at": plan.starts_at, "ends_at": plan.ends_at, "account": plan.account}
    reference, reason = booking or ("dry run", "")
    archived = await credit.archived_corrections(
        services.database,
        services.blobs,
        plan.model,
        plan.price,
        dry_run=booking is None,
        **span,  # type: ignore[arg-type]  # each has its type
    )

    def correct(connection: Connection) -> dict[str, Any]:
        made = credit.correct(
            connection,
            visitor.author(reason),
            plan.model,
            plan.price,
            reference=reference,
            reason=reason,
            dry_run=booking is None,
            archived=archived,
            progress=None if booking else progress,
            **span,  # type: ignore[arg-type]  # each has its type
        )
        rows = sorted(made["data"], key=_place)
        names = account_names(connection, {row["account_id"] for row in rows})
        return {
            "requests": made["requests"],
            "total": made["total"],
            "booked": made["booked"],
            "accounts": [
                _sum_of(list(some), names)
                for _, some in groupby(rows, key=lambda row: row["account_id"])
            ],
            "data": rows[:LISTED],
        }

    if booking is None:
        async with services.database.long_reports(None):
            return await services.database.slow(correct)
    return await services.database.slow_write(correct)


def _sum_of(rows: Sequence[CorrectionView], names: Mapping[int, str]) -> dict[str, Any]:
    id = rows[0]["account_id"]
    back = format_usd(sum(parse_usd(row["back"]) for row in rows))
    return {"id": id, "name": names.get(id, str(id)), "requests": len(rows), "back": back}


def _place(row: CorrectionView) -> tuple[int, str]:
    return row["account_id"], row["request_id"]


async def _page(
    request: ApiRequest,
    visitor: Visitor,
    form: CorrectionForm,
    *,
    error: TollgateError | None = None,
) -> Response[str]:
    services, query = request.services, Query(request)
    booked = query.text("booked")
    job = booking = plan = None
    try:
        if form.values["model"] and form.values["from"]:
            plan = _plan(request, visitor, form)
            digest = plan.digest(await _account_id(request, plan))

            def find(connection: Connection) -> tuple[ConsoleJob | None, ConsoleJob | None]:
                return find_latest(connection, "correction", digest), (
                    find_latest(connection, "correction.book", digest_of(digest, booked))
                    if booked
                    else None
                )

            job, booking = await services.database.read(find)
    except TollgateError as refused:
        error = error or refused
    shown = booking or job
    result = shown.result if shown is not None and shown.state == "done" else None
    entry = services.live.entry(form.values["model"]) if form.values["model"] else None
    lines = form.lines or (lines_of(entry.selling_price) if entry is not None else [])
    return await page(
        request,
        visitor,
        "money/corrections.html",
        lists=LISTS,
        title=_title(result, is_booked=booking is not None),
        status=error.http_status if error else 200,
        form=form,
        lines=[*lines, *[NO_LINE] * BLANK_LINES],
        units=UNITS,
        models=services.live.names(),
        job=shown,
        is_booked=booking is not None,
        price=texts_of(plan.price) if plan else [],
        result=result,
        rows=_rows_after(result["data"], query.text("cursor")) if result else [],
        names={each["id"]: each["name"] for each in result["accounts"]} if result else {},
        pager=query.pages(_cursor(result["data"], query.text("cursor")) if result else None),
        reference=credit.new_reference(),
        listed=LISTED,
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


def _rows_after(rows: Sequence[Mapping[str, Any]], cursor: str | None) -> list[dict[str, Any]]:
    """Return the rows of a page after a cursor, with their amounts in nano-dollars."""
    account, _, request_id = (cursor or "").partition(":")
    place = (int(account), request_id) if account.isdecimal() else (0, "")
    after = [row for row in rows if (row["account_id"], row["request_id"]) > place][:ROWS]
    amounts = ("paid", "due", "back")
    return [{**row, **{name: parse_usd(row[name]) for name in amounts}} for row in after]


def _cursor(rows: Sequence[Mapping[str, Any]], cursor: str | None) -> str | None:
    shown = _rows_after(rows, cursor)
    if not shown or shown[-1]["request_id"] == rows[-1]["request_id"]:
        return None
    return f"{shown[-1]['account_id']}:{shown[-1]['request_id']}"


def _title(result: Mapping[str, Any] | None, *, is_booked: bool) -> str:
    if result is None:
        return "Correct a price"
    if is_booked:
        return f"{usd(parse_usd(result['booked']))} was given back"
    if not result["requests"]:
        return "Nothing would be given back"
    return f"{usd(parse_usd(result['total']))} would be given back"


def _plan(request: ApiRequest, visitor: Visitor, form: CorrectionForm) -> CorrectionPlan:
    """Read a form. Raise ``TollgateError`` if it is not valid."""
    values = form.values
    for name in ("model", "from", "to"):
        if not values[name]:
            raise InvalidRequest("missing_required_parameter", f"Enter {name}.", param=name)
    entry: CatalogEntry | None = request.services.live.entry(values["model"])
    if entry is None:
        raise unknown_model(values["model"], listed="the list of prices")
    starts_at, ends_at = (local_moment(values[name], visitor.zone, name) for name in ("from", "to"))
    if starts_at >= ends_at:
        raise InvalidRequest("invalid_value", "The end is not after the start.", param="to")
    minimum = values["minimum"].removeprefix("$") or None
    price = prices.read(entry, [line.component for line in form.lines], minimum)
    return CorrectionPlan(entry.name, price, starts_at, ends_at, values["account"] or None)


async def _account_id(request: ApiRequest, plan: CorrectionPlan) -> int | None:
    return await request.services.database.read(
        lambda connection: owner_id(connection, plan.account)
    )


HANDLERS: Final[list[Any]] = [CorrectionPages]

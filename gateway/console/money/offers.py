"""The form of a price: what was entered, what it would change, and putting it in force.

What is entered is in the address, so a colleague who opens it sees the same proposal. Nothing
changes before the summary is confirmed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from litestar import Response
from litestar.datastructures import FormMultiDict, MultiDict
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.billing.usage.archived import add_archived
from gateway.billing.usage.minutes import floor_hour
from gateway.billing.usage.report import Filters, Span, stored_usage, total
from gateway.billing.usage.rollups import built_range, seals
from gateway.billing.usage.whatif import example_requests
from gateway.catalog.schema import CatalogEntry
from gateway.checks.moments import read_moment, timestamp
from gateway.console.answers import see_other
from gateway.console.jobs.pages import start_job
from gateway.console.jobs.runner import Progress
from gateway.console.jobs.store import ConsoleJob, NewJob, digest_of, find_latest
from gateway.console.queries import local_moment, problems_of
from gateway.console.rendering import page
from gateway.console.views.models import price_versions
from gateway.console.views.money import sum_total
from gateway.console.views.prices import (
    BLANK_LINES,
    LINE_FIELDS,
    NO_LINE,
    ExampleRow,
    PriceLineFields,
    change_text,
    example_rows,
    lines_of,
    own_accounts,
    period_prices,
    read_lines,
    texts_of,
)
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, TollgateError, unknown_model
from gateway.ledger.prices import LIST, PricePeriod, price_periods_of
from gateway.operations import prices
from gateway.operations.accounts import find_owner
from gateway.operations.prices import PriceBody
from gateway.pricing import UNITS, Price, format_usd, parse_usd

TRIED: Final = timedelta(days=30)
"""Span of which the requests are priced again."""
_AMOUNTS: Final = (
    *("charged", "would_be", "difference", "not_priced_charged"),
    *("net", "margin", "net_then", "margin_then"),
)
_ONCE: Final = ("account", "kind", "minimum", "from", "reason")

Fields: TypeAlias = MultiDict[str] | FormMultiDict


@dataclass(frozen=True, slots=True)
class OfferForm:
    """What was entered: a price, or the end of an account's own."""

    values: Mapping[str, str]
    lines: Sequence[PriceLineFields]
    do: str

    @classmethod
    def read(cls, fields: Fields) -> OfferForm:
        values = {name: str(fields.get(name) or "").strip() for name in _ONCE}
        sent = fields.getall("do", [])
        lines = read_lines([fields.getall(name, []) for name in LINE_FIELDS])
        return cls(values, lines, str(sent[-1]) if sent else "")

    @property
    def ends(self) -> bool:
        return self.values["kind"] == "end"

    @property
    def query(self) -> str:
        """Return the form as the query of an address."""
        pairs = [(name, value) for name, value in self.values.items() if value]
        for line in self.lines:
            pairs += [(name, getattr(line, name)) for name in LINE_FIELDS]
        return urlencode(pairs)

    def check(self, model: str, zone: str) -> PriceBody:
        """Return the form if it can be put in force. Raise ``InvalidRequest``."""
        if not self.values["reason"]:
            raise InvalidRequest("invalid_value", "A price needs a reason.", param="reason")
        body = self.body(model, zone)
        prices.start_of(body)
        return body

    def body(self, model: str, zone: str) -> PriceBody:
        """Return the form as the API reads it. Raise ``InvalidRequest``."""
        # Only what is confirmed needs a reason.
        sent: dict[str, Any] = {"model": model, "reason": self.values["reason"] or "a trial"}
        if self.values["account"]:
            sent["account"] = self.values["account"]
        if self.values["from"]:
            sent["from"] = local_moment(self.values["from"], zone, "from").isoformat()
        if not self.ends:
            if not self.lines:
                raise InvalidRequest(
                    "invalid_price", "A price has at least one line with an amount.", param="price"
                )
            sent["price"] = [line.component for line in self.lines]
            if self.values["minimum"]:
                sent["minimum"] = self.values["minimum"].removeprefix("$")
        elif not self.values["account"]:
            raise InvalidRequest(
                "missing_required_parameter",
                "Name the account whose own price ends.",
                param="account",
            )
        return read_body(PriceBody, sent)


@dataclass(frozen=True, slots=True)
class KnownPrices:
    """What the database knows of a model's prices."""

    periods: Sequence[PricePeriod]
    names: Mapping[int, str]
    account: Account | None
    span: Span
    seal: str
    """Digest of the span's hours and their seals."""


@dataclass(frozen=True, slots=True)
class PriceProposal:
    """A valid form: the price in force, and the one that would follow."""

    entry: CatalogEntry
    account: Account | None
    old: Price
    new: Price
    starts_at: datetime | None
    """None: as soon as every gateway knows it."""
    exempt: Sequence[int]
    """Accounts that a list price does not concern: those with their own."""
    span: Span
    seal: str
    digest: str
    """Of what is asked; the answer is as old as its seal."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What is shown beside the form: both versions, examples, and the past at the new price."""

    old: Sequence[str]
    new: Sequence[str]
    starts_at: datetime | None
    examples: Sequence[ExampleRow]
    exempt: int
    span: Span
    job: ConsoleJob | None
    tried: Mapping[str, Any] = field(default_factory=dict)
    is_stale: bool = False
    """Whether hours were sealed since the past was priced again."""


async def price_page(
    request: ApiRequest,
    visitor: Visitor,
    model: str,
    *,
    form: OfferForm | None = None,
    error: TollgateError | None = None,
) -> Response[Any]:
    """Show the form of a model's price with its history; a valid form beside what it changes."""
    form = form or OfferForm.read(request.query_params)
    entry = _entry(request, model)
    known = await request.services.database.report(
        lambda connection: _known(connection, model, None), account_id=None
    )
    beside = None
    try:
        if form.do in ("look", "review"):
            if form.do == "review":
                form.check(model, visitor.zone)
            proposal = await _proposal(request, visitor, model, form)
            beside = await _beside(request, proposal)
    except TollgateError as refused:
        error = error or refused
    if not form.do:
        form = await _in_force(request, entry, form)
    shown = form.lines
    now = datetime.now(UTC)
    return await page(
        request,
        visitor,
        "money/price.html",
        title=f"Price of {model}",
        status=error.http_status if error else 200,
        model=model,
        form=form,
        lines=[*shown, *[NO_LINE] * (BLANK_LINES if form.do != "more" else 4 * BLANK_LINES)],
        units=UNITS,
        beside=beside,
        review=form.do == "review" and beside is not None and error is None,
        problems=problems_of(error),
        mistake=error.message if error else None,
        versions=price_versions(known.periods, now),
        texts=period_prices(known.periods, request.services.live.prices),
        names=known.names,
        may_write=visitor.may("prices.write"),
        change_text=change_text,
    )


async def set_from_form(
    request: ApiRequest, visitor: CurrentVisitor, model: str, fields: FormMultiDict
) -> Response[Any]:
    """Put the price of a form in force."""
    form, services = OfferForm.read(fields), request.services
    try:
        body = form.check(model, visitor.zone)
        price = (
            None
            if form.ends
            else prices.read(_entry(request, model), body.price or [], body.minimum)
        )
        await services.database.write(
            lambda connection: prices.put(connection, visitor.author(), body, price)
        )
    except TollgateError as error:
        return await price_page(request, visitor, model, form=form, error=error)
    await services.live.refresh()
    return see_other(f"/console/prices/{model}")


async def try_from_form(
    request: ApiRequest, visitor: CurrentVisitor, model: str, fields: FormMultiDict
) -> Response[Any]:
    """Start the what-if of a form, unless its result is known."""
    form = OfferForm.read(fields)
    proposal = await _proposal(request, visitor, model, form)
    shown = "review" if fields.get("then") == "review" else "look"
    back = f"/console/prices/{model}?{form.query}&do={shown}"
    job = NewJob(
        kind="whatif",
        digest=proposal.digest,
        starter=visitor.author().name,
        act="margins.read",
        back=back,
    )

    async def work(progress: Progress) -> dict[str, Any]:
        return await _try(request, proposal, progress)

    known = await request.services.database.read(
        lambda connection: find_latest(connection, job.kind, job.digest)
    )
    if known is None or known.state != "done" or known.result["seal"] != proposal.seal:
        await start_job(request, job, work)
    return see_other(back)


async def _try(request: ApiRequest, proposal: PriceProposal, progress: Progress) -> dict[str, Any]:
    """Return what the past would have cost, and the margin before and after, in nano-dollars."""
    services, span, model = request.services, proposal.span, proposal.entry.name
    account = proposal.account
    filters = Filters(None if account is None else (account.id,), models=(model,))
    async with services.database.long_reports(None):
        found = await services.database.slow(
            lambda connection: prices.what_if(
                connection,
                {model: proposal.new},
                span,
                account=None if account is None else f"id:{account.id}",
                model=model,
                without_accounts=proposal.exempt,
                blobs=services.blobs,
                progress=progress,
            )
        )
        report = await services.database.slow(
            lambda connection: stored_usage(connection, span, ["model"], filters)
        )
    await add_archived(report, services.database, services.blobs)
    earned = sum_total([total(report.groups)])
    difference = parse_usd(found["total"]["difference"])
    return {
        **found["total"],
        "seal": proposal.seal,
        "starts_at": timestamp(span.starts_at),
        "ends_at": timestamp(span.ends_at),
        "net": format_usd(earned.net_nanos),
        "margin": format_usd(earned.margin_nanos),
        "net_then": format_usd(earned.net_nanos + difference),
        "margin_then": format_usd(earned.margin_nanos + difference),
        "is_known": earned.expensed >= earned.requests,
    }


async def _proposal(
    request: ApiRequest, visitor: Visitor, model: str, form: OfferForm
) -> PriceProposal:
    """Return what a form proposes. Raise ``TollgateError`` if it is not valid."""
    body, entry, live = (
        form.body(model, visitor.zone),
        _entry(request, model),
        request.services.live,
    )
    known = await request.services.database.report(
        lambda connection: _known(connection, model, body.account), account_id=None
    )
    account, now = known.account, datetime.now(UTC)
    listed = live.entry(model)
    assert listed is not None
    sold = listed if account is None else live.entry(model, account.id) or listed
    new = listed.selling_price if form.ends else prices.read(entry, body.price or [], body.minimum)
    if form.ends and account is not None and not live.has_price_override(model, account.id):
        raise InvalidRequest(
            "invalid_value", f"{account.name} has no own price of {model}.", param="account"
        )
    exempt = sorted(own_accounts(known.periods, now)) if account is None else []
    terms = prices.offer_digest(new)
    digest = digest_of(model, terms, account.id if account else LIST, exempt)
    return PriceProposal(
        entry=entry,
        account=account,
        old=sold.selling_price,
        new=new,
        starts_at=None if body.starts is None else datetime.fromisoformat(body.starts),
        exempt=exempt,
        span=known.span,
        seal=known.seal,
        digest=digest,
    )


async def _beside(request: ApiRequest, proposal: PriceProposal) -> Beside:
    account = proposal.account

    def read(connection: Connection) -> tuple[list[ExampleRow], ConsoleJob | None]:
        examples = example_requests(
            connection,
            proposal.entry.name,
            account_id=None if account is None else account.id,
            without_accounts=proposal.exempt,
        )
        rows = example_rows(proposal.entry, examples, proposal.old, proposal.new)
        return rows, find_latest(connection, "whatif", proposal.digest)

    examples, job = await request.services.database.report(read, account_id=None)
    result = job.result if job is not None and job.state == "done" else None
    return Beside(
        old=texts_of(proposal.old),
        new=texts_of(proposal.new),
        starts_at=proposal.starts_at,
        examples=examples,
        exempt=len(proposal.exempt),
        span=proposal.span,
        job=job,
        tried=_nanos(result) if result else {},
        is_stale=result is not None and result["seal"] != proposal.seal,
    )


def _nanos(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a what-if with amounts and moments in place of their texts."""
    found = {name: result[name] for name in ("requests", "not_priced", "is_known")}
    found |= {name: parse_usd(result[name]) for name in _AMOUNTS}
    return found | {name: read_moment(result[name]) for name in ("starts_at", "ends_at")}


async def _in_force(request: ApiRequest, entry: CatalogEntry, form: OfferForm) -> OfferForm:
    """Fill a form with the price in force, of the account that the address names."""
    live, named = request.services.live, form.values["account"]
    account_id = LIST
    if named:
        owner = await request.services.database.read(
            lambda connection: find_owner(connection, named)
        )
        account_id = owner.id
    price = (live.entry(entry.name, account_id) or entry).selling_price
    minimum = format_usd(price.minimum_nanos) if price.minimum_nanos else ""
    return OfferForm({**form.values, "minimum": minimum}, lines_of(price), "")


def _known(connection: Connection, model: str, named: str | None) -> KnownPrices:
    now = datetime.now(UTC)
    periods = price_periods_of(connection, model=model)
    built = built_range(connection)
    # Up to the last sealed hour, so that the same question has the same answer for an hour.
    ends_at = now.replace(second=0, microsecond=0) if built is None else min(built[1], now)
    span = Span(ends_at - TRIED, ends_at, ZoneInfo("UTC"))
    sealed = [seal.sha256 for seal in seals(connection, span.starts_at, span.ends_at)]
    return KnownPrices(
        periods=periods,
        names=account_names(connection, {each.account_id for each in periods}),
        account=find_owner(connection, named) if named else None,
        span=span,
        seal=digest_of(sealed, floor_hour(ends_at).isoformat()),
    )


def _entry(request: ApiRequest, model: str) -> CatalogEntry:
    entry = request.services.live.entry(model)
    if entry is None:
        raise unknown_model(model, listed="the list of prices")
    return entry

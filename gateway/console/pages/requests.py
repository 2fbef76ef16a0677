"""Requests: the list, one of them with its money and time, and what fails most."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect, Stream
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names, find_account
from gateway.api.http.bodies import read_body
from gateway.api.http.media_views import EXPIRED, blob_of, media_of
from gateway.api.http.request import ApiRequest
from gateway.api.http.serving import BlobResponse, serve
from gateway.api.native.usage import key_number
from gateway.api.native.views import margin_view
from gateway.billing.entries import charge_of
from gateway.billing.usage.failures import Failures, count_failures
from gateway.catalog.tasks import TASKS
from gateway.console.answers import see_other
from gateway.console.guards import needs, require_proof_of
from gateway.console.queries import ROWS, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.scope import account_of
from gateway.console.views.formats import duration, usd
from gateway.console.views.outputs import ShownOutput, shown_output
from gateway.console.views.requests import STATUSES, money, phases, request_row
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import Gone, InvalidRequest, NotFound, TollgateError
from gateway.ledger.closed import ClosedRequest
from gateway.operations import credit
from gateway.performance import performance_view
from gateway.requests.lookup import RequestFilter, RequestPage, request_not_found
from gateway.tasks.submission import OpenRequest
from workers.contract.kinds import EXTENSIONS

OUTCOMES: Final = ("charged", "released")
FAILURE_DAYS: Final = 7


class RequestPages(Controller):
    path = "/"

    @get("/requests", guards=[needs("requests.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        if (sought := query.text("id")) is not None:
            return see_other(f"/console/requests/{sought.strip()}")

        def read(connection: Connection) -> tuple[Account | None, RequestFilter]:
            account = account_of(connection, visitor, query.text("account"))
            return account, _filter(connection, query, account, visitor.zone)

        services = request.services
        account, chosen = await services.database.read(read)
        found = await services.requests.lookup.list(chosen, limit=ROWS, cursor=query.text("cursor"))
        names = await _names(request, account, found)
        return await page(
            request,
            visitor,
            "requests.html",
            title="Requests" if account is None else f"Requests of {account.name}",
            account=account,
            rows=[request_row(one, names) for one in found.items],
            searched=found.next_cursor is not None and len(found.items) < ROWS,
            archived=found.archived,
            filters=query.values,
            narrowed=bool(set(query.values) - {"cursor", "account"}),
            statuses=STATUSES,
            outcomes=OUTCOMES,
            tasks=tuple(TASKS),
            models=services.live.names(),
            base_url=str(request.base_url).rstrip("/"),
            pager=query.pages(found.next_cursor),
        )

    @get("/requests/{request_id:str}", guards=[needs("requests.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Response[str]:
        owner, found = await _find(request, visitor, request_id)
        if isinstance(found, OpenRequest):
            return await _show_open(request, visitor, owner, found)
        return await _show_closed(request, visitor, owner, found)

    @post("/requests/{request_id:str}/cancel", guards=[needs("requests.write")])
    async def cancel(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Redirect:
        owner, _ = await _find(request, visitor, request_id)
        await request.services.requests.cancel(owner.id, request_id)
        return see_other(f"/console/requests/{request_id}")

    @get("/requests/{request_id:str}/refund", guards=[needs("credit.write")])
    async def refund_form(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Response[str]:
        return await _refund_page(request, visitor, request_id)

    @post("/requests/{request_id:str}/refund", guards=[needs("credit.write")])
    async def refund(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Response[Any]:
        form = await read_form(request)
        sent = {"reason": form.text("reason"), "reference": form.text("reference")}
        if amount := form.amount("amount"):
            sent["amount"] = amount
        database = request.services.database
        try:
            body = read_body(credit.RefundBody, sent)
            _, found = await _find(request, visitor, request_id)
            charged = found.cost_nanos if isinstance(found, ClosedRequest) else 0
            await require_proof_of(request, charged if body.amount is None else body.amount)
            archived = await credit.archived_charge(database, request.services.blobs, request_id)
            await database.write(
                lambda connection: credit.refund(
                    connection, visitor.author(), request_id, body, archived
                )
            )
        except TollgateError as error:
            return await _refund_page(request, visitor, request_id, form.values(), error)
        return see_other(f"/console/requests/{request_id}#money")

    @get("/requests/{request_id:str}/media/{position:int}", guards=[needs("requests.read")])
    async def medium(
        self,
        request: ApiRequest,
        visitor: CurrentVisitor,
        request_id: FromPath[str],
        position: FromPath[int],
    ) -> Response[Any] | Stream:
        owner, _ = await _find(request, visitor, request_id)
        if not visitor.may("contents.read", owner.id):
            raise NotFound("not_found", "There is no such output.")
        found = await request.services.requests.lookup.find(owner.id, request_id)
        media = media_of(found) if isinstance(found, ClosedRequest) else ()
        if not 0 <= position < len(media) or not isinstance(found, ClosedRequest):
            raise NotFound("not_found", "There is no such output.")
        blob = blob_of(found, media[position])
        if blob is None:
            raise Gone("blob_expired", EXPIRED)
        extension = EXTENSIONS.get(blob.content_type, "bin")
        name = f"{request_id}-{position}.{extension}"
        answer = await serve(request, BlobResponse(blob.key, blob.content_type, name))
        answer.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return answer

    @get("/failures", guards=[needs("requests.read")])
    async def failures(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        now = datetime.now(UTC)

        def read(connection: Connection) -> tuple[Account | None, Failures, datetime]:
            account = account_of(connection, visitor, query.text("account"))
            span = query.span(visitor.zone)
            starts_at = span.starts_at if span else now - timedelta(days=FAILURE_DAYS)
            found = count_failures(
                connection,
                account_id=account.id if account else None,
                starts_at=starts_at,
                ends_at=span.ends_at if span else now,
            )
            return account, found, starts_at

        account, found, since = await request.services.database.report(
            read, account_id=visitor.account_id
        )
        total = sum(group.requests for group in found.groups)
        return await page(
            request,
            visitor,
            "failures.html",
            title=_failures_title(total, account, capped=found.capped),
            account=account,
            found=found,
            since=since,
            most=max((group.requests for group in found.groups), default=0),
            filters=query.values,
        )


async def _find(
    request: ApiRequest, visitor: Visitor, request_id: str
) -> tuple[Account, OpenRequest | ClosedRequest]:
    """Find a request and its account. Raise ``NotFound`` unless the visitor may see it."""
    found = await request.services.requests.lookup.find(None, request_id, whole=False)
    if visitor.role is None and found.account_id not in visitor.memberships:
        raise request_not_found(request_id)
    owner = await request.services.database.read(
        lambda connection: find_account(connection, found.account_id)
    )
    return owner, found


def _filter(
    connection: Connection, query: Query, account: Account | None, zone: str
) -> RequestFilter:
    span = query.span(zone)
    key = query.text("key")
    if key is not None and account is None:
        raise InvalidRequest(
            "invalid_value", "Choose an account to filter by one of its keys.", param="key"
        )
    tag, _, value = (query.text("tag") or "").partition("=")
    return RequestFilter(
        account.id if account else None,
        model=query.text("model"),
        status=query.one_of("status", STATUSES),
        task=query.one_of("task", tuple(TASKS)),
        key_id=key_number(connection, account.id, key) if key and account else None,
        outcome=query.one_of("outcome", OUTCOMES),
        starts_at=span.starts_at if span else None,
        ends_at=span.ends_at if span else None,
        tags={tag: value} if tag else {},
    )


async def _names(
    request: ApiRequest, account: Account | None, found: RequestPage
) -> Mapping[int, str]:
    """Return the names of the accounts on a page."""
    if account is not None:
        return {account.id: account.name}
    ids = {one.account_id for one in found.items}
    return await request.services.database.read(lambda connection: account_names(connection, ids))


async def _show_open(
    request: ApiRequest, visitor: Visitor, owner: Account, found: OpenRequest
) -> Response[str]:
    waiting = "" if found.position is None else f", {found.position} ahead of it"
    return await page(
        request,
        visitor,
        "request_open.html",
        title=f"{found.status.capitalize()}{waiting}: {found.model} holds {usd(found.hold_nanos)}",
        owner=owner,
        row=request_row(found, {owner.id: owner.name}),
        deadline_at=found.deadline_at,
    )


async def _show_closed(
    request: ApiRequest, visitor: Visitor, owner: Account, found: ClosedRequest
) -> Response[str]:
    services = request.services
    receipt = await services.requests.lookup.receipt(owner.id, found.request_id)
    entry = await services.database.read(
        lambda connection: charge_of(connection, owner.id, found.request_id)
    )
    sees_contents = visitor.may("contents.read", owner.id)
    shown: ShownOutput | None = None
    problem = None
    if sees_contents:
        try:
            shown = shown_output(await services.requests.lookup.with_output(found))
        except TollgateError as error:
            problem = error.message
    offered = services.live.entry(found.model)
    slo = offered.slo if offered and found.service_class == "standard" else None
    returned = sum(refund.amount_nanos for refund in receipt.refunds)
    return await page(
        request,
        visitor,
        "request.html",
        title=_title(found),
        owner=owner,
        row=request_row(found, {owner.id: owner.name}),
        closed=found,
        money=money(receipt),
        refunds=receipt.refunds,
        steps=receipt.steps,
        entry=entry,
        phases=phases(found.timings),
        speed=performance_view(
            found.timings,
            slo,
            succeeded=found.status == "succeeded",
            task=found.task,
            usage=found.usage,
        ),
        margin=(
            margin_view(found, returned, services.live.expense_rates) if visitor.role else None
        ),
        sees_contents=sees_contents,
        output=shown,
        output_problem=problem,
        refundable=found.cost_nanos - returned,
    )


async def _refund_page(
    request: ApiRequest,
    visitor: Visitor,
    request_id: str,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    owner, _ = await _find(request, visitor, request_id)
    receipt = await request.services.requests.lookup.receipt(owner.id, request_id)
    account = money(receipt)
    return await page(
        request,
        visitor,
        "refund.html",
        title=f"Refund up to {usd(account.net_nanos)} to {owner.name}",
        status=error.http_status if error else 200,
        owner=owner,
        request_id=request_id,
        money=account,
        values=values or {"reference": credit.new_reference()},
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


def _title(found: ClosedRequest) -> str:
    took = duration(found.timings.total_us)
    if found.cost_nanos:
        return f"Charged {usd(found.cost_nanos)} in {took}: {found.model}"
    return f"{found.status.capitalize()}, free, after {took}: {found.model}"


def _failures_title(total: int, account: Account | None, *, capped: bool) -> str:
    of = f" of {account.name}" if account else ""
    if not total:
        return f"Nothing{of} failed"
    return f"{'More than ' if capped else ''}{total} request{'' if total == 1 else 's'}{of} failed"


HANDLERS: Final[list[Any]] = [RequestPages]

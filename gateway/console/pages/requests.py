"""One request with its money and time; it can be cancelled and refunded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect, Stream

from gateway.accounts.accounts import Account, find_account
from gateway.api.http.bodies import read_body
from gateway.api.http.media_views import EXPIRED, blob_of, media_of
from gateway.api.http.request import ApiRequest
from gateway.api.http.serving import BlobResponse, serve
from gateway.api.native.views import margin_view
from gateway.billing.entries import charge_of
from gateway.console.answers import see_other
from gateway.console.guards import needs, require_proof_of
from gateway.console.live.open_request import texts_of
from gateway.console.playground.code import code_of_input
from gateway.console.playground.origins import KINDS, NextTask, next_tasks
from gateway.console.queries import problems_of, read_form
from gateway.console.rendering import page
from gateway.console.views.events import request_events
from gateway.console.views.files import attachment
from gateway.console.views.formats import duration, usd
from gateway.console.views.inputs import shown_input
from gateway.console.views.outputs import ShownOutput, output_file, shown_output, with_stills
from gateway.console.views.prices import used_period
from gateway.console.views.requests import money, phases, request_row
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import Gone, NotFound, TollgateError
from gateway.feedback.store import find as find_feedback
from gateway.files.kept_inputs import kept_input
from gateway.ledger.closed import ClosedRequest
from gateway.ledger.prices import LIST, price_periods_of
from gateway.operations import credit
from gateway.performance import performance_view
from gateway.requests.lookup import request_not_found
from gateway.tasks.submission import OpenRequest
from gateway.webhooks.deliveries import find_delivery
from workers.contract.kinds import EXTENSIONS


class RequestPages(Controller):
    path = "/"

    @get("/requests/{request_id:str}", guards=[needs("requests.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Response[str]:
        owner, found = await find_seen(request, visitor, request_id)
        if isinstance(found, OpenRequest):
            return await _show_open(request, visitor, owner, found)
        return await _show_closed(request, visitor, owner, found)

    @get("/requests/{request_id:str}/output", guards=[needs("requests.read")])
    async def output(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Response[bytes]:
        """The whole output as a file; media are files of their own."""
        owner, _ = await find_seen(request, visitor, request_id)
        if not visitor.may("contents.read", owner.id):
            raise NotFound("not_found", "There is no such output.")
        found = await request.services.requests.lookup.find(owner.id, request_id)
        if not isinstance(found, ClosedRequest) or found.output is None:
            raise Gone("blob_expired", EXPIRED)
        return Response(
            await asyncio.to_thread(output_file, found),
            media_type="application/json",
            headers=attachment(f"{request_id}-output.json"),
        )

    @get("/requests/{request_id:str}/cancel", guards=[needs("requests.write")])
    async def cancel_form(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Response[str]:
        return await cancel_page(request, visitor, request_id, by_operator=False)

    @post("/requests/{request_id:str}/cancel", guards=[needs("requests.write")])
    async def cancel(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Redirect:
        await cancel_seen(request, visitor, request_id)
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
            _, found = await find_seen(request, visitor, request_id)
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
        owner, _ = await find_seen(request, visitor, request_id)
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


async def find_seen(
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


async def cancel_page(
    request: ApiRequest, visitor: Visitor, request_id: str, *, by_operator: bool
) -> Response[str]:
    """Show what cancelling will do. Raise ``NotFound`` unless the visitor may do that: as an
    operator, or in the account of the request."""
    owner, found = await find_seen(request, visitor, request_id)
    if not by_operator and not visitor.may("requests.write", owner.id):
        raise request_not_found(request_id)
    return await page(
        request,
        visitor,
        "running/cancel.html",
        title="Cancel a request",
        owner=owner,
        found=found,
        is_open=isinstance(found, OpenRequest),
        by_operator=by_operator,
    )


async def cancel_seen(request: ApiRequest, visitor: Visitor, request_id: str) -> None:
    """Cancel a request. Raise ``NotFound`` unless the visitor may do that in its account."""
    owner, _ = await find_seen(request, visitor, request_id)
    if not visitor.may("requests.write", owner.id):
        raise request_not_found(request_id)
    await request.services.requests.cancel(owner.id, request_id)


async def _show_open(
    request: ApiRequest, visitor: Visitor, owner: Account, found: OpenRequest
) -> Response[str]:
    texts = await texts_of(request.services, found, sees_worker=visitor.role is not None)
    return await page(
        request,
        visitor,
        "request_open.html",
        title=texts["title"],
        live=1,
        texts=texts,
        owner=owner,
        row=request_row(found, {owner.id: owner.name}),
        key=await request.services.requests.lookup.key(found.request_id),
        deadline_at=found.deadline_at,
    )


async def _show_closed(
    request: ApiRequest, visitor: Visitor, owner: Account, found: ClosedRequest
) -> Response[str]:
    services = request.services
    receipt = await services.requests.lookup.receipt(owner.id, found.request_id)
    entry, delivery, periods, feedback = await services.database.read(
        lambda connection: (
            charge_of(connection, owner.id, found.request_id),
            find_delivery(connection, found.request_id, account_id=owner.id),
            price_periods_of(connection, model=found.model, account_ids=(LIST, owner.id)),
            find_feedback(connection, owner.id, found.request_id),
        )
    )
    sees_contents = visitor.may("contents.read", owner.id)
    shown: ShownOutput | None = None
    problem, output_bytes = None, 0
    if sees_contents:
        try:
            whole = await services.requests.lookup.with_output(found)
            shown = shown_output(whole)
            if shown is not None and shown.cut:
                output_bytes = len(await asyncio.to_thread(output_file, whole))
        except TollgateError as error:
            problem = error.message
    kept = None
    if sees_contents:
        kept = await kept_input(services.media, owner.id, found.request_id)
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
        delivery=delivery if visitor.may("webhooks.read", owner.id) else None,
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
        asked=None if kept is None else shown_input(kept),
        output=shown,
        media=with_stills(shown.media) if shown else (),
        goes_on=_goes_on(request, visitor, owner) if shown else {},
        output_problem=problem,
        output_bytes=output_bytes,
        key=await services.requests.lookup.key(found.request_id),
        period=used_period(periods, found.price_id, found.accepted_at),
        events=request_events(
            found,
            receipt.refunds,
            delivery if visitor.may("webhooks.read", owner.id) else None,
        ),
        code=None if kept is None else code_of_input(str(request.base_url).rstrip("/"), kept),
        refundable=found.cost_nanos - returned,
        feedback=feedback,
        may_rate=visitor.may("requests.write", owner.id),
    )


def _goes_on(
    request: ApiRequest, visitor: Visitor, owner: Account
) -> Mapping[str, Sequence[NextTask]]:
    """Return what the playground can make of outputs, by their kind."""
    if visitor.account_id != owner.id or not visitor.may("play.write"):
        return {}
    entries = request.services.live.entries(owner.id)
    return {kind: list(next_tasks(entries, kind)) for kind in KINDS}


async def _refund_page(
    request: ApiRequest,
    visitor: Visitor,
    request_id: str,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    owner, _ = await find_seen(request, visitor, request_id)
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


HANDLERS: Final[list[Any]] = [RequestPages]

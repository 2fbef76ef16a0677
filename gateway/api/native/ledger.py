"""An account's ledger: every movement of its balance, with reason and actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, TypedDict

from litestar import Controller, Response, get
from litestar.params import FromQuery
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.api.http.access import requested_account
from gateway.api.http.answers import PageView, json_response, page_view
from gateway.api.http.bodies import check_limit
from gateway.api.http.fields import IdInPath
from gateway.api.http.request import ApiRequest, Services
from gateway.billing.entries import (
    ArchivedEntry,
    ChargedEntry,
    LedgerEntry,
    entries,
    find_entry,
)
from gateway.checks.decoding import read_id
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest, NotFound
from gateway.pricing import format_usd


class LedgerEntryView(TypedDict):
    """One movement of a balance; credits are positive."""

    object: Literal["ledger.entry"]
    id: int
    kind: str
    amount: str
    balance_after: str
    requests: int
    request_id: str | None
    actor: str
    reason: str
    booked_at: str


class ChargedView(TypedDict):
    """One request's share of a charge."""

    request_id: str
    model: str
    cost: str


class LedgerEntryWithReceiptsView(LedgerEntryView):
    receipts: list[ChargedView]


class LedgerController(Controller):
    path = "/v1"
    tags = ["Account"]

    @get(
        "/ledger",
        opt={"scope": "read"},
        operation_id="ListLedger",
        summary="List the movements of the account's balance, newest first, in pages",
    )
    async def own(
        self,
        request: ApiRequest,
        limit: FromQuery[int] = 20,
        cursor: FromQuery[str | None] = None,
        kind: FromQuery[str | None] = None,
        account: FromQuery[str | None] = None,
    ) -> Response[PageView[LedgerEntryView]]:
        check_limit(limit)
        below = None if cursor is None else read_id(cursor)
        if cursor is not None and below is None:
            raise InvalidRequest(
                "invalid_value",
                f"cursor is {cursor!r}; send the next_cursor of an answer.",
                param="cursor",
            )

        def read(connection: Connection) -> list[LedgerEntry]:
            owner = requested_account(request, connection, account, "ledger")
            return entries(connection, owner.id, limit=limit + 1, below=below, kind=kind)

        found = await request.services.database.report(read, account_id=request.key.account_id)
        page, more = found[:limit], len(found) > limit
        return json_response(
            page_view([entry_view(entry) for entry in page], str(page[-1].id) if more else None)
        )

    @get(
        "/ledger/{entry_id:int}",
        opt={"scope": "read"},
        operation_id="GetLedgerEntry",
        summary="Get one movement, with the requests that a charge is for",
    )
    async def show(
        self,
        request: ApiRequest,
        entry_id: IdInPath,
        account: FromQuery[str | None] = None,
    ) -> Response[LedgerEntryWithReceiptsView]:
        _, entry, charged = await read_entry(
            request.services,
            lambda connection: requested_account(request, connection, account, "ledger"),
            entry_id,
            account_id=request.key.account_id,
        )
        return json_response(
            {
                **entry_view(entry),
                "receipts": [
                    {
                        "request_id": each.request_id,
                        "model": each.model,
                        "cost": format_usd(each.cost_nanos),
                    }
                    for each in charged
                ],
            }
        )


async def read_entry(
    services: Services,
    find_owner: Callable[[Connection], Account],
    entry_id: int,
    *,
    account_id: int | None,
) -> tuple[Account, LedgerEntry, Sequence[ChargedEntry]]:
    """Find a movement, also an archived one, and its account. Raise ``NotFound``.

    ``account_id`` is the account on whose behalf it is read.
    """

    def read(
        connection: Connection,
    ) -> tuple[Account, tuple[LedgerEntry, list[ChargedEntry]] | ArchivedEntry]:
        owner = find_owner(connection)
        return owner, find_entry(connection, owner.id, entry_id)

    try:
        owner, found = await services.database.report(read, account_id=account_id)
        if isinstance(found, ArchivedEntry):
            # Imported late: it takes a while, and a gateway should start quickly.
            from gateway.billing.archived_entries import read_archived_entry

            async with services.database.long_reports(account_id or owner.id):
                found = await asyncio.to_thread(read_archived_entry, services.blobs, found)
    except LookupError as error:
        raise NotFound("entry_not_found", f"{error.args[0]}.", param="entry_id") from None
    return owner, *found


def entry_view(entry: LedgerEntry) -> LedgerEntryView:
    return {
        "object": "ledger.entry",
        "id": entry.id,
        "kind": entry.kind,
        "amount": format_usd(entry.amount_nanos),
        "balance_after": format_usd(entry.balance_nanos),
        "requests": entry.requests,
        "request_id": entry.request_id,
        "actor": entry.actor,
        "reason": entry.reason,
        "booked_at": timestamp(entry.booked_at),
    }

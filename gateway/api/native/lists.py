"""Lists and summaries of requests: an account's or, for administrators, all accounts'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, TypedDict

import msgspec
from litestar import Controller, Response, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery, QueryParameter
from sqlalchemy import Connection

from gateway.accounts.keys import find_key
from gateway.api.http.access import requested_account
from gateway.api.http.answers import Item, PageView, json_response, page_view
from gateway.api.http.bodies import check_limit
from gateway.api.http.media_views import links_of
from gateway.api.http.request import ApiRequest
from gateway.api.native.usage import key_number, tag_filters
from gateway.api.native.views import RequestView, request_view
from gateway.billing.usage.report import read_span
from gateway.errors import InvalidRequest
from gateway.files.download_urls import UrlSigner
from gateway.ledger.closed import ClosedRequest
from gateway.operations.accounts import owner_id
from gateway.pricing import format_usd, parse_usd
from gateway.requests.lookup import RequestFilter, RequestPage
from gateway.tasks.submission import OpenRequest

Status = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
Outcome = Literal["charged", "released"]
Direction = Literal["desc", "asc"]


class RequestsSummaryView(TypedDict):
    """Number and cost of the requests of a list. ``open_has_more``: more are open than were counted
    among 10,000."""

    object: Literal["summary"]
    requests: int
    open: int
    open_has_more: bool
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    cost: str
    has_more: bool
    next_cursor: str | None
    archived: Sequence[str]


class RequestPageView(PageView[Item]):
    """A page of requests. ``archived``: months of its span whose requests are not listed."""

    archived: Sequence[str]


class RequestOfAllView(RequestView):
    account_id: int


async def read_traits(
    request: ApiRequest,
    model: FromQuery[str | None] = None,
    status: FromQuery[Status | None] = None,
    task: FromQuery[str | None] = None,
    outcome: FromQuery[Outcome | None] = None,
    cost_min: Annotated[
        str | None, QueryParameter(description="Least charge, in USD, such as 0.05.")
    ] = None,
    cost_max: Annotated[str | None, QueryParameter(description="Greatest charge, in USD.")] = None,
    took_min: Annotated[
        float | None,
        QueryParameter(
            description="Least time from acceptance to the end, in seconds.", ge=0, le=1_000_000
        ),
    ] = None,
    reason: Annotated[
        str | None, QueryParameter(description="Why it ended, such as worker_lost.")
    ] = None,
) -> RequestFilter:
    """Litestar dependency: the filters that need no account."""
    return RequestFilter(
        None,
        model,
        status,
        task,
        outcome=outcome,
        tags=tag_filters(request),
        cost_min_nanos=_amount(cost_min, "cost_min"),
        cost_max_nanos=_amount(cost_max, "cost_max"),
        took_min_us=None if took_min is None else round(took_min * 1_000_000),
        reason=reason,
    )


async def read_filter(
    request: ApiRequest,
    traits: NamedDependency[RequestFilter],
    key: FromQuery[str | None] = None,
    tz: FromQuery[str | None] = None,
    first: Annotated[str | None, QueryParameter(name="from")] = None,
    last: Annotated[str | None, QueryParameter(name="to")] = None,
    account: FromQuery[str | None] = None,
) -> RequestFilter:
    """Litestar dependency: the filter of an account's requests."""

    def read(connection: Connection) -> RequestFilter:
        owner = requested_account(request, connection, account, "requests")
        key_id = None if key is None else key_number(connection, owner.id, key)
        found = replace(traits, account_id=owner.id, key_id=key_id)
        return _within(found, first, last, tz or owner.report_tz)

    return await request.services.database.report(read, account_id=request.key.account_id)


async def read_filter_of_all(
    request: ApiRequest,
    traits: NamedDependency[RequestFilter],
    account: FromQuery[str | None] = None,
    key: FromQuery[str | None] = None,
    tz: FromQuery[str] = "UTC",
    first: Annotated[str | None, QueryParameter(name="from")] = None,
    last: Annotated[str | None, QueryParameter(name="to")] = None,
) -> RequestFilter:
    """Litestar dependency: the filter of all accounts' requests, or of one account's."""

    def read(connection: Connection) -> RequestFilter:
        account_id, key_id = owner_id(connection, account), None
        if key is not None and account_id is not None:
            key_id = key_number(connection, account_id, key)
        elif key is not None:
            account_id, key_id = owner_of_key(connection, key)
        return _within(replace(traits, account_id=account_id, key_id=key_id), first, last, tz)

    return await request.services.database.report(read, account_id=request.key.account_id)


def owner_of_key(connection: Connection, prefix_or_id: str) -> tuple[int, int]:
    """Find a key of any account; return the ids of its account and its own. Raise
    ``InvalidRequest``."""
    try:
        found = find_key(connection, prefix_or_id)
    except LookupError:
        raise InvalidRequest(
            "invalid_value", f"No such key: {prefix_or_id!r}; send its prefix or id.", param="key"
        ) from None
    return found.account_id, found.id


def _within(found: RequestFilter, first: str | None, last: str | None, tz: str) -> RequestFilter:
    if first is None and last is None:
        return found
    span = read_span(first, last, tz, now=datetime.now(UTC))
    return replace(found, starts_at=span.starts_at, ends_at=span.ends_at)


def _amount(text: str | None, param: str) -> int | None:
    try:
        return None if text is None else parse_usd(text)
    except ValueError as error:
        raise InvalidRequest("invalid_value", f"{param}: {error}.", param=param) from None


_TRAITS: Final = {"traits": Provide(read_traits)}
FILTERED: Final = {**_TRAITS, "filter": Provide(read_filter)}
FILTERED_OF_ALL: Final = {**_TRAITS, "filter": Provide(read_filter_of_all)}


class ListsController(Controller):
    # The list of one account is in ``requests``, because it shares its path with creation.
    path = "/v1"
    tags = ["Requests"]

    @get(
        "/requests/summary",
        opt={"scope": "read"},
        dependencies=FILTERED,
        operation_id="SummarizeRequests",
        summary="Count the requests of a list, and sum their cost",
    )
    async def summary(
        self,
        request: ApiRequest,
        filter: NamedDependency[RequestFilter],
        cursor: FromQuery[str | None] = None,
    ) -> Response[RequestsSummaryView]:
        found = await request.services.requests.lookup.summarize(filter, cursor=cursor)
        return json_response(
            {
                "object": "summary",
                "requests": found.requests,
                "open": found.running,
                "open_has_more": found.more_running,
                "succeeded": found.ended.get("succeeded", 0),
                "failed": found.ended.get("failed", 0),
                "cancelled": found.ended.get("cancelled", 0),
                "expired": found.ended.get("expired", 0),
                "cost": format_usd(found.cost_nanos),
                "has_more": found.next_cursor is not None,
                "next_cursor": found.next_cursor,
                "archived": found.archived,
            }
        )

    @get(
        "/admin/requests",
        opt={"scope": "admin", "area": "requests"},
        dependencies=FILTERED_OF_ALL,
        operation_id="ListRequestsOfAll",
        summary="List the requests of all accounts, without inputs and outputs",
    )
    async def of_all(
        self,
        request: ApiRequest,
        filter: NamedDependency[RequestFilter],
        limit: FromQuery[int] = 20,
        cursor: FromQuery[str | None] = None,
        order: FromQuery[Direction] = "desc",
    ) -> Response[RequestPageView[RequestOfAllView]]:
        check_limit(limit)
        page = await request.services.requests.lookup.list(
            filter,
            limit=limit,
            cursor=cursor,
            oldest_first=order == "asc",
        )
        links = links_of(request)
        views = [_without_output(found, links) for found in page.items]
        return json_response(request_page_view(views, page))


def request_page_view(views: Sequence[Item], page: RequestPage) -> RequestPageView[Item]:
    """Return a page of requests, with the months that it lacks."""
    return {**page_view(views, page.next_cursor), "archived": page.archived}


def _without_output(found: OpenRequest | ClosedRequest, links: UrlSigner) -> RequestOfAllView:
    """Return a request for an administrator, who does not see its output."""
    bare = (
        msgspec.structs.replace(found, output=None) if isinstance(found, ClosedRequest) else found
    )
    return {**request_view(bare, links), "account_id": found.account_id}

"""Usage over time: of an account or, for administrators, of all accounts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Literal, NotRequired, TypedDict, cast

from litestar import Controller, Response, get
from litestar.params import FromQuery, QueryParameter
from sqlalchemy import Connection

from gateway.accounts.keys import KeyFilter, list_keys
from gateway.api.http.access import requested_account
from gateway.api.http.answers import json_response
from gateway.api.http.fields import MomentInQuery, moment_in_query
from gateway.api.http.request import ApiRequest
from gateway.billing.usage.archived import add_archived
from gateway.billing.usage.report import (
    TAG,
    Filters,
    Group,
    Span,
    UsageSums,
    read_dimensions,
    read_span,
    stored_usage,
    total,
)
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest
from gateway.pricing import format_usd


class SumsView(TypedDict):
    """Sums of a group; ``usage`` omits quantities that are 0."""

    requests: int
    charged_requests: int
    cost: str
    refunded: str
    net_cost: str
    usage: dict[str, int]


class GroupView(SumsView):
    """A group with its labels, which can also be ``tag:<name>``."""

    minute: NotRequired[str]
    hour: NotRequired[str]
    day: NotRequired[str]
    month: NotRequired[str]
    account: NotRequired[str]
    key: NotRequired[str]
    model: NotRequired[str]
    task: NotRequired[str]


UsageReportView = TypedDict(
    "UsageReportView",
    {
        "object": Literal["list"],
        "from": str,
        "to": str,
        "tz": str,
        "as_of": str,
        "group_by": list[str],
        "data": list[GroupView],
        "total": GroupView,
    },
)


class UsageController(Controller):
    path = "/v1"
    tags = ["Account"]

    @get(
        "/usage",
        opt={"scope": "read"},
        operation_id="GetUsage",
        summary="Requests, quantities and cost by time, model, key, task or tag, in any time zone",
        description="Filter by tag with tag:<name>=<value>.",
    )
    async def own(
        self,
        request: ApiRequest,
        group_by: FromQuery[str] = "day",
        tz: FromQuery[str | None] = None,
        first: Annotated[str | None, QueryParameter(name="from")] = None,
        last: Annotated[str | None, QueryParameter(name="to")] = None,
        model: FromQuery[str | None] = None,
        key: FromQuery[str | None] = None,
        task: FromQuery[str | None] = None,
        as_of: MomentInQuery = None,
        account: FromQuery[str | None] = None,
    ) -> Response[UsageReportView]:
        def choose(connection: Connection) -> tuple[Filters, str]:
            owner = requested_account(request, connection, account, "usage")
            keys = None if key is None else (key_number(connection, owner.id, key),)
            filters = Filters((owner.id,), keys, one_of(model), one_of(task), tag_filters(request))
            return filters, tz or owner.report_tz

        by = read_dimensions(group_by)
        return await usage_report(request, choose, by, first=first, last=last, as_of=as_of)

    @get(
        "/admin/usage",
        opt={"scope": "admin", "area": "usage"},
        operation_id="GetUsageOfAll",
        summary="Usage of all accounts, also by account",
    )
    async def of_all(
        self,
        request: ApiRequest,
        group_by: FromQuery[str] = "account",
        tz: FromQuery[str] = "UTC",
        first: Annotated[str | None, QueryParameter(name="from")] = None,
        last: Annotated[str | None, QueryParameter(name="to")] = None,
        model: FromQuery[str | None] = None,
        task: FromQuery[str | None] = None,
        as_of: MomentInQuery = None,
    ) -> Response[UsageReportView]:
        filters = Filters(models=one_of(model), tasks=one_of(task), tags=tag_filters(request))
        by = read_dimensions(group_by, accounts=True)
        return await usage_report(
            request, lambda _: (filters, tz), by, first=first, last=last, as_of=as_of
        )


def tag_filters(request: ApiRequest) -> Mapping[str, str]:
    """Read the query's ``tag:<name>=<value>`` parameters, whose names are not fixed."""
    return {
        name.removeprefix(TAG): value
        for name, value in request.query_params.items()
        if name.startswith(TAG) and len(name) > len(TAG)
    }


def key_number(connection: Connection, account_id: int, prefix_or_id: str) -> int:
    """Find an account's key by prefix or id. Raise ``InvalidRequest``."""
    for key in list_keys(connection, KeyFilter(account_id)):
        if prefix_or_id in (key.prefix, str(key.id)):
            return key.id
    raise InvalidRequest(
        "invalid_value", f"No such key: {prefix_or_id!r}; send its prefix or id.", param="key"
    )


async def usage_report(
    request: ApiRequest,
    choose: Callable[[Connection], tuple[Filters, str]],
    by: tuple[str, ...],
    *,
    first: str | None,
    last: str | None,
    as_of: str | None,
) -> Response[UsageReportView]:
    """Answer with a report of what ``choose`` selects, in the time zone that it returns."""
    now = datetime.now(UTC)
    moment = min(moment_in_query(as_of, "as_of") or now, now)

    def read(connection: Connection) -> tuple[Span, str, UsageSums]:
        filters, zone = choose(connection)
        span = read_span(first, last, zone, now=now)
        seen = replace(span, ends_at=max(min(span.ends_at, moment), span.starts_at))
        return span, zone, stored_usage(connection, seen, by, filters)

    services, account_id = request.services, request.key.account_id
    span, zone, report = await services.database.report(read, account_id=account_id)
    await add_archived(report, services.database, services.blobs, account_id=account_id)
    return json_response(
        {
            "object": "list",
            "from": span.starts_at.astimezone(span.zone).isoformat(),
            "to": span.ends_at.astimezone(span.zone).isoformat(),
            "tz": zone,
            "as_of": timestamp(moment),
            "group_by": list(by),
            "data": [group_view(group) for group in report.groups],
            "total": group_view(total(report.groups)),
        }
    )


def one_of(value: str | None) -> tuple[str, ...] | None:
    return None if value is None else (value,)


def group_view(group: Group) -> GroupView:
    return {
        **cast("GroupView", group.labels),
        "requests": group.requests,
        "charged_requests": group.charged,
        "cost": format_usd(group.cost_nanos),
        "refunded": format_usd(group.refund_nanos),
        "net_cost": format_usd(group.cost_nanos - group.refund_nanos),
        "usage": group.units,
    }

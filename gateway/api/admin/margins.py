"""Margins of the operator, over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal, TypedDict

from litestar import Controller, Response, get
from litestar.params import FromQuery, QueryParameter
from sqlalchemy import Connection

from gateway.api.http.answers import json_response
from gateway.api.http.request import ApiRequest
from gateway.api.native.usage import one_of
from gateway.billing.usage.archived import add_archived
from gateway.billing.usage.margins import (
    MarginGroupView,
    Ratings,
    margin_views,
    ratings_of,
)
from gateway.billing.usage.report import (
    Filters,
    UsageSums,
    read_dimensions,
    read_span,
    stored_usage,
)

MarginReportView = TypedDict(
    "MarginReportView",
    {
        "object": Literal["list"],
        "from": str,
        "to": str,
        "tz": str,
        "group_by": list[str],
        "data": list[MarginGroupView],
        "total": MarginGroupView,
    },
)


class MarginsController(Controller):
    path = "/v1/admin/margins"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "usage"}

    @get(
        "/",
        operation_id="GetMargins",
        summary="Revenue, cost and margin by model, version, device, precision, account, key, task "
        "or time",
    )
    async def margins(
        self,
        request: ApiRequest,
        group_by: FromQuery[str] = "model",
        tz: FromQuery[str] = "UTC",
        first: Annotated[str | None, QueryParameter(name="from")] = None,
        last: Annotated[str | None, QueryParameter(name="to")] = None,
        model: FromQuery[str | None] = None,
    ) -> Response[MarginReportView]:
        by = read_dimensions(group_by, accounts=True, margins=True)
        filters = Filters(models=one_of(model))

        def read(connection: Connection) -> tuple[UsageSums, Ratings | None]:
            span = read_span(first, last, tz, now=datetime.now(UTC))
            report = stored_usage(connection, span, by, filters)
            return report, ratings_of(connection, report)

        services, account_id = request.services, request.key.account_id
        report, ratings = await services.database.report(read, account_id=account_id)
        await add_archived(report, services.database, services.blobs, account_id=account_id)
        span, (groups, whole) = report.span, margin_views(report, ratings)
        return json_response(
            {
                "object": "list",
                "from": span.starts_at.astimezone(span.zone).isoformat(),
                "to": span.ends_at.astimezone(span.zone).isoformat(),
                "tz": tz,
                "group_by": list(by),
                "data": groups,
                "total": whole,
            }
        )

"""What an account can ask about itself: balance, usage, the key in hand."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Annotated, Any

from litestar import Controller, Request, Response, get
from litestar.params import FromQuery, QueryParameter

from gateway.accounts.accounts import find_account
from gateway.api.access import caller
from gateway.api.answers import json_response
from gateway.api.views import key_view
from gateway.billing.usage import DIMENSIONS, Dimension, Group, read_period, total, usage
from gateway.database import Database
from gateway.errors import InvalidRequest
from gateway.pricing import format_usd
from gateway.requests.webhooks import signing_secret


class AccountController(Controller):
    path = "/v1"
    tags = ["Account"]
    opt = {"scope": "read"}

    @get("/balance", operation_id="GetBalance", summary="What the account has, and what is held")
    async def balance(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        database: Database = request.app.state.database
        account_id = caller(request).account_id
        found = await database.read(lambda connection: find_account(connection, account_id))
        return json_response(
            {
                "currency": "USD",
                "posted": format_usd(found.posted_nanos),
                "held": format_usd(found.held_nanos),
                "available": format_usd(found.available_nanos),
                "credit_limit": format_usd(found.credit_limit_nanos),
            }
        )

    @get(
        "/usage",
        operation_id="GetUsage",
        summary="Requests, quantities and cost by day, model, key or task, in any time zone",
    )
    async def usage(
        self,
        request: Request[Any, Any, Any],
        group_by: FromQuery[str] = "day",
        tz: FromQuery[str] = "UTC",
        first: Annotated[date | None, QueryParameter(name="from")] = None,
        last: Annotated[date | None, QueryParameter(name="to")] = None,
    ) -> Response[bytes]:
        database: Database = request.app.state.database
        account_id = caller(request).account_id
        by = _dimensions(group_by)
        now = datetime.now(UTC)
        period = read_period(first, last, tz, now=now)
        groups = await database.read(lambda connection: usage(connection, account_id, period, by))
        return json_response(
            {
                "object": "list",
                "from": period.first.isoformat(),
                "to": period.last.isoformat(),
                "tz": tz,
                "as_of": now.isoformat().replace("+00:00", "Z"),
                "group_by": list(by),
                "data": [_view(group) for group in groups],
                "total": _view(total(groups)),
            }
        )

    @get(
        "/webhook-secret",
        operation_id="GetWebhookSecret",
        summary="The secret that signs this account's webhooks (Standard Webhooks)",
    )
    async def webhook_secret(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        secret = signing_secret(request.app.state.pepper, caller(request).account_id)
        return json_response({"object": "webhook.secret", "secret": secret})

    @get("/keys/self", operation_id="GetOwnKey", summary="The key that makes this call")
    async def own_key(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        return json_response(key_view(caller(request)))


def _dimensions(value: str) -> tuple[Dimension, ...]:
    by = tuple(part.strip() for part in value.split(",") if part.strip())
    for part in by:
        if part not in DIMENSIONS:
            raise InvalidRequest(
                "invalid_value",
                f"group_by names {part!r}; one or more of {', '.join(DIMENSIONS)} can be had.",
                param="group_by",
            )
    return tuple(dict.fromkeys(by))  # type: ignore[arg-type]  # checked against DIMENSIONS above


def _view(group: Group) -> dict[str, Any]:
    return {
        **group.labels,
        "requests": group.requests,
        "charged_requests": group.charged,
        "cost": format_usd(group.cost_nanos),
        "usage": group.units,
    }

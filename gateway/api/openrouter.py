"""OpenRouter's questions about money: a generation, the credits, the key in hand.

The same under ``/api/v1``, where its clients look. Amounts are JSON numbers with exact digits.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from litestar import Controller, Request, Response, get
from litestar.params import FromQuery
from sqlalchemy import Connection, func, select

from gateway.accounts.accounts import find_account
from gateway.api.access import caller
from gateway.api.answers import exact_number, json_response
from gateway.api.views import timestamp
from gateway.billing.usage import Filters, Span, total, usage
from gateway.database import Database, exact_sum
from gateway.ledger.closed import Closed
from gateway.requests.lifecycle import Requests
from gateway.tables import keys, transfers


class OpenRouterController(Controller):
    path = "/v1"
    tags = ["OpenRouter"]
    opt = {"scope": "read"}

    @get("/generation", operation_id="GetGeneration", summary="One request's usage, time and cost")
    async def generation(self, request: Request[Any, Any, Any], id: FromQuery[str]) -> Any:
        return await _generation(request, id)

    @get("/credits", operation_id="GetCredits", summary="What came into the account, and went out")
    async def credits(self, request: Request[Any, Any, Any]) -> Any:
        return await _credits(request)

    @get("/key", operation_id="GetKey", summary="The key that makes this call, and its spending")
    async def key(self, request: Request[Any, Any, Any]) -> Any:
        return await _key(request)


class OpenRouterAliasController(Controller):
    path = "/api/v1"
    opt = {"scope": "read"}
    include_in_schema = False

    @get("/generation")
    async def generation(self, request: Request[Any, Any, Any], id: FromQuery[str]) -> Any:
        return await _generation(request, id)

    @get("/credits")
    async def credits(self, request: Request[Any, Any, Any]) -> Any:
        return await _credits(request)

    @get("/key")
    async def key(self, request: Request[Any, Any, Any]) -> Any:
        return await _key(request)


async def _generation(request: Request[Any, Any, Any], id: str) -> Response[bytes]:
    requests: Requests = request.app.state.requests
    receipt = await requests.receipt(caller(request).account_id, id)
    closed, refunds = receipt.closed, receipt.given
    given = sum(refund.amount_nanos for refund in refunds)
    timings, used = closed.timings, closed.usage
    prompt = used.input_tokens + used.cached_input_tokens
    cost = exact_number(closed.cost_nanos - given)
    return json_response(
        {
            "data": {
                "id": closed.request_id,
                "request_id": closed.request_id,
                "model": closed.model,
                "provider_name": "tollgate",
                "created_at": timestamp(closed.accepted_at),
                "total_cost": cost,
                "usage": cost,
                "cancelled": closed.status == "cancelled",
                "finish_reason": _finish_reason(closed),
                "latency": (timings.first_token_us or timings.total_us) / 1000,
                "generation_time": timings.forward_us / 1000,
                "tokens_prompt": prompt,
                "tokens_completion": used.output_tokens,
                "native_tokens_prompt": prompt,
                "native_tokens_completion": used.output_tokens,
                "native_tokens_cached": used.cached_input_tokens,
                "native_tokens_reasoning": 0,
                "num_media_prompt": None,
                "num_media_completion": used.images or None,
                "upstream_inference_cost": None,
                "is_byok": False,
                "external_user": None,
            }
        }
    )


async def _credits(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Their difference is the balance; usage is net of refunds."""
    database: Database = request.app.state.database
    account_id = caller(request).account_id

    def read(connection: Connection) -> tuple[int, int]:
        spent = connection.execute(
            select(exact_sum(keys.c.spent_nanos)).where(keys.c.account_id == account_id)
        ).scalar_one()
        return find_account(connection, account_id).posted_nanos + spent, spent

    credited, spent = await database.read(read)
    return json_response(
        {"data": {"total_credits": exact_number(credited), "total_usage": exact_number(spent)}}
    )


async def _key(request: Request[Any, Any, Any]) -> Response[bytes]:
    database: Database = request.app.state.database
    key = caller(request)
    now = datetime.now(UTC)
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)

    def read(connection: Connection) -> tuple[list[int], bool]:
        filters = Filters(account_ids=(key.account_id,), key_ids=(key.id,))
        spent = []
        for start in (today, today - timedelta(days=today.weekday()), today.replace(day=1)):
            whole = total(usage(connection, Span(start, now, ZoneInfo("UTC")), (), filters))
            spent.append(whole.cost_nanos - whole.refund_nanos)
        paid = select(func.count()).where(
            transfers.c.to_account == key.account_id, transfers.c.kind == "topup"
        )
        return spent, not connection.execute(paid).scalar_one()

    (day, week, month), free = await database.read(read)
    limit = key.spend_limit_nanos
    left = None if limit is None else limit - key.spent_nanos - key.held_nanos
    return json_response(
        {
            "data": {
                "label": key.name or key.prefix,
                "limit": None if limit is None else exact_number(limit),
                "limit_remaining": None if left is None else exact_number(left),
                "limit_reset": None,
                "usage": exact_number(key.spent_nanos),
                "usage_daily": exact_number(day),
                "usage_weekly": exact_number(week),
                "usage_monthly": exact_number(month),
                "is_free_tier": free,
                "is_management_key": "admin" in key.scopes,
                "expires_at": timestamp(key.expires_at) if key.expires_at else None,
                "rate_limit": {"requests": key.requests_per_minute or -1, "interval": "1m"},
            }
        }
    )


def _finish_reason(closed: Closed) -> str | None:
    choices = closed.output.value.get("choices", ()) if closed.output else ()
    return choices[0]["finish_reason"] if choices else None

"""OpenRouter's endpoints about money: a generation, the credits, the key of the call.

``app`` also serves them under ``/api/v1``, which OpenRouter's clients use. Amounts are JSON numbers
with exact digits. OpenRouter's client rejects an answer that lacks a field, so fields without a
meaning here are null.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, TypedDict
from zoneinfo import ZoneInfo

from litestar import Controller, Response, get
from litestar.params import FromQuery
from sqlalchemy import Connection, select

from gateway.accounts.accounts import find_account
from gateway.api.http.answers import DataView, ExactUsd, exact_number, json_response
from gateway.api.http.request import ApiRequest
from gateway.billing.usage.report import Filters, Span, total, usage
from gateway.catalog.listing import PROVIDER
from gateway.checks.moments import timestamp
from gateway.ledger.closed import ClosedRequest
from gateway.sql.database import exact_sum
from gateway.tables.core import keys, transfers


class UnknownView(TypedDict):
    """OpenRouter's fields of a generation that have no meaning here."""

    app_id: None
    cache_discount: None
    http_referer: None
    moderation_latency: None
    num_fetches: None
    num_search_results: None
    preset_id: None
    provider_responses: None
    router: None
    service_tier: None
    streamed: None
    upstream_id: None
    user_agent: None
    web_search_engine: None
    workspace_id: None


class GenerationView(UnknownView):
    """Usage, times in milliseconds, and cost of a request."""

    id: str
    request_id: str
    model: str
    provider_name: str
    created_at: str
    total_cost: ExactUsd
    usage: ExactUsd
    cancelled: bool
    finish_reason: str | None
    latency: float
    generation_time: float
    tokens_prompt: int
    tokens_completion: int
    native_tokens_prompt: int
    native_tokens_completion: int
    native_tokens_cached: int
    native_tokens_reasoning: int
    num_media_prompt: int | None
    num_media_completion: int | None
    upstream_inference_cost: float | None
    is_byok: bool
    external_user: str | None
    api_type: str | None
    native_finish_reason: str | None
    native_tokens_completion_images: int | None
    num_input_audio_prompt: int | None
    origin: str
    data_region: str


class CreditsView(TypedDict):
    total_credits: ExactUsd
    total_usage: ExactUsd


class KeyRateLimitView(TypedDict):
    requests: int
    interval: str
    note: str


class FreeRequestsView(TypedDict):
    """OpenRouter's daily allowance of requests to free models; always 0 here."""

    limit: int
    remaining: int
    used: int


class KeySpendingView(TypedDict):
    label: str
    limit: ExactUsd | None
    limit_remaining: ExactUsd | None
    limit_reset: str | None
    usage: ExactUsd
    usage_daily: ExactUsd
    usage_weekly: ExactUsd
    usage_monthly: ExactUsd
    is_free_tier: bool
    is_management_key: bool
    expires_at: str | None
    rate_limit: KeyRateLimitView
    is_provisioning_key: bool
    include_byok_in_limit: bool
    byok_usage: int
    byok_usage_daily: int
    byok_usage_weekly: int
    byok_usage_monthly: int
    allowed_data_regions: list[str]
    budgets: list[str]
    effective_budget: None
    free_model_daily_requests: FreeRequestsView
    creator_user_id: str | None
    organization_id: str | None
    workspace_id: str | None


class OpenRouterProviderView(TypedDict):
    name: str
    slug: str
    privacy_policy_url: str | None
    terms_of_service_url: str | None
    status_page_url: str | None


class OpenRouterController(Controller):
    path = "/v1"
    tags = ["OpenRouter"]
    opt = {"scope": "read"}

    @get("/generation", operation_id="GetGeneration", summary="Usage, time and cost of a request")
    async def generation(
        self, request: ApiRequest, id: FromQuery[str]
    ) -> Response[DataView[GenerationView]]:
        return await _generation(request, id)

    @get(
        "/credits", operation_id="GetCredits", summary="Total credit and total usage of the account"
    )
    async def credits(self, request: ApiRequest) -> Response[DataView[CreditsView]]:
        return await _credits(request)

    @get("/key", operation_id="GetKey", summary="Get the key of this call, and its spending")
    async def key(self, request: ApiRequest) -> Response[DataView[KeySpendingView]]:
        return await _key(request)

    @get("/auth/key", include_in_schema=False)
    async def auth_key(self, request: ApiRequest) -> Response[DataView[KeySpendingView]]:
        return await _key(request)

    @get(
        "/providers",
        operation_id="ListProviders",
        summary="List the only provider of all models here",
    )
    async def providers(self) -> Response[DataView[list[OpenRouterProviderView]]]:
        return json_response({"data": [_PROVIDER]})


_API_TYPES: Final = {
    "text-generation": "completions",
    "text-embedding": "embeddings",
    "text-to-speech": "tts",
}
_UNKNOWN_OF_GENERATION: Final[UnknownView] = {
    "app_id": None,
    "cache_discount": None,
    "http_referer": None,
    "moderation_latency": None,
    "num_fetches": None,
    "num_search_results": None,
    "preset_id": None,
    "provider_responses": None,
    "router": None,
    "service_tier": None,
    "streamed": None,
    "upstream_id": None,
    "user_agent": None,
    "web_search_engine": None,
    "workspace_id": None,
}
_PROVIDER: Final[OpenRouterProviderView] = {
    "name": PROVIDER,
    "slug": PROVIDER,
    "privacy_policy_url": None,
    "terms_of_service_url": None,
    "status_page_url": None,
}


async def _generation(request: ApiRequest, id: str) -> Response[DataView[GenerationView]]:
    receipt = await request.services.requests.lookup.receipt(request.key.account_id, id)
    closed, refunds = receipt.closed, receipt.refunds
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
                "finish_reason": _finish_reason(
                    await request.services.requests.lookup.with_output(closed)
                ),
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
                "api_type": _API_TYPES.get(closed.task),
                "native_finish_reason": _finish_reason(closed),
                "native_tokens_completion_images": None,
                "num_input_audio_prompt": None,
                "origin": "",
                "data_region": "global",
                **_UNKNOWN_OF_GENERATION,
            }
        }
    )


async def _credits(request: ApiRequest) -> Response[DataView[CreditsView]]:
    """Return total credit and usage, net of refunds; their difference is the balance."""
    account_id = request.key.account_id

    def read(connection: Connection) -> tuple[int, int]:
        spent = connection.execute(
            select(exact_sum(keys.c.spent_nanos)).where(keys.c.account_id == account_id)
        ).scalar_one()
        return find_account(connection, account_id).posted_nanos + spent, spent

    credited, spent = await request.services.database.read(read)
    return json_response(
        {"data": {"total_credits": exact_number(credited), "total_usage": exact_number(spent)}}
    )


async def _key(request: ApiRequest) -> Response[DataView[KeySpendingView]]:
    key = request.key
    now = datetime.now(UTC)
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)

    def read(connection: Connection) -> tuple[list[int], bool]:
        filters = Filters(account_ids=(key.account_id,), key_ids=(key.id,))
        spent = []
        for start in (today, today - timedelta(days=today.weekday()), today.replace(day=1)):
            whole = total(usage(connection, Span(start, now, ZoneInfo("UTC")), (), filters))
            spent.append(whole.cost_nanos - whole.refund_nanos)
        paid = select(transfers.c.id).where(
            transfers.c.to_account == key.account_id, transfers.c.kind == "topup"
        )
        return spent, connection.execute(paid.order_by(transfers.c.id).limit(1)).first() is None

    (day, week, month), free = await request.services.database.report(
        read, account_id=key.account_id
    )
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
                "rate_limit": {
                    "requests": key.requests_per_minute or -1,
                    "interval": "1m",
                    "note": "Limits are in the headers of each response.",
                },
                "is_provisioning_key": False,
                "include_byok_in_limit": False,
                "byok_usage": 0,
                "byok_usage_daily": 0,
                "byok_usage_weekly": 0,
                "byok_usage_monthly": 0,
                "allowed_data_regions": [],
                "budgets": [],
                "effective_budget": None,
                "free_model_daily_requests": {"limit": 0, "remaining": 0, "used": 0},
                "creator_user_id": None,
                "organization_id": None,
                "workspace_id": None,
            }
        }
    )


def _finish_reason(closed: ClosedRequest) -> str | None:
    choices = closed.output.value.get("choices", ()) if closed.output else ()
    return choices[0]["finish_reason"] if choices else None

"""Top-ups: checkout pages at the payment provider, and the provider's events."""

from __future__ import annotations

import logging
from typing import Annotated, Literal, TypedDict

from litestar import Controller, Response, get, post
from litestar.params import FromPath, JSONBody
from pydantic import ConfigDict, Field

from gateway.api.http.answers import ListView, json_response
from gateway.api.http.request import ApiRequest
from gateway.checks.moments import timestamp
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest, NotFound, Unavailable
from gateway.payments.payments import (
    Payment,
    apply,
    list_payments,
    new_payment_id,
    record_payment,
    set_reference,
)
from gateway.payments.provider import InvalidEvent, ProviderFailed
from gateway.pricing import NANOS_PER_CENT, format_usd, parse_usd
from gateway.settings import Settings

log = logging.getLogger(__name__)

EVENT_BYTES_MAX = 256 * 1024

Url = Annotated[str, Field(pattern=r"^https?://\S+$", max_length=2000)]


class PaymentBody(StrictModel):
    """Body of ``POST /v1/payments``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "amount": "25.00",
                    "success_url": "https://example.com/thanks",
                    "cancel_url": "https://example.com/",
                }
            ]
        },
    )

    amount: Annotated[str, Field(max_length=20)]
    success_url: Url
    cancel_url: Url


class PaymentView(TypedDict):
    object: Literal["payment"]
    id: str
    amount: str
    returned: str
    status: str
    provider: str
    created_at: str


class PaymentWithPageView(PaymentView):
    """A payment and its checkout page."""

    url: str


class EventView(TypedDict):
    received: bool
    result: str


class PaymentsController(Controller):
    path = "/v1/payments"
    tags = ["Account"]

    @post(
        status_code=201,
        opt={"scope": "inference", "least": "owner"},
        operation_id="CreatePayment",
        summary="Create a checkout page to buy credit by card",
    )
    async def create(
        self, request: ApiRequest, data: JSONBody[PaymentBody]
    ) -> Response[PaymentWithPageView]:
        provider = request.services.payment_provider
        if provider is None:
            raise Unavailable(
                "payments_not_configured",
                "No payment provider is configured; ask the operator for credit.",
            )
        amount = _amount(data.amount, request.services.settings)
        key = request.key
        payment_id = new_payment_id()
        made = await request.services.database.write(
            lambda connection: record_payment(
                connection, payment_id, key.account_id, amount, provider=provider.name
            )
        )
        try:
            page = await provider.checkout(
                payment_id,
                amount // NANOS_PER_CENT,
                account=key.account,
                success_url=data.success_url,
                cancel_url=data.cancel_url,
            )
        except ProviderFailed as error:
            log.error("%s", error)
            raise Unavailable(
                "payment_provider_failed", f"{error}; nothing was charged.", retry_after_s=10
            ) from None
        await request.services.database.write(
            lambda connection: set_reference(connection, payment_id, page.reference)
        )
        return json_response({**_view(made), "url": page.url}, status=201)

    @get(opt={"scope": "read"}, operation_id="ListPayments", summary="List payments, newest first")
    async def index(self, request: ApiRequest) -> Response[ListView[PaymentView]]:
        account_id = request.key.account_id
        found = await request.services.database.report(
            lambda connection: list_payments(connection, account_id), account_id=account_id
        )
        return json_response({"object": "list", "data": [_view(each) for each in found]})

    @get(
        "/{payment_id:str}",
        opt={"scope": "read"},
        operation_id="GetPayment",
        summary="Get a payment and its status",
    )
    async def show(self, request: ApiRequest, payment_id: FromPath[str]) -> Response[PaymentView]:
        account_id = request.key.account_id
        found = await request.services.database.read(
            lambda connection: list_payments(connection, account_id, payment_id=payment_id)
        )
        if not found:
            raise NotFound("payment_not_found", f"No such payment: {payment_id!r}.")
        return json_response(_view(found[0]))


class ProviderEventsController(Controller):
    path = "/webhooks"
    tags = ["Operation"]
    request_max_body_size = EVENT_BYTES_MAX

    @post(
        "/stripe",
        status_code=200,
        opt={"errors": [404, 413, 503]},
        operation_id="TakeStripeEvent",
        summary="Receive Stripe's events, signed with its secret",
        security=[],
    )
    async def stripe(self, request: ApiRequest) -> Response[EventView]:
        provider = request.services.payment_provider
        if provider is None or provider.name != "stripe":
            raise NotFound("not_found", "Stripe is not configured.")
        body = await request.body()
        try:
            event = provider.read_event(body, request.headers.get("stripe-signature", ""))
        except InvalidEvent as error:
            log.warning("rejected an event that Stripe did not sign: %s", error)
            raise InvalidRequest("bad_signature", "The event's signature is not valid.") from None
        done = await request.services.database.write(
            lambda connection: apply(connection, event, provider=provider.name)
        )
        return json_response({"received": True, "result": done})


def _amount(text: str, settings: Settings) -> int:
    least, most = parse_usd(settings.topup_min_usd), parse_usd(settings.topup_max_usd)
    try:
        amount = parse_usd(text)
    except ValueError as error:
        raise InvalidRequest("invalid_value", f"amount: {error}.", param="amount") from None
    if amount % NANOS_PER_CENT:
        raise InvalidRequest(
            "invalid_value", f"amount is {text!r}; send whole cents.", param="amount"
        )
    if not least <= amount <= most:
        raise InvalidRequest(
            "invalid_value",
            f"amount is {text!r}; it must be between ${format_usd(least)} and ${format_usd(most)}.",
            param="amount",
        )
    return amount


def _view(payment: Payment) -> PaymentView:
    return {
        "object": "payment",
        "id": payment.id,
        "amount": format_usd(payment.amount_nanos),
        "returned": format_usd(payment.returned_nanos),
        "status": payment.status,
        "provider": payment.provider,
        "created_at": timestamp(payment.created_at),
    }

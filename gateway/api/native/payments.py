"""Top-ups: checkout pages at the payment provider, and the provider's events."""

from __future__ import annotations

import logging
from typing import Annotated, Literal, TypedDict

from litestar import Controller, Response, get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from pydantic import ConfigDict, Field

from gateway.api.http.answers import PageView, json_response, page_view
from gateway.api.http.operations import author_of
from gateway.api.http.request import ApiRequest
from gateway.checks.moments import timestamp
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest, NotFound, Unavailable
from gateway.payments.checkout import NOT_CONFIGURED, TopUp, begin_payment, read_amount
from gateway.payments.payments import Payment, apply, list_payments, new_payment_id
from gateway.payments.provider import InvalidEvent
from gateway.pricing import format_usd

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
        services, key = request.services, request.key
        if services.payment_provider is None:
            raise Unavailable("payments_not_configured", NOT_CONFIGURED)
        wanted = TopUp(
            payment_id=new_payment_id(),
            account_id=key.account_id,
            account=key.account,
            amount_nanos=read_amount(data.amount, services.settings),
            success_url=data.success_url,
            cancel_url=data.cancel_url,
        )
        made, url = await begin_payment(
            services.database, services.payment_provider, wanted, author=author_of(request)
        )
        return json_response({**payment_view(made), "url": url}, status=201)

    @get(opt={"scope": "read"}, operation_id="ListPayments", summary="List payments, newest first")
    async def index(
        self,
        request: ApiRequest,
        limit: Annotated[int, QueryParameter(ge=1, le=100)] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[PaymentView]]:
        account_id = request.key.account_id
        found = await request.services.database.report(
            lambda connection: list_payments(connection, account_id, limit=limit + 1, after=cursor),
            account_id=account_id,
        )
        more = found[limit - 1].id if len(found) > limit else None
        return json_response(page_view([payment_view(each) for each in found[:limit]], more))

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
        return json_response(payment_view(found[0]))


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


def payment_view(payment: Payment) -> PaymentView:
    return {
        "object": "payment",
        "id": payment.id,
        "amount": format_usd(payment.amount_nanos),
        "returned": format_usd(payment.returned_nanos),
        "status": payment.status,
        "provider": payment.provider,
        "created_at": timestamp(payment.created_at),
    }

"""Stripe as a payment provider: Checkout sessions, and webhooks verified by Stripe's library.

Our payment id is stored in the metadata of the session and of the payment intent, whose charges
inherit it, so events can be matched in whatever order they arrive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import stripe

from gateway.payments.provider import (
    Checkout,
    EventKind,
    InvalidEvent,
    PaidEvent,
    PaymentEvent,
    ProviderFailed,
)

TOLERANCE_S: Final = 300
"""Maximum age of a signature; an older one is treated as a replay."""
TIMEOUT_S: Final = 20

_SESSION_EVENTS: Final[Mapping[str, EventKind]] = {
    "checkout.session.completed": "paid",
    "checkout.session.async_payment_succeeded": "paid",
    "checkout.session.async_payment_failed": "failed",
    "checkout.session.expired": "expired",
}


class StripeProvider:
    name = "stripe"

    def __init__(self, api_key: str, webhook_secret: str, *, base: str | None = None) -> None:
        if not webhook_secret:
            raise ValueError("the webhook secret is empty, so anyone could forge a payment event")
        self._secret = webhook_secret
        self._client = stripe.StripeClient(
            api_key,
            http_client=stripe.HTTPXClient(timeout=TIMEOUT_S),
            max_network_retries=2,
            base_addresses={"api": base} if base else {},
        )

    async def checkout(
        self,
        payment_id: str,
        amount_cents: int,
        *,
        account: str,
        success_url: str,
        cancel_url: str,
    ) -> Checkout:
        metadata = {"payment_id": payment_id}
        try:
            session = await self._client.v1.checkout.sessions.create_async(
                {
                    "mode": "payment",
                    "client_reference_id": payment_id,
                    "metadata": metadata,
                    "payment_intent_data": {"metadata": metadata},
                    "line_items": [
                        {
                            "quantity": 1,
                            "price_data": {
                                "currency": "usd",
                                "unit_amount": amount_cents,
                                "product_data": {"name": f"Credit for {account}"},
                            },
                        }
                    ],
                    "success_url": success_url,
                    "cancel_url": cancel_url,
                },
                {"idempotency_key": payment_id},
            )
        except stripe.StripeError as error:
            _failed(error)
        if session.url is None:
            raise ProviderFailed("Stripe returned no checkout page for this payment")
        return Checkout(session.id, session.url)

    def read_event(self, body: bytes, signature: str) -> PaymentEvent:
        try:
            stripe.WebhookSignature.verify_header(body, signature, self._secret, TOLERANCE_S)
            event = json.loads(body)
            return read_event(event)
        except stripe.SignatureVerificationError as error:
            raise InvalidEvent(str(error.user_message or error)) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidEvent(f"the event cannot be read: {error!r}") from None

    async def paid_since(self, moment: datetime) -> Sequence[PaidEvent]:
        try:
            sessions = await self._client.v1.checkout.sessions.list_async(
                {"created": {"gte": int(moment.timestamp())}, "status": "complete", "limit": 100}
            )
            return [
                PaidEvent(session.id, session.amount_total)
                async for session in sessions.auto_paging_iter()
                if session.payment_status == "paid" and session.amount_total is not None
            ]
        except stripe.StripeError as error:
            _failed(error)


def read_event(event: Mapping[str, Any]) -> PaymentEvent:
    """Convert a verified event. Raise ``KeyError`` or ``TypeError`` if its form is unexpected."""
    name = event["type"]
    thing: Mapping[str, Any] = event["data"]["object"]
    payment_id = (thing.get("metadata") or {}).get("payment_id")
    if name in _SESSION_EVENTS:
        kind = _SESSION_EVENTS[name]
        if kind == "paid" and thing["payment_status"] != "paid":
            kind = "other"  # the payment is still pending
        return PaymentEvent(
            event["id"],
            kind,
            name,
            payment_id=payment_id or thing.get("client_reference_id"),
            reference=thing["id"],
            intent=thing.get("payment_intent"),
            amount_cents=thing.get("amount_total") or 0,
            currency=thing.get("currency") or "",
        )
    if name == "charge.refunded":
        return PaymentEvent(
            event["id"],
            "refunded",
            name,
            payment_id=payment_id,
            intent=thing.get("payment_intent"),
            amount_cents=thing["amount_refunded"],
            currency=thing["currency"],
        )
    if name in ("charge.dispute.created", "charge.dispute.closed"):
        won = name == "charge.dispute.closed" and thing["status"] == "won"
        return PaymentEvent(
            event["id"],
            "disputed" if name == "charge.dispute.created" else "dispute_won" if won else "other",
            name,
            payment_id=payment_id,
            intent=thing.get("payment_intent"),
            amount_cents=thing["amount"],
            currency=thing["currency"],
            subject=thing["id"],
        )
    return PaymentEvent(event["id"], "other", name)


def _failed(error: stripe.StripeError) -> NoReturn:
    """Raise ``ProviderFailed``; an authentication error's message quotes the key, so omit it."""
    reason = type(error).__name__ if error.http_status == 401 else str(error.user_message or error)
    raise ProviderFailed(f"Stripe refused: {reason}") from None

"""The interface of payment providers: they take payments and report results in signed events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, TypeAlias

EventKind: TypeAlias = Literal[
    "paid", "failed", "expired", "refunded", "disputed", "dispute_won", "other"
]


@dataclass(frozen=True, slots=True)
class Checkout:
    """The provider's payment page, and its reference of the payment."""

    reference: str
    url: str


@dataclass(frozen=True, slots=True)
class PaymentEvent:
    """A provider's event about a payment; ``payment_id`` is ours, if the event carries it.

    ``amount_cents`` of a refund is the total refunded so far; of a dispute, the disputed amount.
    ``subject`` is the id of the dispute.
    """

    id: str
    kind: EventKind
    name: str
    payment_id: str | None = None
    reference: str | None = None
    intent: str | None = None
    amount_cents: int = 0
    currency: str = "usd"
    subject: str = ""


@dataclass(frozen=True, slots=True)
class PaidEvent:
    """One payment in the provider's books."""

    reference: str
    amount_cents: int


class InvalidEvent(Exception):
    """An event without a valid, recent signature of the provider."""


class ProviderFailed(Exception):
    """A call to the provider failed; nothing was charged."""


class PaymentProvider(Protocol):
    name: str

    async def checkout(
        self,
        payment_id: str,
        amount_cents: int,
        *,
        account: str,
        success_url: str,
        cancel_url: str,
    ) -> Checkout:
        """Open a page for a payment in USD, once per id. Raise ``ProviderFailed``."""

    def read_event(self, body: bytes, signature: str) -> PaymentEvent:
        """Verify and read an event. Raise ``InvalidEvent``."""

    async def paid_since(self, moment: datetime) -> Sequence[PaidEvent]:
        """List completed payments since a moment. Raise ``ProviderFailed``."""

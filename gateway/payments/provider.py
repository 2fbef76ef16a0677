"""What a payment provider is to us: it takes payments and tells, signed, what became of them."""

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
    """A page where a payment is made, and the provider's own name for it."""

    reference: str
    url: str


@dataclass(frozen=True, slots=True)
class PaymentEvent:
    """What a provider says of a payment; ``payment_id`` is ours, where the event carries it.

    ``amount_cents`` of a refund is what has been refunded of the payment in all; that of a dispute,
    what is disputed. ``subject`` names the dispute.
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
    """One payment by the provider's own books."""

    reference: str
    amount_cents: int


class InvalidEvent(Exception):
    """An event that is not the provider's: unsigned, signed with another secret, or too old."""


class ProviderFailed(Exception):
    """The provider did not do what it was asked; nothing has been charged."""


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
        """List the payments made since a moment. Raise ``ProviderFailed``."""

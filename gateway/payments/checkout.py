"""Begins a top-up: records the payment, and opens the provider's page for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection

from gateway.audit_log import Author, record
from gateway.errors import InvalidRequest, Unavailable
from gateway.payments.payments import Payment, record_payment, set_reference
from gateway.payments.provider import PaymentProvider, ProviderFailed
from gateway.pricing import NANOS_PER_CENT, format_usd, parse_usd
from gateway.settings import Settings
from gateway.sql.database import Database

log = logging.getLogger(__name__)

NOT_CONFIGURED: Final = "No payment provider is configured; ask the operator for credit."


@dataclass(frozen=True, slots=True)
class TopUp:
    """What is to be paid, and where the provider's page leads afterwards."""

    payment_id: str
    account_id: int
    account: str
    amount_nanos: int
    success_url: str
    cancel_url: str


async def begin_payment(
    database: Database, provider: PaymentProvider | None, wanted: TopUp, *, author: Author
) -> tuple[Payment, str]:
    """Record a payment and return it with the address of the provider's page; nothing is booked
    before the provider says that it was paid.

    Raise ``Unavailable`` without a provider, or if it fails.
    """
    if provider is None:
        raise Unavailable("payments_not_configured", NOT_CONFIGURED)
    name = provider.name

    def create(connection: Connection) -> Payment:
        made = record_payment(
            connection,
            wanted.payment_id,
            wanted.account_id,
            wanted.amount_nanos,
            provider=name,
        )
        record(
            connection,
            author,
            "payment.create",
            f"payment {made.id}",
            account_id=made.account_id,
            after={"amount": format_usd(made.amount_nanos), "provider": name},
        )
        return made

    made = await database.write(create)
    try:
        page = await provider.checkout(
            wanted.payment_id,
            wanted.amount_nanos // NANOS_PER_CENT,
            account=wanted.account,
            success_url=wanted.success_url,
            cancel_url=wanted.cancel_url,
        )
    except ProviderFailed as error:
        log.error("%s", error)
        raise Unavailable(
            "payment_provider_failed", f"{error}; nothing was charged.", retry_after_s=10
        ) from None
    await database.write(
        lambda connection: set_reference(connection, wanted.payment_id, page.reference)
    )
    return made, page.url


def read_amount(text: str, settings: Settings) -> int:
    """Read the amount of a top-up: whole cents, within the limits. Raise ``InvalidRequest``."""
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

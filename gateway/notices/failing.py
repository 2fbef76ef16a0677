"""Tells accounts of receivers to which deliveries were given up."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection

from gateway.checks.public_urls import host_of
from gateway.notices.kinds import CONFIRMATION, Notice
from gateway.notices.store import publish
from gateway.notices.subscriptions import address_of
from gateway.webhooks.outbox import ATTEMPTS_MAX, GivenUp

KIND: Final = "webhook.failing"


def tell_of_failures(connection: Connection, lost: Sequence[GivenUp]) -> None:
    """Tell each account, once a day for each receiver, in the transaction that gives up."""
    now = datetime.now(UTC)
    # A notice of this kind that is lost itself is not followed by another one, for ever.
    receivers = {
        (one.account_id, address_of(one.url) or host_of(one.url))
        for one in lost
        if one.kind not in (KIND, CONFIRMATION)
    }
    if receivers:
        publish(connection, [_failing(id, to, now) for id, to in sorted(receivers)], now=now)


def _failing(account_id: int, receiver: str, now: datetime) -> Notice:
    what = "Mail" if "@" in receiver else "Webhooks"
    return Notice(
        key=f"failing:{account_id}:{receiver}:{now:%Y-%m-%d}",
        account_id=account_id,
        kind=KIND,
        subject=f"receiver {receiver}",
        title=f"{what} to {receiver} could not be delivered",
        text=(
            f"{what} to {receiver} could not be delivered: after {ATTEMPTS_MAX} attempts in about "
            "three days, or because the receiver cannot be called at all, it was given up. Check "
            "that the receiver answers with a status of 200 to 299. Lists of deliveries have the "
            "status or error of each attempt; webhooks of requests can be sent again."
        ),
        data={"receiver": receiver, "day": f"{now:%Y-%m-%d}"},
    )

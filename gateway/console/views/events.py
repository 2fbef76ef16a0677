"""What happened to a request, in order: moments that were recorded, and phases from its own times.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from gateway.console.views.formats import usd
from gateway.ledger.closed import ClosedRequest
from gateway.ledger.refunds import Refund
from gateway.webhooks.deliveries import Delivery


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """``measured``: its moment is the acceptance plus a measured time, and was not recorded."""

    at: datetime
    what: str
    detail: str = ""
    measured: bool = False


def request_events(
    closed: ClosedRequest, refunds: Sequence[Refund], delivery: Delivery | None
) -> list[RequestEvent]:
    """Return the events of a request that has ended, the earliest first."""
    times, run = closed.timings, closed.run
    held = f"{usd(closed.hold_nanos)} held"
    found = [RequestEvent(closed.accepted_at, "accepted", held)]
    began = bool(run.attempt or times.forward_us)
    if closed.was_queued and began:
        found.append(_after(closed, 0, "queued", ""))
        attempt = f"attempt {run.attempt}" if run.attempt else ""
        found.append(_after(closed, times.queue_us, "started", attempt))
        if times.first_token_us:
            found.append(_after(closed, times.first_token_us, "first output", ""))
    how = f"charged {usd(closed.cost_nanos)}" if closed.cost_nanos else "free"
    released = closed.hold_nanos - closed.cost_nanos
    given = f", {usd(released)} released" if released else ""
    reason = "" if closed.status == "succeeded" else f" ({closed.reason.replace('_', ' ')})"
    found.append(RequestEvent(closed.settled_at, f"settled: {closed.status}{reason}", how + given))
    found += [
        RequestEvent(each.booked_at, each.kind, f"{usd(each.amount_nanos)}, {each.reason}")
        for each in refunds
    ]
    if delivery is not None:
        found += [
            RequestEvent(each.started_at, "webhook", str(each.code or each.error or ""))
            for each in delivery.attempts
        ]
    return sorted(found, key=lambda each: each.at)


def _after(closed: ClosedRequest, us: int, what: str, detail: str) -> RequestEvent:
    """Return an event some time after the acceptance, and not after the end."""
    at = min(closed.accepted_at + timedelta(microseconds=us), closed.settled_at)
    return RequestEvent(at, what, detail, measured=True)

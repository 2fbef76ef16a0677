"""A receipt as it is displayed: the closed request, the lines of its charge, and its refunds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from gateway.ledger.closed import ClosedRequest
from gateway.ledger.prices import PriceCache, read_price
from gateway.ledger.refunds import Refund, refunds_of
from gateway.ledger.steps import StepLine, itemized, read_steps
from gateway.pricing import Line


@dataclass(frozen=True, slots=True)
class Receipt:
    """``lines`` are recomputed from price and usage. They sum to the charge, unless the hold was
    smaller. ``steps`` are those of a workflow."""

    closed: ClosedRequest
    lines: Sequence[Line]
    refunds: Sequence[Refund]
    steps: Sequence[StepLine]


def read_receipt(
    connection: Connection,
    closed: ClosedRequest,
    prices: PriceCache,
    steps: Sequence[StepLine] | None = None,
) -> Receipt:
    """Read what belongs to a closed request. The steps of an archived one are given."""
    if steps is None:
        steps = read_steps(connection, closed.request_id)
    lines: Sequence[Line] = ()
    if closed.outcome == "charged":
        price = read_price(connection, closed.price_id, prices)
        lines = tuple(itemized(connection, closed.request_id, price, closed.usage, prices, steps))
    return Receipt(closed, lines, refunds_of(connection, closed.request_id), steps)

"""The lines of a booked charge, recomputed from its price and usage; they sum to the charge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from gateway.ledger.closed import UNITS
from gateway.ledger.prices import PriceCache, read_price
from gateway.ledger.steps import StepLine, itemized
from gateway.pricing import Line
from workers.contract.jobs import Usage


def charged_lines(
    connection: Connection,
    row: Any,
    prices: PriceCache,
    steps: Sequence[StepLine] | None = None,
) -> Iterator[Line]:
    """Itemise a row of ``receipts``, with its steps if these are archived.

    If the hold capped the charge, the last lines are reduced.
    """
    usage = Usage(**{unit: row[unit] for unit in UNITS}, attributes=row["attributes"] or {})
    left = row["charge_nanos"]
    price = read_price(connection, row["price_id"], prices)
    for line in itemized(connection, row["request_id"], price, usage, prices, steps):
        amount = min(line.amount_nanos, left)
        left -= amount
        if amount < line.amount_nanos:
            line = msgspec.structs.replace(line, amount_nanos=amount)
        yield line

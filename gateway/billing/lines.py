"""The lines of a charge that was booked: recomputed from its price and usage, summing to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gateway.ledger.closed import UNITS
from gateway.pricing import Line, Price, charge
from workers.contract.jobs import Usage


def charged_lines(price: Price, row: Any) -> Iterator[Line]:
    """Itemise a row of receipts; where less was held than the lines come to, the last give way."""
    usage = Usage(**{unit: row[unit] for unit in UNITS}, attributes=row["attributes"] or {})
    left = row["charge_nanos"]
    for line in charge(price, usage).lines:
        amount = min(line.amount_nanos, left)
        left -= amount
        yield replace(line, amount_nanos=amount)

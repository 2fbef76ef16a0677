"""Reprices past usage with another price list. Reads receipts, writes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, select

from gateway.archive.marks import archived_months, refuse_archived
from gateway.ledger.closed import UNITS
from gateway.ledger.discounts import class_price, read_discounts
from gateway.pricing import Price, UnpricedUsage, charge
from gateway.tables.core import receipts
from gateway.tables.settlement_time import settled_within
from workers.contract.jobs import Usage


@dataclass(slots=True)
class RepricedUsage:
    """One model's charged requests: what they cost, and what they would have cost.

    Requests that the other list does not price are counted separately, in neither amount.
    """

    model: str
    requests: int = 0
    charged_nanos: int = 0
    repriced_nanos: int = 0
    unpriced_requests: int = 0
    unpriced_nanos: int = 0

    @property
    def difference_nanos(self) -> int:
        return self.repriced_nanos - self.charged_nanos


def whatif(
    connection: Connection,
    prices: Mapping[str, Price],
    *,
    starts_at: datetime,
    ends_at: datetime,
    account_id: int | None = None,
) -> list[RepricedUsage]:
    """Reprice the charged requests of a span, by model; refunds are ignored.

    Requests of batches get the discount that was in force at their acceptance. Raise ``Gone`` if
    receipts of the span are archived.
    """
    refuse_archived(archived_months(connection, booked=(starts_at, ends_at)), "another price")
    discounts = read_discounts(connection)
    columns = [receipts.c[unit] for unit in UNITS]
    query = select(
        receipts.c.model,
        receipts.c.service_class,
        receipts.c.accepted_at,
        receipts.c.charge_nanos,
        receipts.c.attributes,
        *columns,
    ).where(
        receipts.c.outcome == "charged",
        *settled_within(connection, starts_at, ends_at),
    )
    if account_id is not None:
        query = query.where(receipts.c.account_id == account_id)
    found: defaultdict[str, RepricedUsage] = defaultdict(lambda: RepricedUsage(""))
    for row in connection.execute(query, execution_options={"yield_per": 1000}):
        model, service_class, accepted_at, charged, attributes, *quantities = row
        sums = found[model]
        sums.model = model
        usage = Usage(**dict(zip(UNITS, quantities, strict=True)), attributes=attributes or {})
        price = prices.get(model)
        if price is not None:
            price = class_price(price, service_class, discounts, model, accepted_at)
        would = _would_cost(price, usage)
        if would is None:
            sums.unpriced_requests += 1
            sums.unpriced_nanos += charged
            continue
        sums.requests += 1
        sums.charged_nanos += charged
        sums.repriced_nanos += would
    return [found[model] for model in sorted(found)]


def _would_cost(price: Price | None, usage: Usage) -> int | None:
    if price is None:
        return None
    try:
        return charge(price, usage).total_nanos
    except (UnpricedUsage, ValueError):
        return None

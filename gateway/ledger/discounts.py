"""Batch discounts by model, and the moments from which they apply.

The price of the class ``batch`` is the price in force for an account less the discount in force,
both at the moment of acceptance. It is stored as a separate price row before it applies, so that
charges can be recomputed like all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Final, NamedTuple, TypeAlias

from sqlalchemy import Connection, insert, select

from gateway.pricing import Price, ServiceClass, discounted
from gateway.tables.batches import batch_discounts

_TICK: Final = timedelta(microseconds=1)


class Discount(NamedTuple):
    """The share of the price that batches save from ``starts_at`` on. None: not sold in batches."""

    starts_at: datetime
    discount: str | None


Discounts: TypeAlias = Mapping[str, Sequence[Discount]]
"""Discounts by model, oldest first."""


def put_discount_in_force(
    connection: Connection, model: str, discount: str | None, now: datetime
) -> None:
    """Set a model's discount from now on. No effect if it is unchanged."""
    latest = connection.execute(
        select(batch_discounts.c.discount, batch_discounts.c.effective_from)
        .where(batch_discounts.c.model == model)
        .order_by(batch_discounts.c.effective_from.desc())
        .limit(1)
    ).first()
    if latest is not None and latest.discount == discount:
        return
    starts_at = now if latest is None else max(now, latest.effective_from + _TICK)
    connection.execute(
        insert(batch_discounts).values(model=model, effective_from=starts_at, discount=discount)
    )


def read_discounts(connection: Connection, models: Collection[str] | None = None) -> Discounts:
    """Read all discounts, of some models or of all: past, present and scheduled."""
    query = select(batch_discounts)
    if models is not None:
        query = query.where(batch_discounts.c.model.in_(models))
    found: defaultdict[str, list[Discount]] = defaultdict(list)
    for row in connection.execute(query.order_by(batch_discounts.c.effective_from)):
        found[row.model].append(Discount(row.effective_from, row.discount))
    return dict(found)


def discount_in_force(discounts: Discounts, model: str, moment: datetime) -> str | None:
    """Return the batch discount of a model at a moment."""
    return next(
        (each.discount for each in reversed(discounts.get(model, ())) if each.starts_at <= moment),
        None,
    )


def class_price(
    price: Price, service_class: ServiceClass, discounts: Discounts, model: str, moment: datetime
) -> Price | None:
    """Return a price less the discount of a service class; None if the class is not sold."""
    if service_class == "standard":
        return price
    discount = discount_in_force(discounts, model, moment)
    return None if discount is None else discounted(price, Fraction(discount))

"""What a batch takes off the price of a model, by the moment from which it counts.

The price of the class ``batch`` is the price in force for an account less the discount in force,
both at the moment of acceptance. It is stored as a price row of its own before it counts, so that
what was charged can be recomputed like everything else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Final, NamedTuple, TypeAlias

from sqlalchemy import Connection, insert, select

from gateway.pricing import Price, ServiceClass, discounted
from gateway.tables.batches import batch_discounts

_TICK: Final = timedelta(microseconds=1)


class Discount(NamedTuple):
    """From a moment on a batch takes this part off; None: the model is not sold in batches."""

    starts_at: datetime
    discount: str | None


Discounts: TypeAlias = Mapping[str, Sequence[Discount]]
"""By model, oldest first."""


def put_discount_in_force(
    connection: Connection, model: str, discount: str | None, now: datetime
) -> None:
    """Make this a model's discount from now on; do nothing while it is what it was. The first one
    of a model begins at once: nothing was sold in batches before."""
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


def read_discounts(connection: Connection) -> Discounts:
    """Read every discount that was, is or will be in force."""
    found: defaultdict[str, list[Discount]] = defaultdict(list)
    for row in connection.execute(
        select(batch_discounts).order_by(batch_discounts.c.effective_from)
    ):
        found[row.model].append(Discount(row.effective_from, row.discount))
    return dict(found)


def discount_in_force(discounts: Discounts, model: str, moment: datetime) -> str | None:
    """Say what a batch takes off a model's price at a moment."""
    return next(
        (each.discount for each in reversed(discounts.get(model, ())) if each.starts_at <= moment),
        None,
    )


def class_price(
    price: Price, service_class: ServiceClass, discounts: Discounts, model: str, moment: datetime
) -> Price | None:
    """Give what a class pays where everybody else pays a price; None if it is not sold to it."""
    if service_class == "standard":
        return price
    discount = discount_in_force(discounts, model, moment)
    return None if discount is None else discounted(price, Fraction(discount))

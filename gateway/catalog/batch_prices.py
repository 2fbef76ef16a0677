"""Which prices of the class ``batch`` there are to be: pure.

Each is a price that is or will be in force, less a discount that is or will be in force at the same
time. They are made rows before they count, so that choosing one needs no database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, TypeAlias

from gateway.ledger.discounts import Discounts


class PriceStart(NamedTuple):
    """From a moment on, until the next period of the same model and account, a price is in force;
    none where an account's own has ended."""

    starts_at: datetime
    price_id: int | None


PriceSchedule: TypeAlias = Mapping[tuple[str, int], Sequence[PriceStart]]
"""By model and account, oldest first."""

BatchPrice: TypeAlias = tuple[int, str]
"""A price's id, and what is taken off it."""

_END_OF_TIME: Final = datetime.max.replace(tzinfo=UTC)


def due(periods: PriceSchedule, discounts: Discounts, now: datetime) -> dict[BatchPrice, str]:
    """Give every pair of price and discount that can be in force from a moment on → model."""
    found = {}
    for (model, _), of_model in periods.items():
        for price_id, price_from, price_to in _spans(of_model):
            for discount, discount_from, discount_to in _spans(discounts.get(model, ())):
                begins, ends = max(price_from, discount_from), min(price_to, discount_to)
                if isinstance(price_id, int) and isinstance(discount, str) and begins < ends > now:
                    found[price_id, discount] = model
    return found


def _spans(
    periods: Sequence[tuple[datetime, int | str | None]],
) -> Iterator[tuple[int | str | None, datetime, datetime]]:
    """Yield each period's value with its start and its end; nothing without periods."""
    for place, (starts_at, value) in enumerate(periods, start=1):
        yield value, starts_at, periods[place][0] if place < len(periods) else _END_OF_TIME

"""Computes the prices of the service class ``batch`` that are needed. Pure.

Each is a price that is or will be in force, less a discount that is or will be in force at the same
time. Their rows are created before they apply, so that choosing one needs no database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, TypeAlias

from gateway.ledger.discounts import Discounts


class PriceStart(NamedTuple):
    """Start of a price, which is in force until the next start for the same model and account.

    ``price_id`` is None if an account's price override ends at that moment.
    """

    starts_at: datetime
    price_id: int | None


PriceSchedule: TypeAlias = Mapping[tuple[str, int], Sequence[PriceStart]]
"""Starts of prices by model and account, oldest first."""

BatchPrice: TypeAlias = tuple[int, str]
"""A price's id, and the discount."""

_END_OF_TIME: Final = datetime.max.replace(tzinfo=UTC)


def due(schedule: PriceSchedule, discounts: Discounts, now: datetime) -> dict[BatchPrice, str]:
    """Return every pair of price and discount that can be in force at ``now`` or later, with its
    model."""
    found = {}
    for (model, _), of_model in schedule.items():
        for price_id, price_from, price_to in _spans(of_model):
            for discount, discount_from, discount_to in _spans(discounts.get(model, ())):
                begins, ends = max(price_from, discount_from), min(price_to, discount_to)
                if isinstance(price_id, int) and isinstance(discount, str) and begins < ends > now:
                    found[price_id, discount] = model
    return found


def _spans(
    starts: Sequence[tuple[datetime, int | str | None]],
) -> Iterator[tuple[int | str | None, datetime, datetime]]:
    """Yield each value with its start and its end."""
    for place, (starts_at, value) in enumerate(starts, start=1):
        yield value, starts_at, starts[place][0] if place < len(starts) else _END_OF_TIME

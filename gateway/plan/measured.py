"""Device time of a model's requests, as the receipts of this installation have it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Final

from sqlalchemy import Connection, select

from gateway.tables.core import receipts
from gateway.tables.settlement_time import settled_within

SINCE: Final = timedelta(days=7)
RECEIPTS_MAX: Final = 1000
"""Maximum number of receipts read: the newest."""
REQUESTS_MIN: Final = 5
"""Minimum number of requests of a device for a figure."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean of successful requests on one device at one precision."""

    device: str
    dtype: str
    requests: int
    device_seconds: Fraction
    """Share of the device's time, so that requests that shared its steps add up to them."""
    price_nanos: Fraction
    """What one was charged."""


def read_measured(connection: Connection, model: str) -> tuple[Measured, ...]:
    """Read the newest requests outside of batches, by device and precision."""
    rows = connection.execute(
        select(receipts.c.run, receipts.c.gpu_us, receipts.c.charge_nanos)
        .where(
            *settled_within(connection, datetime.now(UTC) - SINCE),
            receipts.c.model == model,
            receipts.c.status == "succeeded",
            receipts.c.service_class == "standard",
            receipts.c.gpu_us > 0,
        )
        .order_by(receipts.c.settled_at.desc())
        .limit(RECEIPTS_MAX)
    )
    groups: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for run, gpu_us, charge_nanos in rows:
        ran = run or {}
        groups[ran.get("device", ""), ran.get("dtype", "")].append((gpu_us, charge_nanos))
    return tuple(
        Measured(
            device,
            dtype,
            len(group),
            Fraction(sum(gpu_us for gpu_us, _ in group), 1_000_000 * len(group)),
            Fraction(sum(charge for _, charge in group), len(group)),
        )
        for (device, dtype), group in sorted(groups.items())
        if device and len(group) >= REQUESTS_MIN
    )

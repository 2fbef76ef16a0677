"""Usage of an account over time, straight from its receipts, in any time zone.

Receipts are booked when they are settled, so a closed day never changes. Days are cut in the zone
asked for: SQL sums quarter hours (every zone's offset is a multiple of one), Python folds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sqlalchemy import ColumnElement, Connection, case, func, select

from gateway.database import exact_sum, quarter_hour
from gateway.errors import InvalidRequest
from gateway.ledger.closed import UNITS
from gateway.tables import keys, receipts

Dimension: TypeAlias = Literal["day", "model", "key", "task"]
DIMENSIONS: Final[tuple[Dimension, ...]] = ("day", "model", "key", "task")

QUANTITIES: Final = tuple(unit for unit in UNITS if unit != "requests")
QUARTER_S: Final = 900
DAYS_MAX: Final = 366


@dataclass(frozen=True, slots=True)
class Period:
    """Whole days of one time zone: ``first`` up to and including ``last``."""

    first: date
    last: date
    zone: ZoneInfo

    @property
    def starts_at(self) -> datetime:
        return datetime.combine(self.first, time.min, self.zone).astimezone(UTC)

    @property
    def ends_at(self) -> datetime:
        return datetime.combine(self.last + timedelta(days=1), time.min, self.zone).astimezone(UTC)


@dataclass(slots=True)
class Group:
    """One row of a report; ``labels`` hold the dimensions that were asked for."""

    labels: dict[str, str]
    requests: int = 0
    charged: int = 0
    cost_nanos: int = 0
    units: dict[str, int] = field(default_factory=dict)

    def add(self, other: Group) -> None:
        self.requests += other.requests
        self.charged += other.charged
        self.cost_nanos += other.cost_nanos
        for unit, quantity in other.units.items():
            self.units[unit] = self.units.get(unit, 0) + quantity


def read_period(first: date | None, last: date | None, zone_name: str, *, now: datetime) -> Period:
    """Make a period of what a client sent; by default the last 30 days, today included."""
    try:
        zone = ZoneInfo(zone_name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidRequest(
            "invalid_value",
            f"tz is {zone_name!r}; send an IANA name such as Europe/Berlin or UTC.",
            param="tz",
        ) from None
    last = last or now.astimezone(zone).date()
    first = first or last - timedelta(days=29)
    if first > last:
        raise InvalidRequest("invalid_value", f"from {first} is after to {last}.", param="from")
    if (last - first).days >= DAYS_MAX:
        raise InvalidRequest(
            "invalid_value", f"At most {DAYS_MAX} days can be asked for at once.", param="from"
        )
    return Period(first, last, zone)


def usage(
    connection: Connection, account_id: int, period: Period, by: Sequence[Dimension]
) -> list[Group]:
    """Sum an account's receipts in a period, grouped, in the order of the labels."""
    columns: dict[str, ColumnElement[Any]] = {}
    if "day" in by:
        columns["day"] = quarter_hour(receipts.c.settled_at)
    if "model" in by:
        columns["model"] = receipts.c.model
    if "task" in by:
        columns["task"] = receipts.c.task
    if "key" in by:
        columns["key"] = keys.c.prefix
    charged = receipts.c.outcome == "charged"
    query = (
        select(
            *(column.label(name) for name, column in columns.items()),
            func.count().label("requests"),
            exact_sum(case((charged, 1), else_=0)).label("charged"),
            exact_sum(receipts.c.charge_nanos).label("cost_nanos"),
            *(
                exact_sum(case((charged, receipts.c[unit]), else_=0)).label(unit)
                for unit in QUANTITIES
            ),
        )
        .select_from(
            receipts.join(keys, keys.c.id == receipts.c.key_id) if "key" in by else receipts
        )
        .where(
            receipts.c.account_id == account_id,
            receipts.c.settled_at >= period.starts_at,
            receipts.c.settled_at < period.ends_at,
        )
        .group_by(*columns.values())
    )
    groups: dict[tuple[str, ...], Group] = {}
    for row in connection.execute(query).mappings():
        labels = {name: str(row[name]) for name in columns if name != "day"}
        if "day" in columns:
            moment = datetime.fromtimestamp(row["day"] * QUARTER_S, period.zone)
            labels = {"day": moment.date().isoformat(), **labels}
        group = Group(
            labels=labels,
            requests=row["requests"],
            charged=row["charged"],
            cost_nanos=row["cost_nanos"],
            units={unit: row[unit] for unit in QUANTITIES if row[unit]},
        )
        place = tuple(labels[name] for name in by)
        if place in groups:
            groups[place].add(group)
        else:
            groups[place] = group
    return [groups[place] for place in sorted(groups)]


def total(groups: Sequence[Group]) -> Group:
    """Add groups up."""
    whole = Group(labels={})
    for group in groups:
        whole.add(group)
    return whole

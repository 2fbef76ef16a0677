"""What of a report's span the rollups have: whole days, hours and minutes, and the rest.

A sealed day or hour is used if no boundary of the report cuts it: neither an end of the span nor a
moment at which an hour, day or month of its zone begins. Minutes follow the last sealed hour; zones
have their boundaries at full minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from sqlalchemy import Connection, func, select

from gateway.billing.usage.days import DAY, floor_day
from gateway.billing.usage.minutes import HOUR, MINUTE, floor_hour, floor_minute
from gateway.tables.usage import usage_days, usage_hours, usage_minutes

Range = tuple[datetime, datetime]

_SEALED: Final = (
    (usage_hours.c.hour, HOUR),
    (usage_days.c.day, DAY),
    (usage_minutes.c.minute, MINUTE),
)
_BUILT: Final = select(
    *(
        select(end(column)).scalar_subquery()
        for column, _ in _SEALED
        for end in (func.min, func.max)
    )
)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Ranges to be read from the days, the hours and the minutes, and from what was booked."""

    days: Sequence[Range]
    hours: Sequence[Range]
    minutes: Sequence[Range]
    rest: Sequence[Range]


def cover(
    connection: Connection, span: Range, zone: ZoneInfo, by: Sequence[str], *, keys: bool
) -> Coverage:
    """Split a span. ``keys``: the report needs keys, which days do not have."""
    built, days, minutes = _built(connection)
    start = floor_hour(span[0] + HOUR - timedelta(microseconds=1))
    end = floor_hour(span[1])
    if built is None or (end := min(end, built[1])) <= start:
        return Coverage([], [], *_whole_minutes([span], minutes))
    borders = list(_borders(span, zone, by))
    cut = [
        hour for border in borders if start <= (hour := floor_hour(border)) < end and hour != border
    ]
    rest: list[Range] = [(span[0], start), *((hour, hour + HOUR) for hour in cut)]
    rest.append((end, span[1]))
    sealed, at = [], start
    for hour in cut:
        sealed.append((at, hour))
        at = hour + HOUR
    sealed.append((at, end))
    hours = [(a, b) for a, b in sealed if a < b]
    by_minute, rest = _whole_minutes([(a, b) for a, b in rest if a < b], minutes)
    if days is None or keys or "hour" in by:
        return Coverage([], hours, by_minute, rest)
    uncut = list(_runs(days, {day for each in borders if (day := floor_day(each)) != each}))
    return Coverage(
        [part for each in hours for part in _whole_days(each, uncut)],
        [part for each in hours for part in _between(each, list(_whole_days(each, uncut)))],
        by_minute,
        rest,
    )


def closed_until(connection: Connection) -> datetime | None:
    """Return a moment before which nothing is booked any more; None if no hour is sealed yet."""
    hours, _, minutes = _built(connection)
    if hours is None or minutes is None:
        return hours and hours[1]
    return max(hours[1], minutes[1])


def _built(connection: Connection) -> tuple[Range | None, Range | None, Range | None]:
    """Return the spans of the hours, days and minutes that are built, in one statement."""
    row = connection.execute(_BUILT).one()
    hours, days, minutes = (
        None if first is None else (first, last + length)
        for first, last, (_, length) in zip(row[::2], row[1::2], _SEALED, strict=True)
    )
    return hours, days, minutes


def _whole_minutes(
    ranges: Sequence[Range], minutes: Range | None
) -> tuple[list[Range], list[Range]]:
    """Split ranges into the minutes that are built, and the rest."""
    if minutes is None:
        return [], list(ranges)
    found: list[Range] = []
    for start, end in inside(ranges, minutes):
        first, last = floor_minute(start + MINUTE - timedelta(microseconds=1)), floor_minute(end)
        if first < last:
            found.append((first, last))
    rest = list(ranges)
    for each in found:
        rest = list(outside(rest, each))
    return found, rest


def inside(ranges: Iterable[Range], span: Range) -> Iterator[Range]:
    for start, end in ranges:
        if start < span[1] and span[0] < end:
            yield max(start, span[0]), min(end, span[1])


def outside(ranges: Iterable[Range], span: Range) -> Iterator[Range]:
    for start, end in ranges:
        if start < span[0]:
            yield start, min(end, span[0])
        if span[1] < end:
            yield max(start, span[1]), end


def midnight(day: date, zone: ZoneInfo) -> datetime:
    return datetime.combine(day, time.min, zone).astimezone(UTC)


def _borders(span: Range, zone: ZoneInfo, by: Sequence[str]) -> Iterator[datetime]:
    """Yield the moments at which an hour, day or month of the zone begins."""
    if "hour" in by:
        at = floor_hour(span[0])
        while at < span[1]:
            offset = at.astimezone(zone).utcoffset() or timedelta(0)
            yield at + (-offset % HOUR)
            at += HOUR
    elif "day" in by or "month" in by:
        day = span[0].astimezone(zone).date()
        while (at := midnight(day, zone)) < span[1]:
            if "day" in by or day.day == 1:
                yield at
            day += timedelta(days=1)


def _runs(days: Range, cut: set[datetime]) -> Iterator[Range]:
    """Yield the ranges between the days that are cut."""
    at = days[0]
    for day in sorted(day for day in cut if days[0] <= day < days[1]):
        if at < day:
            yield at, day
        at = day + DAY
    if at < days[1]:
        yield at, days[1]


def _whole_days(hours: Range, runs: Sequence[Range]) -> Iterator[Range]:
    """Yield the whole days of a range of hours."""
    for start, end in inside(runs, hours):
        first, last = floor_day(start + DAY - timedelta(microseconds=1)), floor_day(end)
        if first < last:
            yield first, last


def _between(hours: Range, days: Sequence[Range]) -> Iterator[Range]:
    """Yield what days leave of a range of hours."""
    at = hours[0]
    for start, end in days:
        if at < start:
            yield at, start
        at = end
    if at < hours[1]:
        yield at, hours[1]

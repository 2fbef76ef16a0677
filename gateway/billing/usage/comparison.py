"""Compares a report with an earlier span: the one before, the same weekdays, the same days a year
ago. Pure.

Times are those of a clock on the wall in the report's zone, so days of a change of clocks are
compared with whole days. A span that has not ended is compared up to the same time of day.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from typing import Final, Literal, TypeAlias, get_args

from gateway.billing.usage.report import Group, Span

Comparison: TypeAlias = Literal["before", "weekdays", "year"]
COMPARISONS: Final[tuple[Comparison, ...]] = get_args(Comparison)
WEEK: Final = 7
LEAP_DAY: Final = (2, 29)


@dataclass(frozen=True, slots=True)
class Earlier:
    """The span that a report is compared with, and how its times become those of the report."""

    span: Span
    days: int
    """Days between the spans; 0 if these are years."""

    def later(self, label: str, dimension: str) -> str:
        """Return the label of a time of this span in the report that it is compared with."""
        if dimension == "day":
            return self._later_day(date.fromisoformat(label)).isoformat()
        if dimension == "month":
            return self._later_month(label)
        if dimension == "hour":
            at = datetime.fromisoformat(label)
            moved = datetime.combine(self._later_day(at.date()), at.time(), self.span.zone)
            # A moment that clocks leave out becomes the one after it.
            return moved.astimezone(UTC).astimezone(self.span.zone).isoformat(timespec="minutes")
        return label

    def _later_day(self, day: date) -> date:
        return day + timedelta(days=self.days) if self.days else _in_year(day, day.year + 1)

    def _later_month(self, month: str) -> str:
        year, number = int(month[:4]), int(month[5:])
        if not self.days:
            return f"{year + 1:04d}-{number:02d}"
        start = self.span.starts_at.astimezone(self.span.zone).date()
        end = start + timedelta(days=self.days)
        months = year * 12 + number - 1 + (end.year - start.year) * 12 + end.month - start.month
        return f"{months // 12:04d}-{months % 12 + 1:02d}"


def earlier_span(span: Span, how: Comparison, *, now: datetime) -> Earlier:
    """Return the span to compare a report with, as long as what has passed of the report's."""
    start = span.starts_at.astimezone(span.zone)
    whole = span.ends_at.astimezone(span.zone)
    covered = (whole.date() - start.date()).days + (whole.time() > start.time())
    days = max(covered, 1)
    if how == "weekdays":
        days = math.ceil(days / WEEK) * WEEK
    shift = 0 if how == "year" else days
    passed = min(span.ends_at, max(now, span.starts_at)).astimezone(span.zone)
    return Earlier(
        replace(span, starts_at=_back(start, shift, span), ends_at=_back(passed, shift, span)),
        shift,
    )


def aligned(groups: Iterable[Group], earlier: Earlier) -> list[Group]:
    """Return groups of the earlier span with the labels of the report that they belong to."""
    return [
        replace(
            group,
            labels={name: earlier.later(label, name) for name, label in group.labels.items()},
        )
        for group in groups
    ]


def _back(moment: datetime, days: int, span: Span) -> datetime:
    day = moment.date()
    earlier = day - timedelta(days=days) if days else _in_year(day, day.year - 1)
    at: time = moment.timetz().replace(tzinfo=None)
    return datetime.combine(earlier, at, span.zone).astimezone(UTC)


def _in_year(day: date, year: int) -> date:
    if (day.month, day.day) == LEAP_DAY:
        return date(year, 2, 28)
    return day.replace(year=year)

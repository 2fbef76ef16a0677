"""Requests over time, above their list: how many were charged, and how many were free. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final, Literal, TypeAlias

from gateway.billing.usage.report import Group, Span
from gateway.ids import first_id

Unit: TypeAlias = Literal["hour", "day"]
HOURS_UNTIL: Final = timedelta(days=3)
"""Length of a span up to which bars are hours; beyond, they are days."""
BARS_MAX: Final = 120
_ID_LENGTH: Final = len("req_") + 32


@dataclass(frozen=True, slots=True)
class Bar:
    """Requests that were booked in an hour or a day. ``cursor``: where their list begins."""

    label: str
    charged: int
    free: int
    cursor: str

    @property
    def requests(self) -> int:
        return self.charged + self.free


@dataclass(frozen=True, slots=True)
class Histogram:
    unit: Unit
    bars: Sequence[Bar]

    @property
    def most(self) -> int:
        return max((bar.requests for bar in self.bars), default=0)

    @property
    def charged(self) -> int:
        return sum(bar.charged for bar in self.bars)

    @property
    def free(self) -> int:
        return sum(bar.free for bar in self.bars)


def unit_of(span: Span) -> Unit:
    return "hour" if span.ends_at - span.starts_at <= HOURS_UNTIL else "day"


def histogram(span: Span, unit: Unit, groups: Sequence[Group]) -> Histogram:
    """Return a bar for each hour or day of a span, the newest ``BARS_MAX`` of them; nothing was
    booked in those that ``groups`` lack."""
    found = {group.labels[unit]: group for group in groups}
    labels = list(dict.fromkeys(_labels(span, unit)))[-BARS_MAX:]
    bars = []
    for label in labels:
        group = found.get(label)
        bars.append(
            Bar(
                label,
                charged=group.charged if group else 0,
                free=group.requests - group.charged if group else 0,
                cursor=_cursor(_end(label, unit, span)),
            )
        )
    return Histogram(unit, bars)


def _labels(span: Span, unit: Unit) -> Sequence[str]:
    """Return the labels of a report, in order; an hour that a change of clocks repeats has two."""
    labels = []
    # In UTC: arithmetic within a zone leaves out the hour that a change of clocks repeats.
    at = span.starts_at.astimezone(UTC)
    while at < span.ends_at:
        local = at.astimezone(span.zone)
        if unit == "hour":
            labels.append(local.replace(minute=0).isoformat(timespec="minutes"))
            at += timedelta(minutes=30)
        else:
            labels.append(local.date().isoformat())
            at += timedelta(hours=12)
    return labels


def _end(label: str, unit: Unit, span: Span) -> datetime:
    if unit == "hour":
        return datetime.fromisoformat(label) + timedelta(hours=1)
    return datetime.combine(date.fromisoformat(label) + timedelta(days=1), time(), span.zone)


def _cursor(end: datetime) -> str:
    """Return the id below which everything was accepted before a moment."""
    return first_id("req_", end.astimezone(UTC)).ljust(_ID_LENGTH, "0")

"""Requests over time, above their list: how many ended with each status. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final, Literal, TypeAlias

from gateway.billing.usage.failures import UNSUCCESSFUL, EndCount
from gateway.billing.usage.report import Group, Span
from gateway.ids import first_id

Unit: TypeAlias = Literal["hour", "day"]
HOURS_UNTIL: Final = timedelta(days=3)
"""Length of a span up to which bars are hours; beyond, they are days."""
BARS_MAX: Final = 120
OUTCOMES: Final = ("charged", "free")
_ID_LENGTH: Final = len("req_") + 32


@dataclass(frozen=True, slots=True)
class Bar:
    """Requests that were booked in an hour or a day, as many as of each series of the histogram.
    ``cursor``: where their list begins."""

    label: str
    counts: Sequence[int]
    cursor: str

    @property
    def requests(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Histogram:
    """``series``: names of what each bar is a stack of, from its foot."""

    unit: Unit
    series: Sequence[str]
    bars: Sequence[Bar]

    @property
    def most(self) -> int:
        return max((bar.requests for bar in self.bars), default=0)

    @property
    def totals(self) -> Sequence[int]:
        return [sum(bar.counts[at] for bar in self.bars) for at in range(len(self.series))]


def unit_of(span: Span) -> Unit:
    return "hour" if span.ends_at - span.starts_at <= HOURS_UNTIL else "day"


def histogram(
    span: Span, unit: Unit, groups: Sequence[Group], unsuccessful: Sequence[EndCount] | None
) -> Histogram:
    """Return a bar for each hour or day of a span, the newest ``BARS_MAX`` of them; nothing was
    booked in those that ``groups`` lack.

    Bars are stacks of statuses. If it is not known which requests were ``unsuccessful``, they are
    stacks of outcomes.
    """
    found = {group.labels[unit]: group for group in groups}
    ended: Counter[tuple[str, str]] = Counter()
    for each in unsuccessful or ():
        ended[_label(each.at.astimezone(span.zone), unit), each.status] += each.requests
    series = OUTCOMES if unsuccessful is None else ("succeeded", *UNSUCCESSFUL)
    bars = []
    for label in list(dict.fromkeys(_labels(span, unit)))[-BARS_MAX:]:
        group = found.get(label, Group(labels={}))
        if unsuccessful is None:
            counts = [group.charged, group.requests - group.charged]
        else:
            others = [ended[label, status] for status in UNSUCCESSFUL]
            counts = [max(group.requests - sum(others), 0), *others]
        bars.append(Bar(label, counts, _cursor(_end(label, unit, span))))
    return Histogram(unit, series, bars)


def _label(local: datetime, unit: Unit) -> str:
    if unit == "day":
        return local.date().isoformat()
    return local.replace(minute=0).isoformat(timespec="minutes")


def _labels(span: Span, unit: Unit) -> Sequence[str]:
    """Return the labels of a report, in order; an hour that a change of clocks repeats has two."""
    # In UTC: arithmetic within a zone leaves out the hour that a change of clocks repeats.
    at, last = span.starts_at.astimezone(UTC), span.ends_at.astimezone(UTC) - timedelta.resolution
    step = timedelta(minutes=30) if unit == "hour" else timedelta(hours=12)
    moments = []
    while at < last:
        moments.append(at)
        at += step
    # A span that ends within an hour or a day, too.
    return [_label(each.astimezone(span.zone), unit) for each in (*moments, last)]


def _end(label: str, unit: Unit, span: Span) -> datetime:
    if unit == "hour":
        return datetime.fromisoformat(label) + timedelta(hours=1)
    return datetime.combine(date.fromisoformat(label) + timedelta(days=1), time(), span.zone)


def _cursor(end: datetime) -> str:
    """Return the id below which everything was accepted before a moment."""
    return first_id("req_", end.astimezone(UTC)).ljust(_ID_LENGTH, "0")

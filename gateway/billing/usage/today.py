"""Sums of the present day by account and by model, and of the same weekday before.

Nothing is booked into closed minutes and hours, so their sums are kept; a reading adds those that
were closed since, and what is still open. Accounts are known by their numbers, as names change.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final
from zoneinfo import ZoneInfo

from sqlalchemy import Connection

from gateway.billing.usage.comparison import earlier_span
from gateway.billing.usage.coverage import closed_until, midnight
from gateway.billing.usage.days import DAY
from gateway.billing.usage.minutes import floor_minute
from gateway.billing.usage.report import Filters, Group, Span, regroup, usage

ZONES_MAX: Final = 8
"""Maximum number of zones whose sums are kept: those that were read last."""


@dataclass(frozen=True, slots=True)
class DaySums:
    """Sums of a day by the numbers of accounts, and by models."""

    by_account: Mapping[str, Group] = field(default_factory=dict)
    by_model: Mapping[str, Group] = field(default_factory=dict)

    def plus(self, groups: list[Group]) -> DaySums:
        return DaySums(
            _joined(self.by_account, regroup(groups, "account_id")),
            _joined(self.by_model, regroup(groups, "model")),
        )


class TodayUsage:
    """Reads the sums of zones. Threads may read at the same time."""

    def __init__(self) -> None:
        self._zones = functools.lru_cache(ZONES_MAX)(_Zone)

    def read(self, connection: Connection, zone: str, now: datetime) -> DaySums:
        """Sum the present day of a zone."""
        kept = self._zones(zone)
        return kept.today.read(connection, replace(_day(kept.zone, now), ends_at=now))

    def week_before(self, connection: Connection, zone: str, now: datetime) -> DaySums:
        """Sum the same weekday before, until the same minute."""
        kept = self._zones(zone)
        day = _day(kept.zone, now)
        return kept.before.read(
            connection, earlier_span(day, "weekdays", now=floor_minute(now)).span
        )


class _Zone:
    def __init__(self, name: str) -> None:
        self.zone = ZoneInfo(name)
        self.today = _KeptSums()
        self.before = _KeptSums()


class _KeptSums:
    """The sums of a span from its start until a moment before which everything is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._span: Span | None = None
        self._sums = DaySums()

    def read(self, connection: Connection, span: Span) -> DaySums:
        with self._lock:
            if self._span is None or self._span.starts_at != span.starts_at:
                self._span, self._sums = replace(span, ends_at=span.starts_at), DaySums()
            if span.ends_at <= self._span.ends_at:
                return self._sums
            closed_at = min(closed_until(connection) or span.starts_at, span.ends_at)
            if closed_at > self._span.ends_at:
                closed = replace(span, starts_at=self._span.ends_at, ends_at=closed_at)
                self._sums = self._sums.plus(_usage(connection, closed))
                self._span = replace(span, ends_at=closed_at)
            kept, still_open = self._sums, replace(span, starts_at=self._span.ends_at)
        if still_open.starts_at >= span.ends_at:
            return kept
        return kept.plus(_usage(connection, still_open))


def _day(zone: ZoneInfo, now: datetime) -> Span:
    day = now.astimezone(zone).date()
    return Span(midnight(day, zone), midnight(day + DAY, zone), zone)


def _usage(connection: Connection, span: Span) -> list[Group]:
    return usage(connection, span, ["account_id", "model"], Filters(), units=False)


def _joined(known: Mapping[str, Group], further: Iterable[Group]) -> Mapping[str, Group]:
    found = dict(known)
    for group in further:
        (label,) = group.labels.values()
        if (earlier := found.get(label)) is not None:
            group.add(earlier)
        found[label] = group
    return found

"""Usage reports by account, key, model, task and tag, in any time zone, exact to the nano-dollar.

Reports use the time of booking, so a past day never changes. Sealed days and hours, and the minutes
since then, come from the rollups (``coverage``). The rest (the last minute, partial hours at the
ends, hours split by a zone's midnight) comes from receipts and refunds. A report by tag reads
receipts and refunds only. Receipts of archived months are added by ``archived.py`` when the
transaction has ended; their refunds are in the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar
from zoneinfo import ZoneInfo

from sqlalchemy import Connection, Table

from gateway.accounts.budgets import read_zone
from gateway.archive.marks import Archive, refuse_archived, removed_archives
from gateway.billing.usage.coverage import Range, cover, inside, midnight, outside
from gateway.billing.usage.sums import RUN as RUN
from gateway.billing.usage.sums import TAG as TAG
from gateway.billing.usage.sums import TIMES as TIMES
from gateway.billing.usage.sums import Filters as Filters
from gateway.billing.usage.sums import (
    RollupPart,
    booked_sums,
    range_parameters,
    rolled_sums,
    shape_of,
)
from gateway.checks.moments import EPOCH, read_day, read_moment
from gateway.errors import InvalidRequest
from gateway.sql.partitions import is_partitioned
from gateway.tables.core import QUANTITIES, receipts, refunds
from gateway.tables.settlement_time import IdRange, id_ranges, refunded_ids
from gateway.tables.usage import usage_daily, usage_hourly, usage_minutely

DIMENSIONS: Final = (*TIMES[1:], "account", "key", "model", "task")
"""Dimensions for clients; internal callers also use minute, ``account_id`` and ``key_id``."""
DAYS_MAX: Final = 800
RANGES_MAX: Final = 100
"""Maximum number of time ranges in one query's condition."""
RANGES_APART: Final = 3
"""Maximum number of time ranges of bookings that are read apart."""
_TIME_LABELS: Final[Mapping[str, Callable[[datetime], str]]] = {
    "minute": lambda local: local.isoformat(timespec="minutes"),
    "hour": lambda local: local.replace(minute=0).isoformat(timespec="minutes"),
    "day": lambda local: local.date().isoformat(),
    "month": lambda local: local.date().isoformat()[:7],
}
"""Labels of a local time."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Span:
    """An interval ``[starts_at, ends_at)``, and the zone of its hours, days and months."""

    starts_at: datetime
    ends_at: datetime
    zone: ZoneInfo


@dataclass(slots=True)
class Group:
    """One row of a report; ``labels`` has the values of the requested dimensions."""

    labels: dict[str, str]
    requests: int = 0
    charged: int = 0
    cost_nanos: int = 0
    refund_nanos: int = 0
    units: dict[str, int] = field(default_factory=dict)
    expense_nanos: int = 0
    """Cost to the operator, of ``expensed`` requests; it is never shown to customers."""
    expensed: int = 0

    def add(self, other: Group) -> None:
        self.requests += other.requests
        self.charged += other.charged
        self.cost_nanos += other.cost_nanos
        self.refund_nanos += other.refund_nanos
        self.expense_nanos += other.expense_nanos
        self.expensed += other.expensed
        for unit, quantity in other.units.items():
            self.units[unit] = self.units.get(unit, 0) + quantity


def read_span(first: str | None, last: str | None, tz: str, *, now: datetime) -> Span:
    """Parse a span: days of the zone, the last included, or moments, the last excluded.

    The default is the last 30 days, today included. Raise ``InvalidRequest`` if it is not valid.
    """
    try:
        zone = read_zone(tz)
    except ValueError as error:
        raise InvalidRequest("invalid_value", f"tz: {error}.", param="tz") from None
    ends_at = _moment(last or now.astimezone(zone).date().isoformat(), zone, "to", days=1)
    if first is None:
        local = (ends_at - timedelta(microseconds=1)).astimezone(zone).date()
        starts_at = midnight(local - timedelta(days=29), zone)
    else:
        starts_at = _moment(first, zone, "from")
    if starts_at >= ends_at:
        raise InvalidRequest(
            "invalid_value", f"from {first} is not before the end of to {last}.", param="from"
        )
    if ends_at - starts_at > timedelta(days=DAYS_MAX):
        raise InvalidRequest(
            "invalid_value", f"A report can cover at most {DAYS_MAX} days.", param="from"
        )
    return Span(starts_at, ends_at, zone)


def read_dimensions(text: str, *, accounts: bool = False, margins: bool = False) -> tuple[str, ...]:
    """Parse a ``group_by``. Raise ``InvalidRequest`` if it names an unknown dimension."""
    by = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    known = [name for name in DIMENSIONS if accounts or name != "account"]
    known += RUN if margins else ()
    for part in by:
        if part not in known and not (part.startswith(TAG) and len(part) > len(TAG)):
            raise InvalidRequest(
                "invalid_value",
                f"group_by names {part!r}; supported are {', '.join(known)} and tag:<name>.",
                param="group_by",
            )
    return by


@dataclass(frozen=True, slots=True)
class ArchivedPart:
    """An archive of which a report needs the receipts booked in some ranges."""

    archive: Archive
    ranges: Sequence[Range]


@dataclass(slots=True)
class UsageSums:
    """Sums of a span, grouped by labels; not complete before the ``archived`` parts are added."""

    span: Span
    by: Sequence[str]
    filters: Filters
    units: bool = True
    archived: Sequence[ArchivedPart] = ()
    _groups: dict[tuple[str, ...], Group] = field(default_factory=dict)

    @property
    def bucket_s(self) -> int:
        """Length of the intervals by which receipts are summed, before times are labelled."""
        return 60 if "minute" in self.by else 900

    @property
    def groups(self) -> list[Group]:
        """The groups, ordered by their labels."""
        return [self._groups[place] for place in sorted(self._groups)]

    def has_one_label(self, part: Range) -> bool:
        """Whether all times in a range have the same labels."""
        first, last = part[0], part[1] - timedelta(microseconds=1)
        return self._times(first) == self._times(last)

    def add(self, rows: Iterable[tuple[datetime, Group]]) -> None:
        """Add groups of moments to the groups of their labels; times are those of the zone."""
        for at, group in rows:
            times = self._times(at)
            labels = {
                name: times[name] if name in times else group.labels[name] for name in self.by
            }
            place = tuple(labels.values())
            if place in self._groups:
                self._groups[place].add(group)
            else:
                group.labels = labels
                self._groups[place] = group

    def _times(self, at: datetime) -> dict[str, str]:
        """Return the labels of a moment, in the zone."""
        local = at.astimezone(self.span.zone)
        return {name: _TIME_LABELS[name](local) for name in self.by if name in TIMES}


def usage(
    connection: Connection,
    span: Span,
    by: Sequence[str],
    filters: Filters,
    *,
    rolled: bool = True,
    units: bool = True,
) -> list[Group]:
    """Sum what was booked in a span, grouped and ordered by the labels.

    With ``rolled=False`` rollups are not used; the result is the same. Without ``units`` only
    requests and money are summed, which is faster. Raise ``Gone`` if it needs receipts that are
    archived.
    """
    report = stored_usage(connection, span, by, filters, rolled=rolled, units=units)
    refuse_archived([part.archive.month for part in report.archived], "this report")
    return report.groups


def stored_usage(
    connection: Connection,
    span: Span,
    by: Sequence[str],
    filters: Filters,
    *,
    rolled: bool = True,
    units: bool = True,
) -> UsageSums:
    """Sum what the database has of a report, and name the archives that have the rest."""
    report = UsageSums(span, by, filters, units)
    unsealed: list[Range] = [(span.starts_at, span.ends_at)]
    fine = bool(filters.tags) or any(
        name.startswith(TAG) or name in ("minute", *RUN) for name in by
    )
    if rolled and not fine:
        keys = filters.key_ids is not None or not set(by).isdisjoint(("key", "key_id"))
        covered = cover(connection, (span.starts_at, span.ends_at), span.zone, by, keys=keys)
        unsealed = list(covered.rest)
        sealed = [(usage_daily, part) for part in covered.days]
        sealed += [(usage_hourly, part) for part in covered.hours]
        sealed += [(usage_minutely, part) for part in covered.minutes]
        for parts_read in _chunks(sealed):
            report.add(_rollup_rows(connection, parts_read, report))
    stored = unsealed
    parts = []
    for archive in removed_archives(connection, (span.starts_at, span.ends_at)):
        # Receipts that are still in the database are in its files as well.
        if ranges := list(inside(stored, archive.span)):
            parts.append(ArchivedPart(archive, ranges))
            stored = list(outside(stored, archive.span))
    report.archived = parts
    for table, ranges in ((receipts, stored), (refunds, unsealed)):
        if len(ranges) <= RANGES_APART:
            # They can be far from each other, and are read without what is between them.
            report.add(_booked_rows(connection, table, [[each] for each in ranges], report))
        else:
            for some in _chunks(ranges):
                report.add(_booked_rows(connection, table, [some], report))
    return report


def regroup(groups: Iterable[Group], name: str) -> list[Group]:
    """Sum groups by one of their labels, and order them by it."""
    found: dict[str, Group] = {}
    for group in groups:
        label = group.labels[name]
        found.setdefault(label, Group(labels={name: label})).add(group)
    return [found[label] for label in sorted(found)]


def total(groups: Iterable[Group]) -> Group:
    """Sum groups."""
    whole = Group(labels={})
    for group in groups:
        whole.add(group)
    return whole


def _rollup_rows(
    connection: Connection, parts: Sequence[tuple[Table, Range]], report: UsageSums
) -> Iterator[tuple[datetime, Group]]:
    """Sum ranges of days and hours, in one statement."""
    by, filters = report.by, report.filters
    query = rolled_sums(
        tuple(RollupPart(table, report.has_one_label(part)) for table, part in parts),
        shape_of(by, filters, units=report.units),
    )
    parameters = {**filters.values, **range_parameters(part for _, part in parts)}
    for row in connection.execute(query, parameters).mappings():
        yield row.get("at", EPOCH), group_of(row, by, units=report.units)


def _booked_rows(
    connection: Connection, table: Table, parts: Sequence[Sequence[Range]], report: UsageSums
) -> Iterator[tuple[datetime, Group]]:
    """Sum receipts, or refunds under the labels of their receipts, in parts of some ranges."""
    by, filters, seconds = report.by, report.filters, report.bucket_s
    counts: list[tuple[int, int]] = []
    times: list[Range] = []
    ids: list[IdRange] = []
    for ranges in parts:
        whole = min(start for start, _ in ranges), max(end for _, end in ranges)
        known = _booked_ids(connection, table, whole, filters)
        if known is not None:
            counts.append((len(ranges), len(known)))
            times += [*ranges, whole]
            ids += known
    if not counts:
        return
    query = booked_sums(table, shape_of(by, filters, units=report.units), seconds, tuple(counts))
    parameters = {**filters.values, **range_parameters(times, ids)}
    for row in connection.execute(query, parameters).mappings():
        at = EPOCH + timedelta(seconds=row["at"] * seconds) if "at" in row else EPOCH
        yield at, group_of(row, by, units=report.units)


def _booked_ids(
    connection: Connection, table: Table, span: Range, filters: Filters
) -> Sequence[IdRange] | None:
    """Return where the ids of what was booked in a span are, if that is known; None if nothing
    was."""
    if table is receipts:
        return id_ranges(connection, *span)
    if not is_partitioned(connection):
        return []
    booked = [refunds.c.booked_at >= span[0], refunds.c.booked_at < span[1]]
    if filters.account_ids is not None:
        booked.append(refunds.c.account_id.in_(filters.account_ids))
    found = refunded_ids(connection, *booked)
    return None if found is None else [found]


def group_of(row: Any, by: Sequence[str], *, units: bool = True) -> Group:
    """Read a row of sums, which has the labels besides times by their names."""
    return Group(
        labels={name: str(row[name]) for name in by if name not in TIMES},
        requests=row.get("requests", 0),
        charged=row.get("charged", 0),
        cost_nanos=row.get("cost_nanos", 0),
        refund_nanos=row.get("refund_nanos", 0),
        units={unit: row[unit] for unit in QUANTITIES if row.get(unit)} if units else {},
        expense_nanos=row.get("expense_nanos", 0),
        expensed=row.get("expensed", 0),
    )


def _chunks(ranges: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(ranges), RANGES_MAX):
        yield ranges[start : start + RANGES_MAX]


def _moment(text: str, zone: ZoneInfo, param: str, *, days: int = 0) -> datetime:
    """Parse a day, to which ``days`` are added, or a moment with its offset."""
    try:
        if len(text) == len("2026-03-01"):
            return midnight(read_day(text) + timedelta(days=days), zone)
        return read_moment(text)
    except ValueError:
        pass
    raise InvalidRequest(
        "invalid_value",
        f"{param} is {text!r}; send a day such as 2026-03-01 or a moment with its offset such as "
        "2026-03-01T10:00:00Z.",
        param=param,
    )

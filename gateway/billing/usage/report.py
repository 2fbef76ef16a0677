"""Usage reports by account, key, model, task and tag, in any time zone, exact to the nano-dollar.

Reports use the time of booking, so a past day never changes. Sealed days and hours come from the
rollups (``coverage``). The rest (hours not sealed yet, partial hours at the ends, hours split by a
zone's midnight) comes from receipts and refunds. A report by tag reads receipts and refunds only.
Receipts of archived months are added by ``archived.py`` when the transaction has ended; their
refunds are in the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar
from zoneinfo import ZoneInfo

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    String,
    Table,
    case,
    func,
    literal_column,
    or_,
    select,
    union_all,
)

from gateway.accounts.budgets import read_zone
from gateway.archive.marks import Archive, refuse_archived, removed_archives
from gateway.billing.usage.coverage import Range, cover, inside, midnight, outside
from gateway.billing.usage.days import ALL_ACCOUNTS
from gateway.checks.moments import EPOCH, read_day, read_moment
from gateway.errors import InvalidRequest
from gateway.sql.database import exact_sum, time_bucket
from gateway.tables.core import (
    QUANTITIES,
    accounts,
    keys,
    receipts,
    refunds,
    usage_daily,
    usage_hourly,
)
from gateway.tables.settlement_time import refunded_within, settled_within

TIMES: Final = ("minute", "hour", "day", "month")
DIMENSIONS: Final = (*TIMES[1:], "account", "key", "model", "task")
"""Dimensions for clients; internal callers also use minute, ``account_id`` and ``key_id``."""
RUN: Final = ("device", "dtype", "endpoint", "served_by")
"""Further dimensions for operators, which only receipts have."""
TAG: Final = "tag:"
DAYS_MAX: Final = 800
RANGES_MAX: Final = 100
"""Maximum number of time ranges in one query's condition."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Span:
    """An interval ``[starts_at, ends_at)``, and the zone of its hours, days and months."""

    starts_at: datetime
    ends_at: datetime
    zone: ZoneInfo


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of a report; None selects everything."""

    account_ids: tuple[int, ...] | None = None
    key_ids: tuple[int, ...] | None = None
    models: tuple[str, ...] | None = None
    tasks: tuple[str, ...] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


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

    def add(self, rows: Iterable[tuple[datetime, Group]]) -> None:
        """Add groups of moments to the groups of their labels; times are those of the zone."""
        for at, group in rows:
            local = at.astimezone(self.span.zone)
            times = {
                "minute": local.isoformat(timespec="minutes"),
                "hour": local.replace(minute=0).isoformat(timespec="minutes"),
                "day": local.date().isoformat(),
                "month": local.date().isoformat()[:7],
            }
            labels = {
                name: times[name] if name in TIMES else group.labels[name] for name in self.by
            }
            place = tuple(labels.values())
            if place in self._groups:
                self._groups[place].add(group)
            else:
                group.labels = labels
                self._groups[place] = group


def usage(
    connection: Connection,
    span: Span,
    by: Sequence[str],
    filters: Filters,
    *,
    rolled: bool = True,
) -> list[Group]:
    """Sum what was booked in a span, grouped and ordered by the labels.

    With ``rolled=False`` rollups are not used; the result is the same. Raise ``Gone`` if it needs
    receipts that are archived.
    """
    report = stored_usage(connection, span, by, filters, rolled=rolled)
    refuse_archived([part.archive.month for part in report.archived], "this report")
    return report.groups


def stored_usage(
    connection: Connection,
    span: Span,
    by: Sequence[str],
    filters: Filters,
    *,
    rolled: bool = True,
) -> UsageSums:
    """Sum what the database has of a report, and name the archives that have the rest."""
    report = UsageSums(span, by, filters)
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
        for parts_read in _chunks(sealed):
            report.add(_rollup_rows(connection, parts_read, by, filters))
    stored = unsealed
    parts = []
    for archive in removed_archives(connection, (span.starts_at, span.ends_at)):
        # Receipts that are still in the database are in its files as well.
        if ranges := list(inside(stored, archive.span)):
            parts.append(ArchivedPart(archive, ranges))
            stored = list(outside(stored, archive.span))
    report.archived = parts
    for table, moment, ranges in (
        (receipts, receipts.c.settled_at, stored),
        (refunds, refunds.c.booked_at, unsealed),
    ):
        for some in _chunks(ranges):
            report.add(_booked_rows(connection, table, moment, some, report))
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
    connection: Connection,
    parts: Sequence[tuple[Table, Range]],
    by: Sequence[str],
    filters: Filters,
) -> Iterator[tuple[datetime, Group]]:
    """Sum ranges of days and hours, in one statement."""
    selected = [_rolled(table, part, by, filters) for table, part in parts]
    query = selected[0] if len(selected) == 1 else union_all(*selected)
    for row in connection.execute(query).mappings():
        yield row.get("at", EPOCH), group_of(row, by)


def _rolled(table: Table, span: Range, by: Sequence[str], filters: Filters) -> Select[Any]:
    moment = table.c.hour if table is usage_hourly else table.c.day
    conditions = [moment >= span[0], moment < span[1], *filter_conditions(table, filters)]
    if table is usage_daily and filters.account_ids is None:
        whole = set(by).isdisjoint(("account", "account_id"))
        account = table.c.account_id
        conditions.append(account == ALL_ACCOUNTS if whole else account != ALL_ACCOUNTS)
    columns = _columns(by, table, moment)
    charged = table.c.outcome == "charged"
    return (
        select(
            *columns.values(),
            exact_sum(table.c.requests).label("requests"),
            exact_sum(case((charged, table.c.requests), else_=0)).label("charged"),
            exact_sum(table.c.charge_nanos).label("cost_nanos"),
            exact_sum(table.c.refund_nanos).label("refund_nanos"),
            exact_sum(table.c.expense_nanos).label("expense_nanos"),
            exact_sum(table.c.expensed).label("expensed"),
            *(
                exact_sum(case((charged, table.c[unit]), else_=0)).label(unit)
                for unit in QUANTITIES
            ),
        )
        .select_from(_joined(table, by))
        .where(*conditions)
        .group_by(*_places(columns))
    )


def _booked_rows(
    connection: Connection,
    table: Table,
    moment: ColumnElement[datetime],
    ranges: Sequence[Range],
    report: UsageSums,
) -> Iterator[tuple[datetime, Group]]:
    """Sum receipts, or refunds under the labels of their receipts."""
    by, filters, seconds = report.by, report.filters, report.bucket_s
    columns = _columns(by, receipts, time_bucket(moment, seconds))
    charged = receipts.c.outcome == "charged"
    if table is receipts:
        sums = [
            func.count().label("requests"),
            exact_sum(case((charged, 1), else_=0)).label("charged"),
            exact_sum(receipts.c.charge_nanos).label("cost_nanos"),
            exact_sum(func.coalesce(receipts.c.expense_nanos, 0)).label("expense_nanos"),
            func.count(receipts.c.expense_nanos).label("expensed"),
            *(
                exact_sum(case((charged, receipts.c[unit]), else_=0)).label(unit)
                for unit in QUANTITIES
            ),
        ]
        source = _joined(receipts, by)
    else:
        sums = [exact_sum(refunds.c.amount_nanos).label("refund_nanos")]
        source = _joined(receipts.join(refunds, refunds.c.request_id == receipts.c.request_id), by)
    starts_at, ends_at = min(start for start, _ in ranges), max(end for _, end in ranges)
    # The overall range as well, so that an index can be used.
    if table is receipts:
        conditions = filter_conditions(receipts, filters)
        conditions += settled_within(connection, starts_at, ends_at)
    else:
        conditions = filter_conditions(receipts, filters, indexed=False)
        booked = [moment >= starts_at, moment < ends_at]
        if filters.account_ids is not None:
            booked.append(refunds.c.account_id.in_(filters.account_ids))
        conditions += [*booked, *refunded_within(connection, *booked)]
    query = (
        select(*columns.values(), *sums)
        .select_from(source)
        .where(
            or_(*((moment >= start) & (moment < end) for start, end in ranges)),
            *conditions,
        )
        .group_by(*_places(columns))
    )
    for row in connection.execute(query).mappings():
        at = EPOCH + timedelta(seconds=row["at"] * seconds) if "at" in row else EPOCH
        yield at, group_of(row, by)


def _columns(
    by: Sequence[str], table: Table, moment: ColumnElement[Any]
) -> dict[str, ColumnElement[Any]]:
    columns: dict[str, ColumnElement[Any]] = {}
    for name in by:
        if name in TIMES:
            columns["at"] = moment.label("at")
        elif name == "account":
            columns[name] = accounts.c.name.label(name)
        elif name == "key":
            columns[name] = keys.c.prefix.label(name)
        elif name in RUN:
            unknown = receipts.c.model if name == "served_by" else ""
            columns[name] = func.coalesce(receipts.c.run[name].as_string(), unknown).label(name)
        elif name.startswith(TAG):
            tag = receipts.c["metadata"][name.removeprefix(TAG)].as_string()
            columns[name] = func.coalesce(tag, "").label(name)
        else:
            columns[name] = table.c[name].label(name)
    return columns


def _places(columns: Mapping[str, ColumnElement[Any]]) -> Iterator[ColumnElement[Any]]:
    """Yield column positions: PostgreSQL never takes expressions with parameters as equal."""
    for place in range(1, len(columns) + 1):
        yield literal_column(str(place))


def _joined(source: Any, by: Sequence[str]) -> Any:
    table = source if source in (usage_hourly, usage_daily) else receipts
    if "key" in by:
        source = source.join(keys, keys.c.id == table.c.key_id)
    if "account" in by:
        source = source.join(accounts, accounts.c.id == table.c.account_id)
    return source


def filter_conditions(
    table: Table, filters: Filters, *, indexed: bool = True
) -> list[ColumnElement[bool]]:
    """Return the conditions of filters; a tag that a request lacks is empty.

    Without ``indexed`` they match no index: few refunds are read by their time, where SQLite would
    read all receipts of an account or model.
    """
    conditions: list[ColumnElement[bool]] = []
    for name in ("account_id", "key_id", "model", "task"):
        values = getattr(filters, f"{name}s")
        if values is not None:
            column = table.c[name]
            nothing = "" if isinstance(column.type, String) else 0
            of = column if indexed else func.coalesce(column, nothing)
            conditions.append(of.in_(values))
    for tag, value in filters.tags.items():
        stored = receipts.c["metadata"][tag].as_string()
        conditions.append((stored if value else func.coalesce(stored, "")) == value)
    return conditions


def group_of(row: Any, by: Sequence[str]) -> Group:
    """Read a row of sums, which has the labels besides times by their names."""
    return Group(
        labels={name: str(row[name]) for name in by if name not in TIMES},
        requests=row.get("requests", 0),
        charged=row.get("charged", 0),
        cost_nanos=row.get("cost_nanos", 0),
        refund_nanos=row.get("refund_nanos", 0),
        units={unit: row[unit] for unit in QUANTITIES if row.get(unit)},
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

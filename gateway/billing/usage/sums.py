"""The statements that sum rollups and bookings of a report. Pure; knows neither spans nor zones.

Statements are kept, because building one takes longer than reading its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Select,
    String,
    Table,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    or_,
    select,
    union_all,
)

from gateway.billing.usage.coverage import Range
from gateway.billing.usage.days import ALL_ACCOUNTS
from gateway.sql.database import exact_sum, time_bucket
from gateway.tables.core import QUANTITIES, accounts, keys, receipts, refunds
from gateway.tables.settlement_time import IdRange
from gateway.tables.usage import usage_daily, usage_hourly, usage_minutely

TIMES: Final = ("minute", "hour", "day", "month")
RUN: Final = ("device", "dtype", "endpoint", "served_by")
"""Further dimensions for operators, which only receipts have."""
TAG: Final = "tag:"
STATEMENTS_MAX: Final = 64
"""Statements of each kind that are kept."""

_MOMENTS: Final[Mapping[Any, ColumnElement[datetime]]] = {
    usage_minutely: usage_minutely.c.minute,
    usage_hourly: usage_hourly.c.hour,
    usage_daily: usage_daily.c.day,
}
"""Times of the rollups' rows."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of a report; None selects everything."""

    account_ids: tuple[int, ...] | None = None
    key_ids: tuple[int, ...] | None = None
    models: tuple[str, ...] | None = None
    tasks: tuple[str, ...] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, tuple[int, ...] | tuple[str, ...]]:
        """The wanted values by their columns."""
        names = ("account_id", "key_id", "model", "task")
        found = {name: getattr(self, f"{name}s") for name in names}
        return {name: values for name, values in found.items() if values is not None}


class SumShape(NamedTuple):
    """What a statement of sums depends on besides its parameters."""

    by: tuple[str, ...]
    filters: tuple[str, ...]
    """Columns that have a filter."""
    tags: tuple[tuple[str, str], ...]
    units: bool

    def conditions(self, table: Table, *, indexed: bool = True) -> list[ColumnElement[bool]]:
        values: dict[str, Any] = {name: bindparam(name, expanding=True) for name in self.filters}
        return _conditions(table, values, self.tags, indexed=indexed)


def shape_of(by: Sequence[str], filters: Filters, *, units: bool) -> SumShape:
    """``units``: whether the sums of units are wanted, which are two thirds of all sums."""
    return SumShape(tuple(by), tuple(filters.values), tuple(filters.tags.items()), units)


def range_parameters(ranges: Iterable[Range], ids: Iterable[IdRange] = ()) -> dict[str, Any]:
    """Return the parameters of ranges of time and of ids."""
    found: dict[str, Any] = {}
    for of, each in (("", ranges), ("id_", ids)):
        for number, (start, end) in enumerate(each):
            found |= {f"{of}start_{number}": start, f"{of}end_{number}": end}
    return found


def _in_range(column: ColumnElement[Any], number: int, of: str = "") -> ColumnElement[bool]:
    return and_(column >= bindparam(f"{of}start_{number}"), column < bindparam(f"{of}end_{number}"))


class RollupPart(NamedTuple):
    """A range of a rollup. ``is_one``: the report has one label for all times in it."""

    table: Table
    is_one: bool


@functools.lru_cache(STATEMENTS_MAX)
def rolled_sums(parts: Sequence[RollupPart], shape: SumShape) -> Select[Any] | CompoundSelect[Any]:
    """Return the statement that sums a range of each of some rollups."""
    selected = []
    for number, (table, is_one) in enumerate(parts):
        moment: ColumnElement[Any] = _MOMENTS[table]
        conditions = [_in_range(moment, number), *shape.conditions(table)]
        if is_one:
            moment = bindparam(f"start_{number}", type_=moment.type)
        if table is usage_daily and "account_id" not in shape.filters:
            whole = set(shape.by).isdisjoint(("account", "account_id"))
            account = table.c.account_id
            conditions.append(account == ALL_ACCOUNTS if whole else account != ALL_ACCOUNTS)
        columns = _columns(shape.by, table, moment)
        sums = select(*columns.values(), *_sums(table, shape.units))
        query = sums.select_from(_joined(table, shape.by)).where(*conditions)
        selected.append(query.group_by(*_places(columns)))
    return selected[0] if len(selected) == 1 else union_all(*selected)


@functools.lru_cache(STATEMENTS_MAX)
def booked_sums(
    table: Table, shape: SumShape, seconds: int, parts: Sequence[tuple[int, int]]
) -> Select[Any] | CompoundSelect[Any]:
    """Return the statement that sums receipts, or refunds under the labels of their receipts, in
    parts: each a number of ranges of time, followed by the whole range, and a number of ranges of
    ids, if those are known."""
    moment = receipts.c.settled_at if table is receipts else refunds.c.booked_at
    columns = _columns(shape.by, receipts, time_bucket(moment, seconds))
    source: Any = receipts
    if table is refunds:
        source = receipts.join(refunds, refunds.c.request_id == receipts.c.request_id)
    sums = select(*columns.values(), *_sums(table, shape.units))
    sums = sums.select_from(_joined(source, shape.by)).where(
        *shape.conditions(receipts, indexed=table is receipts)
    )
    if table is refunds and "account_id" in shape.filters:
        sums = sums.where(refunds.c.account_id.in_(bindparam("account_id", expanding=True)))
    selected, number, id_number = [], 0, 0
    for ranges, ids in parts:
        # The whole range as well, so that an index can be used.
        query = sums.where(_in_range(moment, number + ranges))
        if ranges > 1:
            query = query.where(or_(*(_in_range(moment, number + each) for each in range(ranges))))
        if ids:
            known = (id_number + each for each in range(ids))
            query = query.where(or_(*(_in_range(receipts.c.request_id, n, "id_") for n in known)))
        selected.append(query.group_by(*_places(columns)))
        number, id_number = number + ranges + 1, id_number + ids
    return selected[0] if len(selected) == 1 else union_all(*selected)


@functools.cache
def _sums(table: Table, units: bool) -> Sequence[ColumnElement[int]]:
    """Return the sums of a table's rows."""
    if table is refunds:
        return (exact_sum(refunds.c.amount_nanos).label("refund_nanos"),)
    charged = table.c.outcome == "charged"
    of_units = [
        exact_sum(case((charged, table.c[unit]), else_=0)).label(unit)
        for unit in QUANTITIES
        if units
    ]
    if table is receipts:
        return (
            func.count().label("requests"),
            exact_sum(case((charged, 1), else_=0)).label("charged"),
            exact_sum(receipts.c.charge_nanos).label("cost_nanos"),
            exact_sum(func.coalesce(receipts.c.expense_nanos, 0)).label("expense_nanos"),
            func.count(receipts.c.expense_nanos).label("expensed"),
            *of_units,
        )
    return (
        exact_sum(table.c.requests).label("requests"),
        exact_sum(case((charged, table.c.requests), else_=0)).label("charged"),
        exact_sum(table.c.charge_nanos).label("cost_nanos"),
        exact_sum(table.c.refund_nanos).label("refund_nanos"),
        exact_sum(table.c.expense_nanos).label("expense_nanos"),
        exact_sum(table.c.expensed).label("expensed"),
        *of_units,
    )


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
    table = source if source in _MOMENTS else receipts
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
    return _conditions(table, filters.values, filters.tags.items(), indexed=indexed)


def _conditions(
    table: Table, values: Mapping[str, Any], tags: Iterable[tuple[str, str]], *, indexed: bool
) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    for name, wanted in values.items():
        column = table.c[name]
        nothing = "" if isinstance(column.type, String) else 0
        of = column if indexed else func.coalesce(column, nothing)
        conditions.append(of.in_(wanted))
    for tag, value in tags:
        stored = receipts.c["metadata"][tag].as_string()
        conditions.append((stored if value else func.coalesce(stored, "")) == value)
    return conditions

"""Usage as a table: rows with what is compared, the largest and the rest, exact sums. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Final

from gateway.billing.usage.report import TAG, TIMES, Group, total
from gateway.console.views.files import csv_lines
from gateway.console.views.money import SumRow, sum_total
from gateway.pricing import format_usd
from gateway.tables.core import QUANTITIES

TOP: Final = 10
"""Values of a dimension that are shown; the others are one row."""
MONEY: Final[Mapping[str, str]] = {"net": "net cost", "cost": "cost", "refunded": "refunded"}
METRICS: Final = (*MONEY, "requests", *QUANTITIES)

Url = Callable[..., str]


@dataclass(frozen=True, slots=True)
class LabelCell:
    """A label of a row, and the address that looks closer at it."""

    text: str
    url: str | None


@dataclass(frozen=True, slots=True)
class UsageRow:
    """A row of a report: its sums, the chosen figure, and the same of the earlier span."""

    labels: Mapping[str, str]
    sums: SumRow
    value: int
    before: int | None

    @property
    def difference(self) -> int | None:
        return None if self.before is None else self.value - self.before


@dataclass(frozen=True, slots=True)
class UsageTable:
    """``total`` is the sum of all rows; ``others`` are the values that one row sums up."""

    by: Sequence[str]
    metric: str
    rows: Sequence[UsageRow]
    total: UsageRow
    others: int

    @property
    def is_money(self) -> bool:
        return self.metric in MONEY


def metric_name(metric: str) -> str:
    return MONEY.get(metric, metric.replace("_", " "))


def usage_table(
    groups: Sequence[Group],
    before: Sequence[Group] | None,
    *,
    by: Sequence[str],
    metric: str,
    top: int | None = TOP,
) -> UsageTable:
    """Return a report as a table; ``before`` are the groups of the earlier span, aligned.

    Times are in order, other rows by the chosen figure. Of what is not a time, the ``top`` values
    are rows, and all others together are one, so the sum stays exact.
    """
    named = [name for name in by if name not in TIMES]
    kept = _largest([*groups, *(before or ())], named, metric, top)
    others = len({_place(group, named) for group in [*groups, *(before or ())]} - kept)
    now = _merged(groups, named, kept, others)
    then = _merged(before, named, kept, others) if before is not None else {}
    rows = [
        _row(
            by,
            now.get(place) or Group(dict(zip(by, place, strict=True))),
            None if before is None else then.get(place) or Group({}),
            metric,
        )
        for place in dict.fromkeys([*now, *then])
    ]
    timed = by[0] in TIMES
    rows.sort(
        key=lambda row: (
            [row.labels[by[0]]] if timed else [],
            _is_other(row, named, others),
            -row.value,
            list(row.labels.values()),
        )
    )
    whole = None if before is None else total(before)
    return UsageTable(by, metric, rows, _row((), total(groups), whole, metric), others)


def label_cells(row: UsageRow, by: Sequence[str], url: Url) -> list[LabelCell]:
    """Return the labels of a row with addresses that look closer: a filter more, and the days of
    a month, or the hours of a day."""
    cells = []
    for name in by:
        label = row.labels[name]
        rest = [other for other in by if other != name]
        changes: dict[str, str | None] = {"by": rest[0] if rest else "day", "by2": None}
        is_found = label or name.startswith(TAG)
        if label.startswith("other (") or not is_found:
            cells.append(LabelCell(label, None))
            continue
        if name in ("model", "task", "key", "account"):
            changes[name] = label
        elif name.startswith(TAG):
            changes["tag"] = f"{name.removeprefix(TAG)}={label}"
        elif name == "day":
            changes |= {"from": label, "to": label, "by": rest[0] if rest else "hour"}
        elif name == "month":
            changes |= {"from": f"{label}-01", "to": _last_day(label)}
        else:
            cells.append(LabelCell(label, None))
            continue
        cells.append(LabelCell(label or "without", url(**changes)))
    return cells


def usage_csv(table: UsageTable) -> bytes:
    """Return the rows of a table as a file."""
    units = sorted({unit for row in table.rows for unit in row.sums.units})
    compared = table.total.before is not None
    name = {"net": "net_cost"}.get(table.metric, table.metric)
    more = (f"{name}_before", f"{name}_difference") if compared else ()
    lines: list[list[object]] = [
        [*table.by, "requests", "cost", "refunded", "net_cost", *units, *more]
    ]
    for row in table.rows:
        sums = row.sums
        amounts = (sums.cost_nanos, sums.refund_nanos, sums.net_nanos)
        lines.append(
            [
                *row.labels.values(),
                sums.requests,
                *(format_usd(nanos) for nanos in amounts),
                *(sums.units.get(unit, 0) for unit in units),
                *(_plain(each, table) for each in (row.before, row.difference) if compared),
            ]
        )
    return csv_lines(lines)


def _plain(value: int | None, table: UsageTable) -> str:
    return format_usd(value or 0) if table.is_money else str(value or 0)


def _row(by: Sequence[str], group: Group, before: Group | None, metric: str) -> UsageRow:
    return UsageRow(
        labels={name: group.labels[name] for name in by},
        sums=sum_total([group]),
        value=_figure(group, metric),
        before=None if before is None else _figure(before, metric),
    )


def _figure(group: Group, metric: str) -> int:
    if metric == "net":
        return group.cost_nanos - group.refund_nanos
    if metric == "cost":
        return group.cost_nanos
    if metric == "refunded":
        return group.refund_nanos
    return group.requests if metric == "requests" else group.units.get(metric, 0)


def _place(group: Group, named: Sequence[str]) -> tuple[str, ...]:
    return tuple(group.labels[name] for name in named)


def _largest(
    groups: Sequence[Group], named: Sequence[str], metric: str, top: int | None
) -> set[tuple[str, ...]]:
    sums: dict[tuple[str, ...], int] = {}
    for group in groups:
        place = _place(group, named)
        sums[place] = sums.get(place, 0) + _figure(group, metric)
    # One more is shown by itself: in place of it would be a row of one other.
    if top is None or len(sums) <= top + 1:
        return set(sums)
    return set(sorted(sums, key=lambda place: (-sums[place], place))[:top])


def _merged(
    groups: Sequence[Group], named: Sequence[str], kept: set[tuple[str, ...]], others: int
) -> dict[tuple[str, ...], Group]:
    """Return groups by their labels; those that are not kept under one label."""
    found: dict[tuple[str, ...], Group] = {}
    for group in groups:
        labels = dict(group.labels)
        if _place(group, named) not in kept:
            labels |= dict.fromkeys(named, "") | {named[0]: f"other ({others})"}
        place = tuple(labels.values())
        if place in found:
            found[place].add(group)
        else:
            found[place] = replace(group, labels=labels, units=dict(group.units))
    return found


def _is_other(row: UsageRow, named: Sequence[str], others: int) -> bool:
    return bool(others and named and row.labels[named[0]] == f"other ({others})")


def _last_day(month: str) -> str:
    first = date.fromisoformat(f"{month}-01")
    return ((first + timedelta(days=31)).replace(day=1) - timedelta(days=1)).isoformat()

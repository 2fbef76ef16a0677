"""Budgets as lists show them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from gateway.checks.moments import read_moment
from gateway.operations.budgets import BudgetView
from gateway.pricing import parse_usd


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A budget in force and the usage of its current window."""

    id: int
    name: str
    window: str
    zone: str
    hard: bool
    organisation: str | None
    key: int | None
    model: str | None
    limit_nanos: int
    spent_nanos: int
    held_nanos: int
    remaining_nanos: int
    ends_at: datetime | None

    @property
    def is_used_up(self) -> bool:
        return self.remaining_nanos <= 0


def budget_row(view: BudgetView) -> BudgetRow:
    return BudgetRow(
        id=view["id"],
        name=view["name"] or f"per {view['window']}",
        window=view["window"],
        zone=view["tz"],
        hard=view["hard"],
        organisation=view["organisation"],
        key=view["key"],
        model=view["model"],
        limit_nanos=parse_usd(view["limit"]),
        spent_nanos=parse_usd(view["spent"]),
        held_nanos=parse_usd(view["held"]),
        remaining_nanos=parse_usd(view["remaining"]),
        ends_at=None if view["ends_at"] is None else read_moment(view["ends_at"]),
    )

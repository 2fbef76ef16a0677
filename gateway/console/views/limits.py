"""Budgets and rate limits with what is used of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import urlencode

from gateway.accounts.budgets import BudgetState
from gateway.accounts.limits import Limit, Unit
from gateway.accounts.rates import LimitUsage
from gateway.checks.moments import read_moment
from gateway.console.views.evidence import accepted_url, open_requests_url
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
    spent_url: str | None
    """Address of the requests that it counts; None for a budget of an organisation."""
    held_url: str | None

    @property
    def is_used_up(self) -> bool:
        return self.remaining_nanos <= 0


def budget_urls(states: Sequence[BudgetState], account: str) -> dict[int, str]:
    """Return the addresses of the requests that budgets of an account count, by budget."""
    return {
        state.budget.id: accepted_url(
            account,
            max(state.starts_at, state.budget.created_at),
            model=state.budget.model,
            key=None if state.budget.key_id is None else str(state.budget.key_id),
        )
        for state in states
    }


def budget_row(view: BudgetView, account: str) -> BudgetRow:
    """Return a budget that bounds an account."""
    starts_at = max(
        read_moment(moment) for moment in (view["starts_at"], view["created_at"]) if moment
    )
    key = view["key"]
    bounds = {"model": view["model"], "key": None if key is None else str(key)}
    is_own = view["organisation"] is None
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
        spent_url=accepted_url(account, starts_at, **bounds) if is_own else None,
        held_url=open_requests_url(account, starts_at, **bounds) if is_own else None,
    )


UNITS: Final[tuple[Unit, ...]] = ("requests", "tokens")


@dataclass(frozen=True, slots=True)
class Use:
    """A number of a limit; ``used`` is None if it is not known."""

    used: int | None
    limit: int

    @property
    def is_full(self) -> bool:
        return self.used is not None and self.used >= self.limit


@dataclass(frozen=True, slots=True)
class LimitRow:
    """A limit of an account, of a key or of a model, with the use of each of its numbers."""

    key: int | None
    model: str | None
    requests: Use | None
    tokens: Use | None
    concurrent: Use | None
    cancelled: Use | None
    values: Mapping[str, str]
    """What the form has to enter to set the same limit again."""

    @property
    def query(self) -> str:
        """Key and model, as the address of its removal has them."""
        chosen = {"key": self.key, "model": self.model}
        return urlencode({name: value for name, value in chosen.items() if value is not None})

    @property
    def is_full(self) -> bool:
        numbers = (self.requests, self.tokens, self.concurrent, self.cancelled)
        return any(each is not None and each.is_full for each in numbers)


def limit_rows(
    limits: Sequence[Limit],
    *,
    used: Sequence[LimitUsage] | None,
    opened: Mapping[tuple[int, str], int],
    cancelled_s: int | None,
) -> list[LimitRow]:
    """Join limits with their use within the last minute (None: not known), with the open requests
    by key and model, and with the cancelled device time of the last hour."""
    rates = {(each.rate.limit, each.rate.unit): each.used for each in used or ()}
    rows = []
    for limit in limits:
        requests, tokens = (
            _use(limit.per_minute(unit), rates.get((limit, unit))) for unit in UNITS
        )
        rows.append(
            LimitRow(
                key=limit.key_id,
                model=limit.model,
                requests=requests,
                tokens=tokens,
                concurrent=_use(limit.concurrent_max, _open(limit, opened)),
                cancelled=_use(limit.cancelled_seconds_per_hour, cancelled_s),
                values=entered_values(limit),
            )
        )
    return rows


def _use(limit: int | None, used: int | None) -> Use | None:
    return None if limit is None else Use(used, limit)


def _open(limit: Limit, opened: Mapping[tuple[int, str], int]) -> int:
    return sum(count for (key, model), count in opened.items() if limit.covers(key, model))


def entered_values(limit: Limit) -> Mapping[str, str]:
    """Return what the form of a limit has to enter to set the same again."""
    numbers = {
        "key": limit.key_id,
        "model": limit.model,
        "requests_per_minute": limit.requests_per_minute,
        "tokens_per_minute": limit.tokens_per_minute,
        "concurrent": limit.concurrent_max,
        "cancelled_seconds_per_hour": limit.cancelled_seconds_per_hour,
    }
    return {name: "" if value is None else str(value) for name, value in numbers.items()}

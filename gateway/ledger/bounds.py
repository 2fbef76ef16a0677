"""Budgets as they limit holds.

Loaded for a batch under the locks of its accounts and their organisations, updated while the batch
is decided, and written with it. Accounts without budgets cost no query. Held amounts count as
spent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from sqlalchemy import Connection, bindparam, update

from gateway.accounts.budgets import (
    Budget,
    budgets_in_force,
    read_windows,
    window_end,
    window_start,
)
from gateway.checks.moments import microseconds_of
from gateway.sql.database import upsert
from gateway.sql.statements import CompiledStatement, Row
from gateway.tables.core import budget_windows

WindowKey = tuple[int, int]
"""A window of a budget: (budget id, start in µs since 1970)."""


class BudgetedRequest(Protocol):
    """A request to be accepted: the fields that budgets depend on."""

    @property
    def account_id(self) -> int: ...
    @property
    def key_id(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def hold_nanos(self) -> int: ...
    @property
    def accepted_at(self) -> datetime: ...
    @property
    def windows(self) -> Sequence[Sequence[int]] | None:
        """Budget windows in which an accepted request counts already; None for a new one."""


@dataclass(frozen=True, slots=True)
class BudgetExceeded:
    """A hard budget does not cover the request. ``in_use``: it would without the other holds."""

    budget: Budget
    remaining_nanos: int
    resets_at: datetime | None
    in_use: bool


_HOLD_MORE: Final = CompiledStatement(
    update(budget_windows)
    .where(
        budget_windows.c.budget_id == bindparam("budget"),
        budget_windows.c.starts_us == bindparam("starts"),
    )
    .values(held_nanos=budget_windows.c.held_nanos + bindparam("more"))
)
_CLOSE: Final = CompiledStatement(
    update(budget_windows)
    .where(
        budget_windows.c.budget_id == bindparam("budget"),
        budget_windows.c.starts_us == bindparam("starts"),
    )
    .values(
        spent_nanos=budget_windows.c.spent_nanos + bindparam("charged"),
        held_nanos=budget_windows.c.held_nanos - bindparam("held"),
    )
)


class Bounds:
    """Budgets of the accounts of one batch, with what the batch has held so far."""

    def __init__(
        self,
        connection: Connection,
        requests: Sequence[BudgetedRequest],
        accounts: Collection[int],
        organisations: Mapping[int, Collection[int]],
    ) -> None:
        """Read budgets and windows of these locked accounts, and of organisations by account;
        without any, no query."""
        self._budgets: Mapping[int, list[Budget]] = {}
        self._held: defaultdict[WindowKey, int] = defaultdict(int)
        self._used: dict[WindowKey, Row] = {}
        if not accounts and not organisations:
            return
        self._budgets = budgets_in_force(connection, accounts, organisations)
        self._used = read_windows(
            connection, {key for request in requests for _, key in self._windows(request)}
        )

    def exceeded(self, request: BudgetedRequest) -> BudgetExceeded | None:
        """Return the hard budget that accepting this request would exceed, if any."""
        for budget, key in self._windows(request):
            remaining = self._remaining(budget, key)
            if budget.hard and request.hold_nanos > remaining:
                row = self._used.get(key)
                spent = row["spent_nanos"] if row else 0
                return BudgetExceeded(
                    budget,
                    remaining,
                    window_end(budget.window, budget.tz, request.accepted_at),
                    in_use=spent + request.hold_nanos <= budget.limit_nanos,
                )
        return None

    def add(self, request: BudgetedRequest) -> tuple[list[WindowKey], tuple[Budget, ...]]:
        """Count an accepted request; return its windows, and the soft budgets that it exceeds."""
        windows, exceeded = [], []
        for budget, key in self._windows(request):
            self._held[key] += request.hold_nanos
            windows.append(key)
            if not budget.hard and self._remaining(budget, key) < 0:
                exceeded.append(budget)
        return windows, tuple(exceeded)

    def write(self, connection: Connection) -> None:
        """Add the amounts that were counted to the budget windows."""
        if not self._held:
            return
        found = {budget.id: budget for each in self._budgets.values() for budget in each}
        statement = upsert(connection, budget_windows)
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["budget_id", "starts_us"],
                set_={"held_nanos": budget_windows.c.held_nanos + statement.excluded.held_nanos},
            ),
            [
                {
                    "budget_id": budget_id,
                    "starts_us": starts_us,
                    "limit_nanos": found[budget_id].limit_nanos,
                    "hard": found[budget_id].hard,
                    "held_nanos": amount,
                }
                for (budget_id, starts_us), amount in sorted(self._held.items())
            ],
        )

    def _windows(self, request: BudgetedRequest) -> list[tuple[Budget, WindowKey]]:
        found = []
        for budget in self._budgets.get(request.account_id, ()):
            if budget.covers(request.key_id, request.model):
                start = window_start(budget.window, budget.tz, request.accepted_at)
                key = (budget.id, microseconds_of(start))
                if request.windows is None or list(key) in request.windows:
                    found.append((budget, key))
        return found

    def _remaining(self, budget: Budget, key: WindowKey) -> int:
        row = self._used.get(key)
        used = row["spent_nanos"] + row["held_nanos"] if row else 0
        return budget.limit_nanos - used - self._held.get(key, 0)


def increase_holds(
    connection: Connection, grown: Sequence[tuple[Sequence[Sequence[int]], int]]
) -> None:
    """Increase held amounts of budget windows, including those of ended budgets."""
    sums: defaultdict[WindowKey, int] = defaultdict(int)
    for windows, amount in grown:
        for budget_id, starts_us in windows:
            sums[budget_id, starts_us] += amount
    _HOLD_MORE.run(
        connection,
        [
            {"budget": budget, "starts": starts, "more": more}
            for (budget, starts), more in sorted(sums.items())
        ],
    )


def settle_windows(
    connection: Connection, ended: Sequence[tuple[Sequence[Sequence[int]] | None, int, int]]
) -> None:
    """Replace holds by spending; ``ended`` has the windows, hold and charge of each request."""
    sums: defaultdict[WindowKey, list[int]] = defaultdict(lambda: [0, 0])
    for windows, held, charged in ended:
        for budget_id, starts_us in windows or ():
            both = sums[budget_id, starts_us]
            both[0] += held
            both[1] += charged
    _CLOSE.run(
        connection,
        [
            {"budget": budget, "starts": starts, "held": held, "charged": charged}
            for (budget, starts), (held, charged) in sorted(sums.items())
        ],
    )

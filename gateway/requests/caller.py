"""The caller of one HTTP request: its key, and the limits that its answer will report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.accounts.budgets import Budget
from gateway.accounts.keys import KeyInfo
from gateway.accounts.rates import LimitUsage, RateReservation


@dataclass(slots=True)
class Caller:
    """Records what was taken of the limits, whether the submission is accepted or not."""

    key: KeyInfo
    taken: RateReservation | None = None
    """None until limits are taken; empty if nothing is limited."""
    given_back: bool = False
    alias: tuple[str, str] | None = None
    """The alias that was requested, and its model."""
    soft_budgets_exceeded: tuple[Budget, ...] = ()

    @property
    def usages(self) -> Sequence[LimitUsage] | None:
        """Usage of the limits after this request; None if nothing was taken."""
        if self.taken is None:
            return None
        return self.taken.usages_undone() if self.given_back else self.taken.usages

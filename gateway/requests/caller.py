"""One HTTP call that may order something: whose it is, and what its answer will say of limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.accounts.budgets import Budget
from gateway.accounts.keys import KeyInfo
from gateway.accounts.rates import LimitUsage, RateReservation


@dataclass(slots=True)
class Caller:
    """What was taken of its limits is noted here, whether its order is accepted or not."""

    key: KeyInfo
    taken: RateReservation | None = None
    """None until something is taken; empty where nothing is limited."""
    given_back: bool = False
    alias: tuple[str, str] | None = None
    """The name that was ordered by and the model that it stands for, where they differ."""
    soft_budgets_exceeded: tuple[Budget, ...] = ()
    """Soft budgets that its order went beyond."""

    @property
    def usages(self) -> Sequence[LimitUsage] | None:
        """Its limits as they are once it has been answered; None if nothing was taken."""
        if self.taken is None:
            return None
        return self.taken.usages_undone() if self.given_back else self.taken.usages

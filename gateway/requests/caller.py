"""The caller of one HTTP request: its key, and the limits that its answer will report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gateway.accounts.budgets import Budget
from gateway.accounts.keys import KeyInfo
from gateway.accounts.rates import LimitUsage, RateReservation
from workers.contract.jobs import PromptWarning


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
    warnings: tuple[PromptWarning, ...] = ()

    def rename_warnings(self, names: Mapping[str, str]) -> None:
        """Replace names of fields by those of the dialect that was called."""
        self.warnings = tuple(
            replace(one, field=names.get(one.field, one.field)) for one in self.warnings
        )

    @property
    def usages(self) -> Sequence[LimitUsage] | None:
        """Usage of the limits after this request; None if nothing was taken."""
        if self.taken is None:
            return None
        return self.taken.usages_undone() if self.given_back else self.taken.usages

"""What the proof of the books checks, in words, and sums of reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.billing.usage.report import Group, total

RULES: Final[Mapping[str, str]] = {
    "R1": "All balances sum to zero.",
    "R2": "Each balance is the sum of its transfers.",
    "R3": "What is held, and the count of open requests, are those of the open holds.",
    "R4": "Each charge is the sum of its receipts, and nothing more is given back.",
    "R5": "No request has both a hold and a receipt.",
    "R6": "No hold is left long after its deadline.",
    "R7": "Each receipt, priced again at the price in force, has the same charge.",
    "R8": "What is left of the lots sums to the balance.",
    "R9": "Each budget's window is the sum of its requests.",
    "R10": "The hours of reports are the sums of their receipts.",
    "R11": "Each balance follows from the one before it.",
    "R12": "Every payment of the provider is booked, and nothing else.",
    "R13": "No closed month has changed.",
    "R14": "No row refers to one that does not exist.",
}


ALL_RULES: Final = f"{next(iter(RULES))}\N{EN DASH}{[*RULES][-1]}"
"""The first and the last rule, as one text."""


@dataclass(frozen=True, slots=True)
class SumRow:
    """One row of a report of usage."""

    labels: Mapping[str, str]
    requests: int
    cost_nanos: int
    refund_nanos: int
    units: Mapping[str, int]
    expense_nanos: int
    expensed: int

    @property
    def net_nanos(self) -> int:
        return self.cost_nanos - self.refund_nanos

    @property
    def margin_nanos(self) -> int:
        """Net cost less what is known of the operator's cost."""
        return self.net_nanos - self.expense_nanos


def sum_rows(groups: Iterable[Group]) -> list[SumRow]:
    """Return the rows of a report; the dearest first, unless they are of times."""
    rows = [_row(group) for group in groups]
    timed = any(name in ("hour", "day", "month") for row in rows for name in row.labels)
    return rows if timed else sorted(rows, key=lambda row: -row.net_nanos)


def sum_total(groups: Iterable[Group]) -> SumRow:
    return _row(total(groups))


def _row(group: Group) -> SumRow:
    return SumRow(
        labels=group.labels,
        requests=group.requests,
        cost_nanos=group.cost_nanos,
        refund_nanos=group.refund_nanos,
        units=group.units,
        expense_nanos=group.expense_nanos,
        expensed=group.expensed,
    )

"""What a proof finds."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.pricing import format_usd


@dataclass(frozen=True, slots=True)
class Finding:
    """One discrepancy: the rule, its subject, and a message with both numbers."""

    rule: str
    subject: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule} {self.subject}: {self.message}"


def differ(rule: str, subject: str, what: str, stored: int, due: int) -> Finding:
    """Return the finding that a stored amount is not the one that the rows add up to."""
    return Finding(
        rule, subject, f"{what} {format_usd(stored)}, but it should be {format_usd(due)}"
    )

"""Margins: what requests earned and what they cost the operator."""

from __future__ import annotations

from typing import TypedDict

from gateway.billing.usage.report import Group
from gateway.pricing import format_usd


class MarginSumsView(TypedDict):
    """Sums of a group. ``cost`` is that of ``costed_requests``; of the others it is not known."""

    requests: int
    costed_requests: int
    revenue: str
    cost: str
    margin: str
    margin_percent: str | None


def margin_sums(group: Group) -> MarginSumsView:
    """Return the margin of a group: charges less refunds and known costs."""
    revenue = group.cost_nanos - group.refund_nanos
    margin = revenue - group.expense_nanos
    return {
        "requests": group.requests,
        "costed_requests": group.expensed,
        "revenue": format_usd(revenue),
        "cost": format_usd(group.expense_nanos),
        "margin": format_usd(margin),
        "margin_percent": f"{100 * margin / revenue:.1f}" if revenue > 0 else None,
    }

"""Margins: what requests earned, what they cost the operator, and how they were rated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypeAlias, TypedDict

from sqlalchemy import Connection

from gateway.billing.usage.report import Group, UsageSums, total
from gateway.feedback.store import DIMENSIONS, FeedbackFilter, FeedbackSums, sums
from gateway.pricing import format_usd

Ratings: TypeAlias = Mapping[tuple[str, ...], FeedbackSums]
"""Feedback by the labels of groups."""


class MarginSumsView(TypedDict):
    """Sums of a group. ``cost`` is that of ``costed_requests``; of the others it is not known.

    Ratings are present if all dimensions are those of feedback.
    """

    requests: int
    costed_requests: int
    revenue: str
    cost: str
    margin: str
    margin_percent: str | None
    ratings: NotRequired[int]
    mean_rating: NotRequired[float | None]


class MarginGroupView(MarginSumsView, total=False):
    """A group with its labels."""

    hour: str
    day: str
    month: str
    account: str
    key: str
    model: str
    task: str
    device: str
    dtype: str
    endpoint: str
    served_by: str


def ratings_of(connection: Connection, report: UsageSums) -> Ratings | None:
    """Read the ratings of a report's groups; None if its dimensions are not those of feedback."""
    filters, span = report.filters, report.span
    if not set(report.by) <= set(DIMENSIONS) or filters.tags or filters.key_ids is not None:
        return None
    choice = FeedbackFilter(
        filters.account_ids, filters.models, starts_at=span.starts_at, ends_at=span.ends_at
    )
    return sums(connection, choice, report.by)


def margin_views(
    report: UsageSums, ratings: Ratings | None
) -> tuple[list[MarginGroupView], MarginGroupView]:
    """Return the margins of a complete report's groups, and those of the whole."""
    groups, whole = report.groups, None
    if ratings is None:
        return [_view(group.labels, group, None) for group in groups], _view(
            {}, total(groups), None
        )
    whole = FeedbackSums()
    for rated in ratings.values():
        whole.add(rated)
    views = []
    for group in groups:
        place = tuple(group.labels[name] for name in report.by)
        views.append(_view(group.labels, group, ratings.get(place, FeedbackSums())))
    return views, _view({}, total(groups), whole)


def _view(labels: Mapping[str, str], group: Group, rated: FeedbackSums | None) -> MarginGroupView:
    """Return the margin of a group: charges less refunds and known costs."""
    revenue = group.cost_nanos - group.refund_nanos
    margin = revenue - group.expense_nanos
    view: dict[str, Any] = {
        **labels,
        "requests": group.requests,
        "costed_requests": group.expensed,
        "revenue": format_usd(revenue),
        "cost": format_usd(group.expense_nanos),
        "margin": format_usd(margin),
        "margin_percent": f"{100 * margin / revenue:.1f}" if revenue > 0 else None,
    }
    if rated is not None:
        view |= {"ratings": rated.rated, "mean_rating": rated.mean_rating}
    return view  # type: ignore[return-value]  # its labels are those of the type

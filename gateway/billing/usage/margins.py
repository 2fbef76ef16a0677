"""Margins: what requests earned, what they cost the operator, and how they were rated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NotRequired, TypeAlias, TypedDict

from sqlalchemy import Connection, case, func, select

from gateway.billing.usage.report import Group, UsageSums, total
from gateway.feedback.store import DIMENSIONS, FeedbackFilter, FeedbackSums, sums
from gateway.ids import first_request_id, time_of
from gateway.pricing import format_usd
from gateway.tables.core import receipts

SEARCHED: Final = 50_000
"""Newest requests among which those sold below cost are counted."""

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


@dataclass(frozen=True, slots=True)
class BelowCost:
    """Newest requests that earned less than they cost, by model.

    ``searched_to``: the oldest request that was looked at, unless these are all of the span.
    """

    requests: Mapping[str, int]
    searched_to: datetime | None


def count_below_cost(connection: Connection, since: datetime) -> BelowCost:
    """Count the requests accepted since a moment whose charge was less than what they are known to
    cost, among the ``SEARCHED`` newest. Refunds are ignored."""
    id = receipts.c.request_id
    newest = (
        select(id, receipts.c.model, receipts.c.charge_nanos, receipts.c.expense_nanos)
        .where(id >= first_request_id(since), receipts.c.outcome == "charged")
        .order_by(id.desc())
        .limit(SEARCHED)
        .subquery()
    )
    below = case((newest.c.charge_nanos < newest.c.expense_nanos, 1), else_=0)
    rows = connection.execute(
        select(
            newest.c.model,
            func.count().label("read"),
            func.sum(below).label("below"),
            func.min(newest.c.request_id).label("first"),
        ).group_by(newest.c.model)
    ).all()
    is_whole = sum(row.read for row in rows) < SEARCHED
    return BelowCost(
        {row.model: int(row.below) for row in rows if row.below},
        None if is_whole else time_of("req_", min(row.first for row in rows)),
    )


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

"""Feedback of accounts on their requests in SQL: written, listed, summed, deleted.

A request has one feedback at most, and writing it again replaces it. Model and version are copied
from the receipt, so that sums need neither receipts nor archives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Connection, RowMapping, delete, func, select

from gateway.ids import first_id
from gateway.sql.database import upsert
from gateway.tables.core import accounts
from gateway.tables.feedback import feedback

RATINGS: Final = range(1, 6)
DIMENSIONS: Final = ("account", "model", "served_by", "task")
_ID_PREFIX: Final = "req_"
_OF_REQUEST: Final = ("request_id", "account_id", "model", "task", "served_by", "settled_at")


@dataclass(frozen=True, slots=True)
class RatedRequest:
    """What feedback repeats of the request that it is about."""

    request_id: str
    account_id: int
    model: str
    task: str
    served_by: str
    settled_at: datetime


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback on one request. ``rating`` is 1 to 5, of which 5 is best."""

    request: RatedRequest
    rating: int | None
    labels: tuple[str, ...]
    comment: str
    created_at: datetime
    changed_at: datetime


@dataclass(frozen=True, slots=True)
class FeedbackFilter:
    """Filter of feedback; None matches all. Times are those at which requests were settled."""

    account_ids: tuple[int, ...] | None = None
    models: tuple[str, ...] | None = None
    rating: int | None = None
    label: str | None = None
    starts_at: datetime | None = None
    ends_at: datetime | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        found: list[ColumnElement[bool]] = []
        if self.account_ids is not None:
            found.append(feedback.c.account_id.in_(self.account_ids))
        if self.models is not None:
            found.append(feedback.c.model.in_(self.models))
        if self.rating is not None:
            found.append(feedback.c.rating == self.rating)
        if self.label is not None:
            quoted = msgspec.json.encode(self.label).decode()
            found.append(feedback.c.labels.contains(quoted, autoescape=True))
        if self.starts_at is not None:
            found.append(feedback.c.settled_at >= self.starts_at)
        if self.ends_at is not None:
            found.append(feedback.c.settled_at < self.ends_at)
        return found


@dataclass(slots=True)
class FeedbackSums:
    """Feedback of a group: its number, ratings and labels."""

    count: int = 0
    ratings: Counter[int] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)

    @property
    def rated(self) -> int:
        return self.ratings.total()

    @property
    def mean_rating(self) -> float | None:
        """Mean of the ratings, to the hundredth; None without any."""
        whole = sum(rating * count for rating, count in self.ratings.items())
        return round(whole / self.rated, 2) if self.rated else None

    def add(self, other: FeedbackSums) -> None:
        self.count += other.count
        self.ratings += other.ratings
        self.labels += other.labels


def put(
    connection: Connection,
    request: RatedRequest,
    *,
    rating: int | None,
    labels: Iterable[str],
    comment: str,
    now: datetime,
) -> Feedback:
    """Write the feedback on a request, instead of what it had."""
    given = {
        "rating": rating,
        "labels": msgspec.json.encode(sorted(set(labels))).decode(),
        "comment": comment,
        "changed_at": now,
    }
    row = {name: getattr(request, name) for name in _OF_REQUEST}
    made = upsert(connection, feedback).values(**row, **given, created_at=now)
    connection.execute(made.on_conflict_do_update(index_elements=["request_id"], set_=given))
    found = find(connection, request.account_id, request.request_id)
    assert found is not None
    return found


def find(connection: Connection, account_id: int, request_id: str) -> Feedback | None:
    """Return the feedback on a request of an account, if there is any."""
    query = select(feedback).where(
        feedback.c.request_id == request_id, feedback.c.account_id == account_id
    )
    row = connection.execute(query).mappings().first()
    return None if row is None else _read(row)


def remove(connection: Connection, account_id: int, request_id: str) -> bool:
    """Delete the feedback on a request of an account; return whether there was any."""
    mine = delete(feedback).where(
        feedback.c.request_id == request_id, feedback.c.account_id == account_id
    )
    return connection.execute(mine).rowcount > 0


def read_page(
    connection: Connection,
    choice: FeedbackFilter,
    *,
    limit: int,
    cursor: str | None,
    oldest_first: bool = False,
) -> list[Feedback]:
    """Read feedback by the ids of its requests, after that of ``cursor``."""
    id = feedback.c.request_id
    query = select(feedback).where(*choice.conditions())
    if cursor is not None:
        query = query.where(id > cursor if oldest_first else id < cursor)
    query = query.order_by(id if oldest_first else id.desc()).limit(limit)
    return [_read(row) for row in connection.execute(query).mappings()]


def sums(
    connection: Connection, choice: FeedbackFilter, by: Sequence[str]
) -> dict[tuple[str, ...], FeedbackSums]:
    """Sum feedback by some of ``DIMENSIONS``; groups are ordered by their labels."""
    columns = [accounts.c.name if name == "account" else feedback.c[name] for name in by]
    keys = (*columns, feedback.c.rating, feedback.c.labels)
    source = feedback.join(accounts, accounts.c.id == feedback.c.account_id)
    query = select(*keys, func.count()).select_from(source).where(*choice.conditions())
    groups: dict[tuple[str, ...], FeedbackSums] = {}
    for *place, rating, labels, count in connection.execute(query.group_by(*keys)).all():
        group = groups.setdefault(tuple(place), FeedbackSums())
        group.count += count
        if rating is not None:
            group.ratings[rating] += count
        for label in _labels(labels):
            group.labels[label] += count
    return dict(sorted(groups.items()))


def delete_older(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete some of the feedback on requests accepted before a moment; return their number."""
    id = feedback.c.request_id
    first = first_id(_ID_PREFIX, before)
    old = select(id).where(id < first).order_by(id).limit(limit)
    return connection.execute(delete(feedback).where(id.in_(old))).rowcount


def _read(row: RowMapping) -> Feedback:
    values: Mapping[Any, Any] = row
    return Feedback(
        RatedRequest(**{name: values[name] for name in _OF_REQUEST}),
        rating=values["rating"],
        labels=_labels(values["labels"]),
        comment=values["comment"],
        created_at=values["created_at"],
        changed_at=values["changed_at"],
    )


def _labels(text: str) -> tuple[str, ...]:
    return msgspec.json.decode(text, type=tuple[str, ...])

"""What is sent and shown of feedback: its body, its views, sums by version, and its export."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Self, TypedDict, cast

import msgspec
from pydantic import ConfigDict, Field, StrictInt, StringConstraints, model_validator
from sqlalchemy import Connection

from gateway.checks.moments import timestamp
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest, NotFound
from gateway.feedback.store import (
    DIMENSIONS,
    RATINGS,
    Feedback,
    FeedbackFilter,
    FeedbackSums,
    RatedRequest,
    find,
    put,
    read_page,
    remove,
    sums,
)
from gateway.ids import is_request_id
from gateway.ledger.closed import ClosedRequest

LABELS_MAX: Final = 8
COMMENT_MAX: Final = 2000
PAGE: Final = 1000
"""Number of rows that an export reads at a time."""


class FeedbackBody(StrictModel):
    """Feedback on a request: a rating, labels, a comment, or several of these."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"rating": 2, "labels": ["too long"], "comment": ""}]}
    )

    rating: Annotated[StrictInt, Field(ge=RATINGS[0], le=RATINGS[-1])] | None = None
    """1 (worst) to 5 (best); thumbs are 1 and 5."""
    labels: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/-]{0,39}$")]],
        Field(max_length=LABELS_MAX),
    ] = []
    comment: Annotated[str, Field(max_length=COMMENT_MAX)] = ""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.rating is None and not self.labels and not self.comment:
            raise ValueError("give a rating, labels or a comment")
        return self


class FeedbackView(TypedDict):
    """Feedback on a request."""

    object: str
    request_id: str
    model: str
    task: str
    rating: int | None
    labels: Sequence[str]
    comment: str
    created_at: str
    changed_at: str


class FeedbackOfAllView(FeedbackView):
    """Feedback with its account, and the version of the model that ran the request."""

    account_id: int
    served_by: str
    settled_at: str


class FeedbackSumsView(TypedDict):
    """Feedback of a group."""

    feedback: int
    ratings: int
    mean_rating: float | None
    by_rating: dict[str, int]
    labels: dict[str, int]


class FeedbackGroupView(FeedbackSumsView, total=False):
    """A group with its labels."""

    account: str
    model: str
    served_by: str
    task: str


def write(connection: Connection, closed: ClosedRequest, body: FeedbackBody) -> FeedbackView:
    """Write the feedback on a request, instead of what it had."""
    request = RatedRequest(
        closed.request_id,
        closed.account_id,
        closed.model,
        closed.task,
        closed.run.served_by or closed.model,
        closed.settled_at,
    )
    now = datetime.now(UTC)
    found = put(
        connection,
        request,
        rating=body.rating,
        labels=body.labels,
        comment=body.comment,
        now=now,
    )
    return feedback_view(found)


def show(connection: Connection, account_id: int, request_id: str) -> FeedbackView:
    """Return the feedback on a request. Raise ``NotFound``."""
    found = find(connection, account_id, request_id)
    if found is None:
        raise _not_found(request_id)
    return feedback_view(found)


def delete(connection: Connection, account_id: int, request_id: str) -> None:
    """Delete the feedback on a request. Raise ``NotFound``."""
    if not remove(connection, account_id, request_id):
        raise _not_found(request_id)


def list_page(
    connection: Connection, choice: FeedbackFilter, *, limit: int, cursor: str | None
) -> tuple[list[FeedbackView], str | None]:
    """List feedback by its requests, newest first, and return the cursor of the next page."""
    if cursor is not None and not is_request_id(cursor):
        raise InvalidRequest(
            "invalid_value", f"cursor is {cursor!r}; send a next_cursor.", param="cursor"
        )
    found = read_page(connection, choice, limit=limit + 1, cursor=cursor)
    more = found[limit - 1].request.request_id if len(found) > limit else None
    return [feedback_view(one) for one in found[:limit]], more


def export_page(
    connection: Connection, choice: FeedbackFilter, *, of_all: bool, cursor: str | None
) -> tuple[bytes, str | None]:
    """Encode a part of an export as JSON lines, oldest request first, and return the cursor of the
    next part. ``of_all``: with account and version, for the operator."""
    found = read_page(connection, choice, limit=PAGE, cursor=cursor, oldest_first=True)
    views = [_of_all(one) if of_all else feedback_view(one) for one in found]
    more = found[-1].request.request_id if len(found) == PAGE else None
    return b"".join(msgspec.json.encode(view) + b"\n" for view in views), more


def summarize(
    connection: Connection, choice: FeedbackFilter, by: Sequence[str]
) -> tuple[list[FeedbackGroupView], FeedbackGroupView]:
    """Sum feedback by some dimensions; return the groups and the total."""
    total = FeedbackSums()
    groups: list[FeedbackGroupView] = []
    for place, group in sums(connection, choice, by).items():
        total.add(group)
        groups.append(_group_view(dict(zip(by, place, strict=True)), group))
    return groups, _group_view({}, total)


def read_dimensions(text: str) -> tuple[str, ...]:
    """Parse a ``group_by``. Raise ``InvalidRequest`` if it names an unknown dimension."""
    by = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for part in by:
        if part not in DIMENSIONS:
            raise InvalidRequest(
                "invalid_value",
                f"group_by names {part!r}; supported are {', '.join(DIMENSIONS)}.",
                param="group_by",
            )
    return by


def feedback_view(found: Feedback) -> FeedbackView:
    return {
        "object": "feedback",
        "request_id": found.request.request_id,
        "model": found.request.model,
        "task": found.request.task,
        "rating": found.rating,
        "labels": found.labels,
        "comment": found.comment,
        "created_at": timestamp(found.created_at),
        "changed_at": timestamp(found.changed_at),
    }


def _of_all(found: Feedback) -> FeedbackOfAllView:
    return {
        **feedback_view(found),
        "account_id": found.request.account_id,
        "served_by": found.request.served_by,
        "settled_at": timestamp(found.request.settled_at),
    }


def _group_view(labels: dict[str, Any], group: FeedbackSums) -> FeedbackGroupView:
    view: FeedbackSumsView = {
        "feedback": group.count,
        "ratings": group.rated,
        "mean_rating": group.mean_rating,
        "by_rating": {str(rating): group.ratings[rating] for rating in RATINGS},
        "labels": dict(group.labels.most_common()),
    }
    return cast("FeedbackGroupView", {**labels, **view})


def _not_found(request_id: str) -> NotFound:
    return NotFound(
        "feedback_not_found", f"There is no feedback on {request_id!r}.", param="request_id"
    )

"""Feedback: rating a request on its page, sums by model and version, and its export."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Stream
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.billing.usage.report import read_span
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.pages.requests import find_seen
from gateway.console.queries import ROWS, FormValues, Query, read_form
from gateway.console.rendering import page
from gateway.console.scope import account_of
from gateway.console.views.files import attachment
from gateway.console.views.formats import count
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import Conflict, InvalidRequest
from gateway.feedback import views
from gateway.feedback.store import RATINGS, Feedback, FeedbackFilter, read_page
from gateway.feedback.views import FeedbackBody, FeedbackGroupView
from gateway.ids import is_request_id
from gateway.requests.lookup import request_not_found
from gateway.tasks.submission import OpenRequest

GROUPS: Final = ("model", "served_by", "task", "account")
MEDIA_TYPE: Final = "application/jsonl"
LISTS: Final = (
    ListColumns(
        "feedback",
        {
            "account": "Account",
            "model": "Model",
            "rating": "Rating",
            "labels": "Labels",
            "comment": "Comment",
        },
    ),
)


class FeedbackPages(Controller):
    path = "/"

    @post("/requests/{request_id:str}/feedback", guards=[needs("requests.write")])
    async def rate(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Response[Any]:
        """Write the feedback on a request, or delete it."""
        form = await read_form(request)
        owner, found = await find_seen(request, visitor, request_id)
        if not visitor.may("requests.write", owner.id):
            raise request_not_found(request_id)
        if isinstance(found, OpenRequest):
            raise Conflict(
                "request_not_ended",
                f"{request_id} is still {found.status}; rate it when it has ended.",
            )
        write = request.services.database.write
        if form.text("do") == "delete":
            await write(lambda connection: views.delete(connection, owner.id, request_id))
        else:
            body = read_body(FeedbackBody, _entered(form))
            await write(lambda connection: views.write(connection, found, body))
        return see_other(f"/console/requests/{request_id}#feedback")

    @get("/feedback", guards=[needs("requests.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        by = query.one_of("by", _groups(visitor)) or "model"
        cursor = query.text("cursor")
        if cursor is not None and not is_request_id(cursor):
            raise InvalidRequest("invalid_value", f"cursor is {cursor!r}.", param="cursor")

        def read(
            connection: Connection,
        ) -> tuple[
            Account | None,
            list[FeedbackGroupView],
            FeedbackGroupView,
            list[Feedback],
            dict[int, str],
        ]:
            account, choice = _choice(connection, visitor, query)
            groups, total = views.summarize(connection, choice, [by])
            found = read_page(connection, choice, limit=ROWS + 1, cursor=cursor)
            names = account_names(connection, {each.request.account_id for each in found})
            return account, groups, total, found, names

        account, groups, total, found, names = await request.services.database.report(
            read, account_id=visitor.account_id
        )
        shown = found[:ROWS]
        return await page(
            request,
            visitor,
            "stored/feedback.html",
            lists=LISTS,
            title=_title(account, total),
            account=account,
            by=by,
            by_names=_groups(visitor),
            groups=groups,
            total=total,
            rows=shown,
            names=names,
            ratings=RATINGS,
            filters=query.values,
            narrowed=bool(query.narrowed - {"account", "by"}),
            export=query.at("/console/feedback/file", cursor=None, by=None),
            pager=query.pages(shown[-1].request.request_id if len(found) > ROWS else None),
        )

    @get("/feedback/file", guards=[needs("requests.read")])
    async def file(self, request: ApiRequest, visitor: CurrentVisitor) -> Stream:
        """The feedback of the filter as JSON lines, oldest request first."""
        query, database = Query(request), request.services.database
        _, choice = await database.read(lambda connection: _choice(connection, visitor, query))
        of_all = visitor.role is not None

        async def lines() -> AsyncIterator[bytes]:
            cursor: str | None = None
            while True:
                read = partial(views.export_page, choice=choice, of_all=of_all, cursor=cursor)
                part, cursor = await database.report(read, account_id=visitor.account_id)
                yield part
                if cursor is None:
                    return

        return Stream(lines(), media_type=MEDIA_TYPE, headers=attachment("feedback.jsonl"))


def _entered(form: FormValues) -> dict[str, Any]:
    labels = [each.strip() for each in (form.text("labels") or "").split(",")]
    return {
        "rating": form.number("rating"),
        "labels": [each for each in labels if each],
        "comment": form.raw("comment").strip(),
    }


def _groups(visitor: Visitor) -> tuple[str, ...]:
    return GROUPS if visitor.role is not None else GROUPS[:-1]


def _choice(
    connection: Connection, visitor: Visitor, query: Query
) -> tuple[Account | None, FeedbackFilter]:
    account = account_of(connection, visitor, query.text("account"))
    model, rating = query.text("model"), query.one_of("rating", [str(each) for each in RATINGS])
    starts_at = ends_at = None
    if query.text("from") or query.text("to"):
        now = datetime.now(UTC)
        span = read_span(query.text("from"), query.text("to"), visitor.zone, now=now)
        starts_at, ends_at = span.starts_at, span.ends_at
    return account, FeedbackFilter(
        account_ids=(account.id,) if account else None,
        models=(model,) if model else None,
        rating=None if rating is None else int(rating),
        label=query.text("label"),
        starts_at=starts_at,
        ends_at=ends_at,
    )


def _title(account: Account | None, total: FeedbackGroupView) -> str:
    of = f" of {account.name}" if account else ""
    if total["mean_rating"] is None:
        return f"Feedback{of}"
    ratings = total["ratings"]
    number = f"{count(ratings)} rating{'' if ratings == 1 else 's'}"
    return f"{number}{of}, {total['mean_rating']:g} of 5 on average"


HANDLERS: Final[list[Any]] = [FeedbackPages]

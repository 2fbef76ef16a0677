"""Feedback of an account on its requests; for administrators, that of all accounts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final, Literal, NotRequired, TypedDict

from litestar import Controller, Response, delete, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from litestar.response import Stream
from sqlalchemy import Connection

from gateway.api.http.access import requested_account
from gateway.api.http.answers import DeletedView, PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.operations import export_pages, page_response
from gateway.api.http.request import ApiRequest
from gateway.api.native.usage import one_of
from gateway.billing.usage.report import read_span
from gateway.errors import Conflict
from gateway.feedback import views
from gateway.feedback.store import FeedbackFilter
from gateway.feedback.views import FeedbackBody, FeedbackGroupView, FeedbackView
from gateway.tasks.submission import OpenRequest

MEDIA_TYPE: Final = "application/jsonl"
Rating = Annotated[int | None, QueryParameter(ge=1, le=5)]

FeedbackReportView = TypedDict(
    "FeedbackReportView",
    {
        "object": Literal["list"],
        "from": NotRequired[str],
        "to": NotRequired[str],
        "group_by": list[str],
        "data": list[FeedbackGroupView],
        "total": FeedbackGroupView,
    },
)


async def read_own(
    request: ApiRequest,
    account: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    rating: Rating = None,
    label: FromQuery[str | None] = None,
    tz: FromQuery[str | None] = None,
    first: Annotated[str | None, QueryParameter(name="from")] = None,
    last: Annotated[str | None, QueryParameter(name="to")] = None,
) -> FeedbackFilter:
    """Litestar dependency: the feedback of one account that is wanted."""

    def read(connection: Connection) -> FeedbackFilter:
        owner = requested_account(request, connection, account, "requests")
        return _filter((owner.id,), model, rating, label, first, last, tz or owner.report_tz)

    return await request.services.database.read(read)


async def read_of_all(
    request: ApiRequest,
    account: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    rating: Rating = None,
    label: FromQuery[str | None] = None,
    tz: FromQuery[str] = "UTC",
    first: Annotated[str | None, QueryParameter(name="from")] = None,
    last: Annotated[str | None, QueryParameter(name="to")] = None,
) -> FeedbackFilter:
    """Litestar dependency: the feedback of all accounts that is wanted."""

    def read(connection: Connection) -> FeedbackFilter:
        owners = None
        if account is not None:
            owners = (requested_account(request, connection, account, "requests").id,)
        return _filter(owners, model, rating, label, first, last, tz)

    return await request.services.database.read(read)


class FeedbackController(Controller):
    path = "/v1"
    tags = ["Requests"]

    @post(
        "/requests/{request_id:str}/feedback",
        status_code=200,
        opt={"scope": "inference", "errors": [404, 409]},
        operation_id="PutFeedback",
        summary="Rate a request that has ended; feedback sent again replaces the earlier one",
    )
    async def put(
        self, request: ApiRequest, request_id: FromPath[str], data: JSONBody[FeedbackBody]
    ) -> Response[FeedbackView]:
        services, account_id = request.services, request.key.account_id
        found = await services.requests.lookup.find(account_id, request_id, whole=False)
        if isinstance(found, OpenRequest):
            raise Conflict(
                "request_not_ended",
                f"{request_id} is still {found.status}; send feedback when it has ended.",
            )
        return json_response(
            await services.database.write(lambda connection: views.write(connection, found, data))
        )

    @get(
        "/requests/{request_id:str}/feedback",
        opt={"scope": "read"},
        operation_id="GetFeedback",
        summary="Get the feedback on a request",
    )
    async def show(self, request: ApiRequest, request_id: FromPath[str]) -> Response[FeedbackView]:
        account_id = request.key.account_id
        return json_response(
            await request.services.database.read(
                lambda connection: views.show(connection, account_id, request_id)
            )
        )

    @delete(
        "/requests/{request_id:str}/feedback",
        status_code=200,
        opt={"scope": "inference"},
        operation_id="DeleteFeedback",
        summary="Delete the feedback on a request",
    )
    async def remove(self, request: ApiRequest, request_id: FromPath[str]) -> Response[DeletedView]:
        account_id = request.key.account_id
        await request.services.database.write(
            lambda connection: views.delete(connection, account_id, request_id)
        )
        return json_response({"id": request_id, "object": "feedback", "deleted": True})

    @get(
        "/feedback",
        opt={"scope": "read"},
        dependencies={"choice": Provide(read_own)},
        operation_id="ListFeedback",
        summary="List feedback by its requests, newest first",
    )
    async def index(
        self,
        request: ApiRequest,
        choice: NamedDependency[FeedbackFilter],
        limit: FromQuery[int] = 20,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[FeedbackView]]:
        check_limit(limit)
        return await page_response(
            request, views.list_page, choice=choice, limit=limit, cursor=cursor
        )

    @get(
        "/feedback/export",
        opt={"scope": "read", "media": [MEDIA_TYPE]},
        dependencies={"choice": Provide(read_own)},
        operation_id="ExportFeedback",
        summary="Feedback as JSON lines, oldest request first",
        description="Without inputs and outputs: inputs are not kept, and outputs expire.",
    )
    async def export(self, request: ApiRequest, choice: NamedDependency[FeedbackFilter]) -> Stream:
        return _export(request, choice, of_all=False)

    @get(
        "/admin/feedback",
        opt={"scope": "admin", "area": "requests"},
        dependencies={"choice": Provide(read_of_all)},
        operation_id="SummarizeFeedback",
        summary="Ratings and labels by model, version, task or account",
    )
    async def summary(
        self,
        request: ApiRequest,
        choice: NamedDependency[FeedbackFilter],
        group_by: FromQuery[str] = "model,served_by",
    ) -> Response[FeedbackReportView]:
        by = views.read_dimensions(group_by)
        data, total = await request.services.database.report(
            lambda connection: views.summarize(connection, choice, by),
            account_id=request.key.account_id,
        )
        view: FeedbackReportView = {
            "object": "list",
            "group_by": list(by),
            "data": data,
            "total": total,
        }
        if choice.starts_at is not None and choice.ends_at is not None:
            view["from"] = choice.starts_at.isoformat()
            view["to"] = choice.ends_at.isoformat()
        return json_response(view)

    @get(
        "/admin/feedback/export",
        opt={"scope": "admin", "area": "requests", "media": [MEDIA_TYPE]},
        dependencies={"choice": Provide(read_of_all)},
        operation_id="ExportFeedbackOfAll",
        summary="Feedback of all accounts as JSON lines, with the version that ran each request",
        description="Without inputs and outputs, which no administrator sees.",
    )
    async def export_of_all(
        self, request: ApiRequest, choice: NamedDependency[FeedbackFilter]
    ) -> Stream:
        return _export(request, choice, of_all=True)


def _filter(
    account_ids: tuple[int, ...] | None,
    model: str | None,
    rating: int | None,
    label: str | None,
    first: str | None,
    last: str | None,
    tz: str,
) -> FeedbackFilter:
    """Build a filter. Without ``from`` and ``to``, it matches feedback of any time."""
    models = one_of(model)
    if first is None and last is None:
        return FeedbackFilter(account_ids, models, rating, label)
    span = read_span(first, last, tz, now=datetime.now(UTC))
    return FeedbackFilter(account_ids, models, rating, label, span.starts_at, span.ends_at)


def _export(request: ApiRequest, choice: FeedbackFilter, *, of_all: bool) -> Stream:
    return Stream(
        export_pages(request, views.export_page, choice=choice, of_all=of_all),
        media_type=MEDIA_TYPE,
        headers={"Content-Disposition": 'attachment; filename="feedback.jsonl"'},
    )

"""OpenAI's costs and usage of an organization, for its client with an administrator's key.

Projects are accounts, API keys are keys, both by their ids; a line item is a model. Buckets are in
UTC. Reports without a counterpart here (moderations, vector stores, …) are always empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Generic, Literal, NotRequired, TypedDict, TypeVar, cast
from zoneinfo import ZoneInfo

from litestar import Controller, Response, get
from litestar.params import FromPath, FromQuery, QueryParameter

from gateway.api.http.answers import ExactUsd, exact_number, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.request import ApiRequest
from gateway.billing.usage.archived import add_archived
from gateway.billing.usage.report import Filters, Group, Span, stored_usage
from gateway.catalog.tasks import TASKS
from gateway.checks.decoding import read_id
from gateway.checks.moments import EPOCH, YEARS
from gateway.errors import InvalidRequest, NotFound

Width = Literal["1m", "1h", "1d"]

_WIDTHS: Final[Mapping[str, tuple[str, timedelta, int, int]]] = {
    # Dimension of a report, its length, and the default and maximum number of buckets.
    "1m": ("minute", timedelta(minutes=1), 60, 1440),
    "1h": ("hour", timedelta(hours=1), 24, 168),
    "1d": ("day", timedelta(days=1), 7, 180),
}
_DIMENSIONS: Final[Mapping[str, str | None]] = {
    # Our dimension for each of OpenAI's; None if it has one value only.
    "project_id": "account_id",
    "api_key_id": "key_id",
    "model": "model",
    "line_item": "model",
    "user_id": None,
    "batch": None,
    "service_tier": None,
    "api_source": None,
    "size": None,
    "source": None,
}


@dataclass(frozen=True, slots=True)
class UsageReport:
    """One of OpenAI's usage reports: its tasks, and what it counts."""

    tasks: tuple[str, ...]
    count: Callable[[Group], dict[str, int]]


def _completions(group: Group) -> dict[str, int]:
    cached = group.units.get("cached_input_tokens", 0)
    return {
        "input_tokens": group.units.get("input_tokens", 0) + cached,
        "input_cached_tokens": cached,
        "output_tokens": group.units.get("output_tokens", 0),
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
    }


def _makes(kind: str) -> tuple[str, ...]:
    return tuple(name for name, task in TASKS.items() if task.makes == kind)


KINDS: Final[Mapping[str, UsageReport]] = {
    "completions": UsageReport(_makes("text"), _completions),
    "images": UsageReport(_makes("image"), lambda group: {"images": group.units.get("images", 0)}),
    "audio_speeches": UsageReport(
        _makes("audio"), lambda group: {"characters": group.units.get("characters", 0)}
    ),
    "embeddings": UsageReport(
        _makes("embedding"), lambda group: {"input_tokens": group.units.get("input_tokens", 0)}
    ),
    "moderations": UsageReport((), lambda _: {}),
    "audio_transcriptions": UsageReport(
        _makes("transcript"), lambda group: {"seconds": round(group.units.get("audio_seconds", 0))}
    ),
    "vector_stores": UsageReport((), lambda _: {}),
    "code_interpreter_sessions": UsageReport((), lambda _: {}),
    "file_search_calls": UsageReport((), lambda _: {}),
    "web_search_calls": UsageReport((), lambda _: {}),
}


ResultView = TypeVar("ResultView")


class CostAmountView(TypedDict):
    value: ExactUsd
    currency: Literal["usd"]


class CostView(TypedDict):
    object: Literal["organization.costs.result"]
    amount: CostAmountView
    line_item: str | None
    project_id: str | None
    api_key_id: str | None
    quantity: float | None
    quantity_unit: str | None


class OrganizationUsageView(TypedDict):
    """Counts of a group; the kind of report determines which ones."""

    object: str
    input_tokens: NotRequired[int]
    input_cached_tokens: NotRequired[int]
    output_tokens: NotRequired[int]
    input_audio_tokens: NotRequired[int]
    output_audio_tokens: NotRequired[int]
    images: NotRequired[int]
    characters: NotRequired[int]
    num_model_requests: int
    project_id: str | None
    user_id: str | None
    api_key_id: str | None
    model: str | None


class BucketView(TypedDict, Generic[ResultView]):
    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[ResultView]


class BucketsView(TypedDict, Generic[ResultView]):
    object: Literal["page"]
    data: list[BucketView[ResultView]]
    has_more: bool
    next_page: str | None


class OrganizationController(Controller):
    path = "/v1/organization"
    tags = ["OpenAI"]
    opt = {"scope": "admin", "area": "usage"}

    @get("/costs", operation_id="GetCosts", summary="Charges by day, net of refunds")
    async def costs(
        self,
        request: ApiRequest,
        start_time: FromQuery[int],
        end_time: FromQuery[int | None] = None,
        bucket_width: FromQuery[Literal["1d"]] = "1d",
        limit: FromQuery[int | None] = None,
        page: FromQuery[str | None] = None,
        group_by: Annotated[list[str] | None, QueryParameter(name="group_by[]")] = None,
        api_key_ids: Annotated[list[str] | None, QueryParameter(name="api_key_ids[]")] = None,
        project_ids: Annotated[list[str] | None, QueryParameter(name="project_ids[]")] = None,
        line_items: Annotated[list[str] | None, QueryParameter(name="line_items[]")] = None,
    ) -> Response[BucketsView[CostView]]:
        buckets = _buckets(start_time, end_time, bucket_width, limit, page)
        filters = Filters(
            account_ids=_numbers(project_ids, "project_ids"),
            key_ids=_numbers(api_key_ids, "api_key_ids"),
            models=None if line_items is None else tuple(line_items),
        )

        def result(group: Group, labels: dict[str, str]) -> CostView:
            net = group.cost_nanos - group.refund_nanos
            view = {
                "object": "organization.costs.result",
                "amount": {"value": exact_number(net), "currency": "usd"},
                "line_item": None,
                "project_id": None,
                "api_key_id": None,
                "quantity": None,
                "quantity_unit": None,
                **labels,
            }
            return cast("CostView", view)

        return await _report(request, buckets, bucket_width, group_by or [], filters, result)

    @get(
        "/usage/{kind:str}",
        operation_id="GetOrganizationUsage",
        summary="Usage by kind: completions, images, audio_speeches, …",
    )
    async def usage(
        self,
        request: ApiRequest,
        kind: FromPath[str],
        start_time: FromQuery[int],
        end_time: FromQuery[int | None] = None,
        bucket_width: FromQuery[Width] = "1d",
        limit: FromQuery[int | None] = None,
        page: FromQuery[str | None] = None,
        group_by: Annotated[list[str] | None, QueryParameter(name="group_by[]")] = None,
        api_key_ids: Annotated[list[str] | None, QueryParameter(name="api_key_ids[]")] = None,
        project_ids: Annotated[list[str] | None, QueryParameter(name="project_ids[]")] = None,
        models: Annotated[list[str] | None, QueryParameter(name="models[]")] = None,
    ) -> Response[BucketsView[OrganizationUsageView]]:
        if kind not in KINDS:
            raise NotFound(
                "not_found", f"Unknown kind of usage: {kind!r}; available: {', '.join(KINDS)}."
            )
        buckets = _buckets(start_time, end_time, bucket_width, limit, page)
        filters = Filters(
            account_ids=_numbers(project_ids, "project_ids"),
            key_ids=_numbers(api_key_ids, "api_key_ids"),
            models=None if models is None else tuple(models),
            tasks=KINDS[kind].tasks,
        )

        def result(group: Group, labels: dict[str, str]) -> OrganizationUsageView:
            view = {
                "object": f"organization.usage.{kind}.result",
                **KINDS[kind].count(group),
                "num_model_requests": group.charged,
                "project_id": None,
                "user_id": None,
                "api_key_id": None,
                "model": None,
                **labels,
            }
            return cast("OrganizationUsageView", view)

        return await _report(request, buckets, bucket_width, group_by or [], filters, result)


@dataclass(frozen=True, slots=True)
class _Buckets:
    """Start times of a page's buckets, the end of the last, and the cursor of the next page."""

    starts: Sequence[datetime]
    ends_at: datetime
    next_page: str | None


async def _report(
    request: ApiRequest,
    buckets: _Buckets,
    width: str,
    group_by: Sequence[str],
    filters: Filters,
    result: Callable[[Group, dict[str, str]], ResultView],
) -> Response[BucketsView[ResultView]]:
    names = [name for part in group_by for name in part.split(",")]
    if unknown := set(names) - set(_DIMENSIONS):
        raise InvalidRequest(
            "invalid_value",
            f"group_by names {min(unknown)!r}; accepted: {', '.join(_DIMENSIONS)}.",
            param="group_by",
        )
    dimensions = {name: own for name in names if (own := _DIMENSIONS[name]) is not None}
    unit, length, *_ = _WIDTHS[width]
    span = Span(buckets.starts[0], buckets.ends_at, ZoneInfo("UTC"))
    by = (unit, *dict.fromkeys(dimensions.values()))
    services, account_id = request.services, request.key.account_id
    report = await services.database.report(
        lambda connection: stored_usage(connection, span, by, filters), account_id=account_id
    )
    await add_archived(report, services.database, services.blobs, account_id=account_id)
    found: dict[datetime, list[ResultView]] = {start: [] for start in buckets.starts}
    for group in report.groups:
        at = datetime.fromisoformat(group.labels[unit])
        start = max(at.replace(tzinfo=UTC), buckets.starts[0])
        labels = {name: group.labels[own] for name, own in dimensions.items()}
        found[start].append(result(group, labels))
    return json_response(
        {
            "object": "page",
            "data": [
                {
                    "object": "bucket",
                    "start_time": int(start.timestamp()),
                    "end_time": int(min(_next(start, length), buckets.ends_at).timestamp()),
                    "results": results,
                }
                for start, results in found.items()
            ],
            "has_more": buckets.next_page is not None,
            "next_page": buckets.next_page,
        }
    )


def _buckets(
    start_time: int, end_time: int | None, width: str, limit: int | None, page: str | None
) -> _Buckets:
    """Split a time span into the buckets of one page. Raise ``InvalidRequest``."""
    _, length, usual, maximum = _WIDTHS[width]
    count = usual if limit is None else limit
    check_limit(count, maximum)
    first = _moment(start_time, "start_time")
    last = datetime.now(UTC) if end_time is None else _moment(end_time, "end_time")
    if page is not None:
        if read_id(page.removeprefix("page_")) is None:
            raise InvalidRequest(
                "invalid_value", f"page is {page!r}; send the next_page of an answer.", param="page"
            )
        first = max(first, _moment(int(page.removeprefix("page_")), "page"))
    if first >= last:
        raise InvalidRequest(
            "invalid_value", "start_time must be before end_time.", param="start_time"
        )
    starts = [first]
    while len(starts) < count and (following := _next(starts[-1], length)) < last:
        starts.append(following)
    end = _next(starts[-1], length)
    more = f"page_{int(end.timestamp())}" if end < last else None
    return _Buckets(starts, min(end, last), more)


def _next(start: datetime, length: timedelta) -> datetime:
    """Return the next bucket boundary; the first bucket can begin between two."""
    return EPOCH + ((start - EPOCH) // length + 1) * length


def _moment(seconds: int, param: str) -> datetime:
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
        if moment.year in YEARS:
            return moment
        raise ValueError(seconds)
    except (OverflowError, ValueError, OSError):
        raise InvalidRequest(
            "invalid_value",
            f"{param} is {seconds}, which is not a valid time in Unix seconds.",
            param=param,
        ) from None


def _numbers(texts: Sequence[str] | None, param: str) -> tuple[int, ...] | None:
    if texts is None:
        return None
    for text in texts:
        if read_id(text) is None:
            raise InvalidRequest(
                "invalid_value", f"{param} contains {text!r}; send numeric ids.", param=param
            )
    return tuple(map(int, texts))

"""OpenAI's batches: a file of requests, run at low priority and at a lower price."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, TypedDict

from litestar import Controller, Response, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from pydantic import ConfigDict, Field

from gateway.api.http.answers import json_response
from gateway.api.http.bodies import check_limit, is_retry
from gateway.api.http.fields import Metadata
from gateway.api.http.guards import may_store
from gateway.api.http.request import ApiRequest
from gateway.api.openai import (
    chat,
    completions,
    embeddings,
    images,
    rerank,
    responses,
    speech,
    transcriptions,
    videos,
)
from gateway.api.openai.files import KeptSeconds, OpenAIListView, list_view
from gateway.api.openai.responses_views import ResponseUsageView, responses_usage
from gateway.batches import store
from gateway.batches.endpoint import BatchEndpoint
from gateway.batches.store import Batch, NewBatch
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest

ENDPOINTS: Final[Mapping[str, BatchEndpoint]] = {
    endpoint.path: endpoint
    for endpoint in (
        chat.BATCHES,
        completions.BATCHES,
        embeddings.BATCHES,
        rerank.BATCHES,
        responses.BATCHES,
        *images.BATCHES,
        speech.BATCHES,
        *transcriptions.BATCHES,
        videos.BATCHES,
    )
}
"""Endpoints of OpenAI's API that batches can call, by path."""

PAGE_MAX: Final = 100


class ExpiresAfter(StrictModel):
    anchor: Literal["created_at"]
    seconds: KeptSeconds


class BatchBody(StrictModel):
    """Body of ``POST /v1/batches``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "input_file_id": "file-0199…",
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                }
            ]
        },
    )

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchErrorView(TypedDict):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrorsView(TypedDict):
    object: Literal["list"]
    data: list[BatchErrorView]


class CountsView(TypedDict):
    total: int
    completed: int
    failed: int


class BatchView(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrorsView | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelled_at: int | None
    request_counts: CountsView
    usage: ResponseUsageView | None
    metadata: Mapping[str, str] | None


class BatchesController(Controller):
    path = "/v1/batches"
    tags = ["OpenAI"]

    @post(
        status_code=200,
        opt={"scope": "inference"},
        guards=[may_store],
        operation_id="CreateBatch",
        summary="Run a file of requests within a day, at the batch price",
    )
    async def create(self, request: ApiRequest, data: JSONBody[BatchBody]) -> Response[BatchView]:
        endpoints = request.services.batches.endpoints
        if data.endpoint not in endpoints:
            accepted = ", ".join(sorted(endpoints))
            raise InvalidRequest(
                "invalid_value",
                f"endpoint is {data.endpoint!r}; accepted: {accepted}.",
                param="endpoint",
            )
        settings = request.services.settings
        key = request.key
        asked = NewBatch(
            account_id=key.account_id,
            key_id=key.id,
            endpoint=data.endpoint,
            input_file_id=data.input_file_id,
            completion_window=data.completion_window,
            metadata=data.metadata,
            output_expires_s=data.output_expires_after.seconds
            if data.output_expires_after
            else None,
        )
        now = datetime.now(UTC)
        made = await request.services.database.write(
            lambda connection: store.create(
                connection,
                asked,
                now=now,
                window=timedelta(seconds=settings.batch_window_s),
                open_max=settings.account_batches_max,
                # A client that retries after a broken connection wants one batch, not two.
                same_since=now - timedelta(seconds=settings.retry_window_s)
                if is_retry(request)
                else None,
            )
        )
        request.services.batches.wake()
        return json_response(batch_view(made))

    @get(opt={"scope": "read"}, operation_id="ListBatches", summary="List batches, newest first")
    async def index(
        self,
        request: ApiRequest,
        after: FromQuery[str | None] = None,
        limit: FromQuery[int] = 20,
    ) -> Response[OpenAIListView[BatchView]]:
        check_limit(limit, PAGE_MAX)
        account_id = request.key.account_id
        found, more = await request.services.database.report(
            lambda connection: store.page(connection, account_id, limit=limit, after=after),
            account_id=account_id,
        )
        return json_response(list_view([batch_view(batch) for batch in found], more=more))

    @get(
        "/{batch_id:str}",
        opt={"scope": "read"},
        operation_id="GetBatch",
        summary="Status and progress of a batch",
    )
    async def show(self, request: ApiRequest, batch_id: FromPath[str]) -> Response[BatchView]:
        account_id = request.key.account_id
        found = await request.services.database.read(
            lambda connection: store.find(connection, account_id, batch_id)
        )
        return json_response(batch_view(found))

    @post(
        "/{batch_id:str}/cancel",
        status_code=200,
        opt={"scope": "inference"},
        operation_id="CancelBatch",
        summary="Stop a batch; finished requests are kept and charged, the others are free",
    )
    async def cancel(self, request: ApiRequest, batch_id: FromPath[str]) -> Response[BatchView]:
        account_id, now = request.key.account_id, datetime.now(UTC)
        found = await request.services.database.write(
            lambda connection: store.cancel(connection, account_id, batch_id, now=now)
        )
        request.services.batches.wake()
        return json_response(batch_view(found))


def batch_view(batch: Batch) -> BatchView:
    """Return OpenAI's batch. File ids are included once the files exist."""
    ended = batch.ended_at is not None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": [_error(each) for each in batch.errors]}
        if batch.errors
        else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id if ended else None,
        "error_file_id": batch.error_file_id if ended else None,
        "created_at": int(batch.created_at.timestamp()),
        "in_progress_at": _seconds(batch.in_progress_at),
        "expires_at": int(batch.expires_at.timestamp()),
        "finalizing_at": _seconds(batch.finalizing_at),
        "cancelling_at": _seconds(batch.cancelling_at),
        "completed_at": _ended_as(batch, "completed"),
        "failed_at": _ended_as(batch, "failed"),
        "expired_at": _ended_as(batch, "expired"),
        "cancelled_at": _ended_as(batch, "cancelled"),
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": responses_usage(
            batch.input_tokens,
            batch.cached_input_tokens,
            batch.output_tokens,
            cost_nanos=batch.cost_nanos,
        )
        if batch.total
        else None,
        "metadata": batch.metadata,
    }


def _error(mistake: Mapping[str, Any]) -> BatchErrorView:
    return {
        "code": mistake["code"],
        "line": mistake["line"],
        "message": mistake["message"],
        "param": mistake["param"],
    }


def _ended_as(batch: Batch, status: str) -> int | None:
    return _seconds(batch.ended_at) if batch.status == status else None


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())

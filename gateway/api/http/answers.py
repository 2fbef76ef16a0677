"""Responses: JSON by msgspec, amounts with their exact digits, event streams, headers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NotRequired,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
)

import msgspec
from litestar import Response
from litestar.response import Stream

from gateway.ledger.closed import ClosedRequest
from gateway.pricing import format_usd
from workers.contract.jobs import RequestId, Usage

Body = TypeVar("Body")
Item = TypeVar("Item")

ExactUsd: TypeAlias = Annotated[
    msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "number", "description": "USD, exact"})
]
"""A JSON number with the exact digits of an amount."""


class ListView(TypedDict, Generic[Item]):
    """A complete list."""

    object: Literal["list"]
    data: Sequence[Item]


class PageView(ListView[Item]):
    """One page of a list. Send ``next_cursor`` as ``cursor`` to get the next page."""

    has_more: bool
    next_cursor: str | None


KEEP_ALIVE_S: Final = 15.0
"""Interval between keep-alives on a stream without events."""
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
"""End of OpenAI's streams of text."""


class DataView(TypedDict, Generic[Item]):
    data: Item


class DeletedView(TypedDict):
    id: str
    object: str
    deleted: Literal[True]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class UsageView(TypedDict):
    """OpenAI's usage, where cached tokens are a part of the prompt's, with OpenRouter's cost."""

    prompt_tokens: int
    completion_tokens: NotRequired[int]
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    cost: ExactUsd


def page_view(items: Sequence[Item], next_cursor: str | None) -> PageView[Item]:
    return {
        "object": "list",
        "data": items,
        "has_more": next_cursor is not None,
        "next_cursor": next_cursor,
    }


encode_json = msgspec.json.Encoder(decimal_format="number").encode


def exact_number(nanos: int) -> msgspec.Raw:
    """Return an amount in USD as a JSON number with its exact digits."""
    return msgspec.Raw(format_usd(nanos).encode())


def json_response(
    body: Body, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response[Body]:
    """Respond with a body of a declared type, from which the OpenAPI document is generated."""
    encoded = Response(
        encode_json(body),
        status_code=status,
        media_type="application/json",
        headers=dict(headers or {}),
    )
    return cast("Response[Body]", encoded)


def event_stream(
    events: AsyncIterator[bytes], *, headers: Mapping[str, str] | None = None
) -> Stream:
    """Respond with server-sent events, with headers that stop proxies from buffering them."""
    return Stream(
        events,
        status_code=200,
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})},
    )


def event_data(body: Mapping[str, Any], *, name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encode_json(body) + b"\n\n"


def request_headers(request_id: RequestId, closed: ClosedRequest | None = None) -> dict[str, str]:
    headers: dict[str, str] = {"X-Request-Id": request_id}
    if closed is not None:
        headers["X-Request-Cost"] = format_usd(closed.cost_nanos)
    return headers


def openai_usage(usage: Usage, cost_nanos: int, reasoning_tokens: int = 0) -> UsageView:
    """Return usage as OpenAI counts it: cached tokens are the prompt's, thoughts the answer's."""
    prompt = usage.input_tokens + usage.cached_input_tokens
    view: UsageView = {
        "prompt_tokens": prompt,
        "completion_tokens": usage.output_tokens,
        "total_tokens": prompt + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_input_tokens},
        "cost": exact_number(cost_nanos),
    }
    if reasoning_tokens:
        view["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return view

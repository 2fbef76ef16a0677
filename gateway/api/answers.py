"""How answers are written: JSON by msgspec, amounts with their exact digits, our headers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from litestar import Response
from litestar.response import Stream

from gateway.ledger.closed import Closed
from gateway.pricing import format_usd
from workers.contract.jobs import RequestId, Usage

encode_json = msgspec.json.Encoder(decimal_format="number").encode


def exact_number(nanos: int) -> msgspec.Raw:
    """A JSON number of USD that, read as a decimal, is the amount to the last digit."""
    return msgspec.Raw(format_usd(nanos).encode())


def json_response(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response[bytes]:
    return Response(
        encode_json(body),
        status_code=status,
        media_type="application/json",
        headers=dict(headers or {}),
    )


def event_stream(
    events: AsyncIterator[bytes], *, headers: Mapping[str, str] | None = None
) -> Stream:
    """A server-sent event stream that no proxy should buffer."""
    return Stream(
        events,
        status_code=200,
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})},
    )


def event_data(body: Mapping[str, Any], *, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encode_json(body) + b"\n\n"


def request_headers(request_id: RequestId, closed: Closed | None = None) -> dict[str, str]:
    headers: dict[str, str] = {"X-Request-Id": request_id}
    if closed is not None:
        headers["X-Request-Cost"] = format_usd(closed.cost_nanos)
    return headers


def openai_usage(usage: Usage, cost_nanos: int) -> dict[str, Any]:
    """OpenAI's usage, where cached tokens are a part of the prompt's, with OpenRouter's cost."""
    prompt = usage.input_tokens + usage.cached_input_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": usage.output_tokens,
        "total_tokens": prompt + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_input_tokens},
        "cost": exact_number(cost_nanos),
    }

"""OpenAI's response object and the events of its stream. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NotRequired, TypeAlias, TypedDict

from gateway.api.http.answers import ExactUsd, event_data, exact_number
from gateway.api.http.text_stream import (
    LogprobView,
    TextDelta,
    TextStream,
    choices_of,
    cut_reason,
    logprob_view,
    reasoning_tokens,
)
from gateway.api.openai.responses_bodies import FlatChoice, ResponseBody
from gateway.errors import RequestFailed, render_openai
from gateway.ledger.closed import ClosedRequest
from gateway.tasks.submission import OpenRequest
from workers.contract.jobs import Choice, SentEvent, TokenLogprob, ToolCall


class CachedTokensView(TypedDict):
    cached_tokens: int


class ReasoningTokensView(TypedDict):
    reasoning_tokens: int


class ResponseUsageView(TypedDict):
    """OpenAI's usage of a response, with its cost."""

    input_tokens: int
    input_tokens_details: CachedTokensView
    output_tokens: int
    output_tokens_details: ReasoningTokensView
    total_tokens: int
    cost: ExactUsd


class OutputTextView(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[LogprobView]


class OutputMessageView(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: str
    content: list[OutputTextView]


class ReasoningTextView(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoningView(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[dict[str, Any]]
    content: list[ReasoningTextView]
    status: str


class OutputCallView(TypedDict):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: str


OutputView: TypeAlias = OutputReasoningView | OutputMessageView | OutputCallView


class ResponseErrorView(TypedDict):
    code: str
    message: str


class IncompleteView(TypedDict):
    reason: str


class ReasoningView(TypedDict):
    effort: str | None
    summary: str | None


class AskedView(TypedDict):
    """The part of a response that repeats its request."""

    background: bool
    instructions: Any
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningView
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: str


class ResponseView(AskedView):
    """OpenAI's response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: str
    model: str
    metadata: dict[str, str]
    output: list[OutputView]
    error: ResponseErrorView | None
    incomplete_details: IncompleteView | None
    usage: ResponseUsageView | None
    completed_at: NotRequired[int]


_STATUS: Final = {"queued": "queued", "running": "in_progress", "cancelled": "cancelled"}


def response_id(request_id: str) -> str:
    return f"resp_{request_id.removeprefix('req_')}"


def request_id_of(response_id: str) -> str:
    return f"req_{response_id.removeprefix('resp_')}"


def status_of(found: OpenRequest | ClosedRequest) -> tuple[str, str | None]:
    """Return the status in OpenAI's terms, and the reason if it is incomplete."""
    if isinstance(found, ClosedRequest):
        if (cut := cut_reason(found)) is not None:
            return "incomplete", "max_output_tokens" if cut == "length" else cut
        if found.status == "succeeded":
            reasons = {choice.finish_reason for choice in choices_of(found)}
            if "content_filter" in reasons:
                return "incomplete", "content_filter"
            return (
                ("incomplete", "max_output_tokens") if "length" in reasons else ("completed", None)
            )
    return _STATUS.get(found.status, "failed"), None


def response_view(
    found: OpenRequest | ClosedRequest, body: ResponseBody | None = None
) -> ResponseView:
    """Return a response. It repeats the body only when created: bodies are not stored."""
    status, incomplete = status_of(found)
    closed = found if isinstance(found, ClosedRequest) else None
    view: ResponseView = {
        **_request_view(body),  # type: ignore[typeddict-item]  # optional fields are added below
        "id": response_id(found.request_id),
        "object": "response",
        "created_at": int(found.accepted_at.timestamp()),
        "status": status,
        "model": found.model,
        "metadata": dict(found.metadata),
        "output": [] if closed is None else output_items(closed),
        "error": None,
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "usage": None,
    }
    if closed is not None:
        view["completed_at"] = int(closed.settled_at.timestamp())
        if closed.outcome == "charged":
            used = closed.usage
            view["usage"] = responses_usage(
                used.input_tokens,
                used.cached_input_tokens,
                used.output_tokens,
                cost_nanos=closed.cost_nanos,
                reasoning_tokens=reasoning_tokens(choices_of(closed)),
            )
        if status == "failed":
            view["error"] = {
                "code": closed.error.code if closed.error else closed.status,
                "message": closed.error.message
                if closed.error
                else f"The request ended as {closed.status} ({closed.reason}).",
            }
    return view


def _request_view(body: ResponseBody | None) -> AskedView:
    choice: Any = "auto"
    if body is not None and body.tool_choice is not None:
        choice = body.tool_choice
        if isinstance(choice, FlatChoice):
            choice = choice.model_dump()
    given = body.model_dump(by_alias=True, exclude_none=True) if body is not None else {}
    return {
        "background": bool(given.get("background")),
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": given.get("store", True),
        "temperature": given.get("temperature"),
        "text": given.get("text") or {"format": {"type": "text"}},
        "tool_choice": choice,
        "tools": [{"strict": False, "parameters": None, **tool} for tool in given.get("tools", ())],
        "top_p": given.get("top_p"),
        "truncation": "disabled",
    }


def responses_usage(
    input_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    *,
    cost_nanos: int,
    reasoning_tokens: int = 0,
) -> ResponseUsageView:
    prompt = input_tokens + cached_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt + output_tokens,
        "cost": exact_number(cost_nanos),
    }


def output_items(closed: ClosedRequest) -> list[OutputView]:
    status, _ = status_of(closed)
    done = "completed" if status == "completed" else "incomplete"
    return [
        item for choice in choices_of(closed) for item in _items(closed.request_id, choice, done)
    ]


def _items(request_id: str, choice: Choice, status: str) -> Iterator[OutputView]:
    if choice.reasoning:
        yield _thoughts(request_id, status, choice.reasoning)
    if choice.text or not (choice.tool_calls or choice.reasoning):
        part = _part(choice.text, choice.logprobs)
        yield _message(request_id, status, [part])
    for call in choice.tool_calls:
        yield _call(call, call.arguments, status)


def _thoughts(request_id: str, status: str, text: str) -> OutputReasoningView:
    return {
        "id": f"rs_{request_id.removeprefix('req_')}",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
        "status": status,
    }


def _message(request_id: str, status: str, content: list[OutputTextView]) -> OutputMessageView:
    return {
        "id": f"msg_{request_id.removeprefix('req_')}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _part(text: str, logprobs: Sequence[TokenLogprob] | None = None) -> OutputTextView:
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": [logprob_view(token) for token in logprobs or ()],
    }


def _call(call: ToolCall, arguments: str, status: str) -> OutputCallView:
    return {
        "id": f"fc_{call.id.removeprefix('call_')}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
        "status": status,
    }


class EventWriter:
    """Writes text deltas as OpenAI's events of a response, numbered from 0.

    Events up to ``after`` are counted but not written, for a client that reconnects.
    """

    def __init__(self, opened: OpenRequest, body: ResponseBody | None, after: int = -1) -> None:
        self._request_id = opened.request_id
        self._opened = opened
        self._body = body
        self._after = after
        self._number = 0
        self._items = 0
        self._text: str | None = None
        """Text of the open message, or None."""
        self._thought: str | None = None
        """Text of the open reasoning item, or None."""
        self._stream = TextStream(opened.request_id)

    def begin(self) -> bytes:
        view = response_view(self._opened, self._body)
        return self._event("response.created", response=view) + self._event(
            "response.in_progress", response={**view, "status": "in_progress"}
        )

    def write(self, sent: SentEvent) -> bytes:
        delta = self._stream.receive(sent)
        return b"" if delta is None else self._write_delta(delta)

    def finish(self, closed: ClosedRequest) -> bytes:
        """Return the end of the open message and of the response."""
        choices = choices_of(closed)
        data = b"".join(self._write_delta(delta) for delta in self._stream.rest(choices))
        status, _ = status_of(closed)
        done = "completed" if status == "completed" else "incomplete"
        data += self._close_thoughts(done)
        if choices and not self._items and self._text is None:
            data += self._write_text("")
        data += self._close_message(done)
        name = {"completed": "completed", "incomplete": "incomplete"}.get(status, "failed")
        view = response_view(closed, self._body)
        # A client that reconnects after its event log expired may name an event beyond the last
        # one that exists now.
        self._after = min(self._after, self._number - 1)
        return data + self._event(f"response.{name}", response=view)

    def fail(self, error: RequestFailed) -> bytes:
        return event_data({"type": "error", **render_openai(error)["error"]}, name="error")

    def _write_delta(self, delta: TextDelta) -> bytes:
        data = self._write_thoughts(delta.reasoning) if delta.reasoning else b""
        if delta.text or delta.calls:
            data += self._close_thoughts("completed")
        data += self._write_text(delta.text, delta.logprobs) if delta.text else b""
        for call in delta.calls:
            data += self._close_message("completed") + self._write_call(call)
        return data

    def _write_thoughts(self, text: str) -> bytes:
        data = self._close_message("completed")
        if self._thought is None:
            item = _thoughts(self._request_id, "in_progress", "")
            data += self._event("response.output_item.added", output_index=self._items, item=item)
            self._thought = ""
        self._thought += text
        position = {**self._position(), "item_id": f"rs_{self._request_id.removeprefix('req_')}"}
        return data + self._event("response.reasoning_text.delta", **position, delta=text)

    def _close_thoughts(self, status: str) -> bytes:
        if self._thought is None:
            return b""
        text, self._thought = self._thought, None
        item = _thoughts(self._request_id, status, text)
        position = {**self._position(), "item_id": item["id"]}
        data = self._event("response.reasoning_text.done", **position, text=text)
        data += self._event("response.output_item.done", output_index=self._items, item=item)
        self._items += 1
        return data

    def _write_text(self, text: str, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        data = b""
        position = self._position()
        if self._text is None:
            item = _message(self._request_id, "in_progress", [])
            data += self._event("response.output_item.added", output_index=self._items, item=item)
            data += self._event("response.content_part.added", **position, part=_part(""))
            self._text = ""
        self._text += text
        if text:
            views = [logprob_view(token) for token in logprobs or ()]
            data += self._event(
                "response.output_text.delta", **position, delta=text, logprobs=views
            )
        return data

    def _close_message(self, status: str) -> bytes:
        if self._text is None:
            return b""
        text, self._text = self._text, None
        position, part = self._position(), _part(text)
        data = self._event("response.output_text.done", **position, text=text, logprobs=[])
        data += self._event("response.content_part.done", **position, part=part)
        item = _message(self._request_id, status, [part])
        data += self._event("response.output_item.done", output_index=self._items, item=item)
        self._items += 1
        return data

    def _write_call(self, call: ToolCall) -> bytes:
        opened, done = _call(call, "", "in_progress"), _call(call, call.arguments, "completed")
        position = {"item_id": opened["id"], "output_index": self._items}
        data = self._event("response.output_item.added", output_index=self._items, item=opened)
        data += self._event(
            "response.function_call_arguments.delta", **position, delta=call.arguments
        )
        data += self._event(
            "response.function_call_arguments.done",
            **position,
            name=call.name,
            arguments=call.arguments,
        )
        data += self._event("response.output_item.done", output_index=self._items, item=done)
        self._items += 1
        return data

    def _position(self) -> dict[str, Any]:
        id = f"msg_{self._request_id.removeprefix('req_')}"
        return {"item_id": id, "output_index": self._items, "content_index": 0}

    def _event(self, kind: str, /, **content: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        if number <= self._after:
            return b""
        return event_data({"type": kind, "sequence_number": number, **content}, name=kind)

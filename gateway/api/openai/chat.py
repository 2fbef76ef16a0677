"""OpenAI's chat completions: body, answer and stream, translated to and from one request.

Has no part in the request's lifecycle. Answers carry ``usage.cost`` as a JSON number with exact
digits, so that reading it as a decimal gives the charge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

from litestar import Controller, Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from pydantic import ConfigDict, Field

from gateway.api.http.answering import StreamOptions, answer, to_submission, wants_usage
from gateway.api.http.answers import DONE, UsageView, encode_json, event_data, openai_usage
from gateway.api.http.bodies import read_body, refuse_in_batch
from gateway.api.http.content_types import EVENTS
from gateway.api.http.fields import ModelName, Refused, refused
from gateway.api.http.request import ApiRequest
from gateway.api.http.text_stream import (
    LogprobView,
    TextDelta,
    TextStream,
    choices_of,
    cut_reason,
    logprob_view,
    reasoning_tokens,
)
from gateway.api.openrouter.bodies import OpenRouterOptions, first_served
from gateway.batches.endpoint import BatchEndpoint, Entries
from gateway.errors import InvalidRequest, RequestFailed, render_openai
from gateway.ledger.closed import ClosedRequest
from gateway.requests.ticket import Ticket, raise_unless_succeeded
from gateway.tasks.submission import Submission
from gateway.tasks.text import TextGeneration
from workers.contract.jobs import Choice, SentEvent, TokenLogprob, Tokens, ToolCall

TASK: Final = "text-generation"
_USE_TOOLS: Final = refused("is not supported by the models served here; use tools.")


class ChatCompletion(TextGeneration, OpenRouterOptions):
    """Body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "pocket-chat",
                    "messages": [{"role": "user", "content": "What is a hold?"}],
                    "max_tokens": 64,
                }
            ]
        },
    )

    model: ModelName | None = None
    """Optional if ``models``, OpenRouter's list of fallbacks, is sent."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

    # Accepted without effect: labels for the client's own use, and caching hints.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    # Known but refused: ignoring them would change the answer without notice.
    functions: Annotated[list[Any] | None, _USE_TOOLS] = None
    function_call: Annotated[Any | None, _USE_TOOLS] = None
    modalities: list[str] | None = None
    audio: Refused[Any] = None
    prediction: Refused[Any] = None
    reasoning_effort: str | None = None
    web_search_options: Refused[Any] = None

    @property
    def names(self) -> list[str]:
        """Requested models in order of preference. Raise ``InvalidRequest`` if there is none."""
        named = [name for name in (self.model, *(self.models or ())) if name is not None]
        if not named:
            raise InvalidRequest(
                "missing_required_parameter", "Missing required parameter: model.", param="model"
            )
        return named

    def generation(self) -> TextGeneration:
        """Return the task's input. Raise ``InvalidRequest`` for options that are not supported."""
        self.refuse_unsupported()
        if self.reasoning_effort not in (None, "none"):
            raise InvalidRequest(
                "unsupported_parameter",
                f"reasoning_effort is {self.reasoning_effort!r}; how much a model thinks cannot "
                'be chosen here, so only "none" is accepted.',
                param="reasoning_effort",
            )
        if self.modalities not in (None, ["text"]):
            raise InvalidRequest(
                "unsupported_parameter",
                f'modalities is {self.modalities}; only ["text"] is supported.',
                param="modalities",
            )
        return self


class CalledFunctionView(TypedDict):
    name: str
    arguments: str


class ToolCallView(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunctionView


class MessageView(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallView]]


class LogprobsView(TypedDict):
    content: list[LogprobView]
    refusal: None


class ChoiceView(TypedDict):
    index: int
    message: MessageView
    finish_reason: str
    logprobs: LogprobsView | None


class ChatCompletionView(TypedDict):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChoiceView]
    usage: UsageView


class ChatController(Controller):
    path = "/v1/chat"
    tags = ["OpenAI"]
    opt = {"scope": "inference", "holds": True}

    @post(
        "/completions",
        status_code=200,
        opt={"media": [EVENTS], "direct": True},
        operation_id="CreateChatCompletion",
        summary="Answer a conversation, in one response or as a stream",
    )
    async def create(
        self, request: ApiRequest, data: JSONBody[ChatCompletion]
    ) -> Response[ChatCompletionView] | Stream:
        include_usage = wants_usage(data.stream_options, stream=data.stream)
        submission = await to_submission(
            request,
            model=_chosen_model(request, data),
            task=TASK,
            input=data.generation(),
            stream=bool(data.stream),
            metadata=data.metadata,
        )
        return await answer(
            request,
            submission,
            completion_view,
            lambda ticket: ChunkWriter(ticket, include_usage=include_usage),
        )


def batch_submission(body: Mapping[str, Any], _: Entries) -> Submission:
    """Check one body of a batch, which cannot be streamed."""
    data = read_body(ChatCompletion, body)
    refuse_in_batch(data, "stream", "stream_options")
    return Submission(
        model=data.names[0], task=TASK, input=data.generation(), metadata=data.metadata
    )


def _chosen_model(request: ApiRequest, data: ChatCompletion) -> str:
    """Return the first requested model that is served.

    Raise ``InvalidRequest`` if it costs more than the client's maximum price.
    """
    named = data.names
    name = named[0] if len(named) == 1 else first_served(named, request.services.requests.is_served)
    if data.provider is not None:
        data.check_max_price(request.services.requests.quotes.entry(name, request.key.account_id))
    return name


def completion_view(closed: ClosedRequest) -> ChatCompletionView:
    choices = choices_of(closed)
    return {
        "id": closed.request_id,
        "object": "chat.completion",
        "created": int(closed.accepted_at.timestamp()),
        "model": closed.model,
        "system_fingerprint": None,
        "choices": [
            {
                "index": choice.index,
                "message": _message(choice),
                "finish_reason": choice.finish_reason,
                "logprobs": _logprobs(choice.logprobs),
            }
            for choice in choices
        ],
        "usage": _usage(closed, choices),
    }


BATCHES: Final = BatchEndpoint(
    "/v1/chat/completions",
    read=batch_submission,
    answer=lambda closed, _: encode_json(completion_view(closed)),
)


def _usage(closed: ClosedRequest, choices: Sequence[Choice]) -> UsageView:
    return openai_usage(closed.usage, closed.cost_nanos, reasoning_tokens(choices))


def _message(choice: Choice) -> MessageView:
    message: MessageView = {
        "role": "assistant",
        "content": choice.text or (None if choice.tool_calls else ""),
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [_call(call) for call in choice.tool_calls]
    return message


def _call(call: ToolCall) -> ToolCallView:
    function: CalledFunctionView = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class TextWriter(ABC):
    """Writes text deltas as data events that share one envelope; subclasses write their choices."""

    def __init__(self, ticket: Ticket, object: str, *, include_usage: bool) -> None:
        self._envelope = {
            "id": ticket.request_id,
            "object": object,
            "created": int(ticket.accepted_at.timestamp()),
            "model": ticket.model,
        }
        self._include_usage = include_usage
        self._stream = TextStream(ticket.request_id)
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def write(self, sent: SentEvent) -> bytes:
        """Return the chunks for an event, or ``b""``."""
        event = sent.event
        if type(event) is Tokens and self._stream.appends(sent, event):
            return self._text_event(event.index, event.text)
        delta = self._stream.receive(sent)
        return b"" if delta is None else self._write_delta(delta)

    def finish(self, closed: ClosedRequest) -> bytes:
        """Return the remaining text, finish reasons and usage."""
        cut = cut_reason(closed)
        if cut is None:
            raise_unless_succeeded(closed)
        choices = choices_of(closed)
        parts = [self._write_delta(delta) for delta in self._stream.rest(choices)]
        reasons = {choice.index: cut or choice.finish_reason for choice in choices}
        parts += self._end(reasons, _usage(closed, choices))
        return b"".join(parts) + DONE

    def fail(self, error: RequestFailed) -> bytes:
        return event_data(render_openai(error)) + DONE

    def _text_event(self, index: int, text: str) -> bytes:
        """Return ``_write_text``, of which only the text differs between events."""
        frame = self._frames.get(index)
        if frame is None:
            # No other text of an event contains this character.
            head, _, tail = self._write_text(index, "\0").partition(encode_json("\0"))
            frame = self._frames[index] = head, tail
        return b"%b%b%b" % (frame[0], encode_json(text), frame[1])

    def _event(self, **content: Any) -> bytes:
        return event_data({**self._envelope, **content})

    @abstractmethod
    def _write_delta(self, delta: TextDelta) -> bytes:
        """Return the chunks for a delta."""

    @abstractmethod
    def _write_text(self, index: int, text: str) -> bytes:
        """Return the chunk for text without log probabilities."""

    @abstractmethod
    def _end(self, reasons: Mapping[int, str], usage: UsageView) -> Iterator[bytes]:
        """Yield the chunks that end each choice, by its index, and those with the usage."""


class ChunkWriter(TextWriter):
    """Writes chunks of a chat completion."""

    def __init__(self, ticket: Ticket, *, include_usage: bool) -> None:
        super().__init__(ticket, "chat.completion.chunk", include_usage=include_usage)

    def _write_delta(self, delta: TextDelta) -> bytes:
        chunks = b""
        if delta.is_first:
            chunks += self._chunk([_delta(delta.index, {"role": "assistant", "content": ""})])
        if delta.reasoning:
            reasoning = {"reasoning_content": delta.reasoning}
            chunks += self._chunk([_delta(delta.index, reasoning)])
        if delta.text and delta.logprobs is None:
            chunks += self._text_event(delta.index, delta.text)
        elif delta.text:
            content = _delta(
                delta.index, {"content": delta.text}, logprobs=_logprobs(delta.logprobs)
            )
            chunks += self._chunk([content])
        for number, call in enumerate(delta.calls, start=delta.first_call):
            calls = {"tool_calls": [{"index": number, **_call(call)}]}
            chunks += self._chunk([_delta(delta.index, calls)])
        return chunks

    def _write_text(self, index: int, text: str) -> bytes:
        return self._chunk([_delta(index, {"content": text})])

    def _end(self, reasons: Mapping[int, str], usage: UsageView) -> Iterator[bytes]:
        for place, (index, reason) in enumerate(reasons.items(), start=1):
            last = place == len(reasons) and not self._include_usage
            ended = _delta(index, {}, finish_reason=reason)
            yield self._chunk([ended], usage=usage if last else None)
        if self._include_usage:
            yield self._chunk([], usage=usage)

    def _chunk(self, choices: list[dict[str, Any]], usage: UsageView | None = None) -> bytes:
        if usage is None and not self._include_usage:
            return self._event(choices=choices)
        return self._event(choices=choices, usage=usage)


def _delta(
    index: int,
    delta: Mapping[str, Any],
    *,
    finish_reason: str | None = None,
    logprobs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "finish_reason": finish_reason,
        "logprobs": logprobs,
    }


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> LogprobsView | None:
    if tokens is None:
        return None
    return {"content": [logprob_view(token) for token in tokens], "refusal": None}

"""OpenAI's chat completions: body, answer and stream, translated to and from one request.

Holds no logic of the request's life. Answers carry ``usage.cost`` as a JSON number printed with its
exact digits, so that reading it as a decimal gives the charge.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from litestar import Controller, Request, Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.access import call_of
from gateway.api.answers import (
    encode_json,
    event_stream,
    json_response,
    openai_usage,
    request_headers,
)
from gateway.api.bodies import idempotency, is_retry, read_body, unnamed
from gateway.batches.endpoint import Endpoint
from gateway.errors import InvalidRequest, RequestFailed, render_openai
from gateway.ledger.closed import Closed
from gateway.ledger.extend import CAUSES
from gateway.requests.inputs import TextGeneration
from gateway.requests.lifecycle import Requests
from gateway.requests.order import Order
from gateway.requests.ticket import Ticket, raise_unless_succeeded
from workers.contract.jobs import SentEvent, Started, TokenLogprob, Tokens

TASK: Final = "text-generation"
KEEP_ALIVE_S: Final = 15.0


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatCompletion(TextGeneration):
    """Body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(
        extra="forbid",
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

    model: Annotated[str, Field(min_length=1, max_length=200)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

    # Understood and without effect here: labels for the caller's own use, and hints to a cache.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None

    # Known, and refused by name rather than ignored: the answer would not be what was asked for.
    tools: list[Any] | None = None
    tool_choice: Any | None = None
    functions: list[Any] | None = None
    function_call: Any | None = None
    modalities: list[str] | None = None
    audio: Any | None = None
    prediction: Any | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any | None = None

    REFUSED: ClassVar[tuple[str, ...]] = (
        "tools",
        "functions",
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
    )

    def generation(self) -> TextGeneration:
        """The part that the task itself understands."""
        for name in self.REFUSED:
            if getattr(self, name):
                raise InvalidRequest(
                    "unsupported_parameter",
                    f"{name} is not supported by the models served here; leave it out.",
                    param=name,
                )
        if self.modalities not in (None, ["text"]):
            raise InvalidRequest(
                "unsupported_parameter",
                f'modalities is {self.modalities}, but only ["text"] can be had.',
                param="modalities",
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "unsupported_parameter", "tool_choice needs tools.", param="tool_choice"
            )
        return self


class ChatController(Controller):
    path = "/v1/chat"
    tags = ["OpenAI"]
    opt = {"scope": "inference"}

    @post(
        "/completions",
        status_code=200,
        operation_id="CreateChatCompletion",
        summary="Answer a conversation, whole or as a stream",
    )
    async def create(
        self, request: Request[Any, Any, Any], data: JSONBody[ChatCompletion]
    ) -> Response[bytes] | Stream:
        if data.stream_options is not None and not data.stream:
            raise InvalidRequest(
                "invalid_value", "stream_options needs stream: true.", param="stream_options"
            )
        requests: Requests = request.app.state.requests
        order = Order(
            model=data.model,
            task=TASK,
            input=data.generation(),
            stream=bool(data.stream),
            metadata=data.metadata,
            idempotency=await idempotency(request),
            # Who leaves a stream has read a part of it and wants no more: that is not lost.
            fingerprint=None if data.stream else await unnamed(request),
            retried=is_retry(request),
        )
        ticket = await requests.submit(call_of(request), order)
        if data.stream:
            include_usage = data.stream_options is not None and data.stream_options.include_usage
            return event_stream(
                _stream(ticket, include_usage=include_usage),
                headers=request_headers(ticket.request_id),
            )
        with ticket:
            closed = await ticket.closed(request)
        raise_unless_succeeded(closed)
        return json_response(
            completion_view(closed), headers=request_headers(closed.request_id, closed)
        )


def batch_order(body: Mapping[str, Any]) -> Order:
    """Check a body as the endpoint does; nobody is there to read a stream."""
    data = read_body(ChatCompletion, body)
    for name in ("stream", "stream_options"):
        if getattr(data, name):
            raise InvalidRequest(
                "unsupported_parameter", f"{name} has no use in a batch; leave it out.", param=name
            )
    return Order(model=data.model, task=TASK, input=data.generation(), metadata=data.metadata)


def completion_view(closed: Closed) -> dict[str, Any]:
    return {
        "id": closed.request_id,
        "object": "chat.completion",
        "created": int(closed.accepted_at.timestamp()),
        "model": closed.model,
        "choices": [
            {
                "index": choice["index"],
                "message": {"role": "assistant", "content": choice["text"], "refusal": None},
                "finish_reason": choice["finish_reason"],
                "logprobs": _logprobs(choice.get("logprobs")),
            }
            for choice in _choices(closed)
        ],
        "usage": openai_usage(closed.usage, closed.cost_nanos),
    }


BATCHES: Final = Endpoint(
    "/v1/chat/completions",
    TASK,
    read=batch_order,
    answer=lambda closed: encode_json(completion_view(closed)),
)


def _choices(closed: Closed) -> Sequence[Mapping[str, Any]]:
    """The answers of a request, unless they have been kept for their time and dropped."""
    choices: Sequence[Mapping[str, Any]] = (
        closed.output.value.get("choices", ()) if closed.output is not None else ()
    )
    return choices


async def _stream(ticket: Ticket, *, include_usage: bool) -> AsyncIterator[bytes]:
    """The chunks of one answer; whatever ends this generator early cancels the request."""
    with ticket:
        writer = ChunkWriter(ticket, include_usage=include_usage)
        try:
            async for sent in ticket.events(KEEP_ALIVE_S):
                if sent is None:
                    yield b": keep-alive\n\n"
                elif chunks := writer.write(sent):
                    yield chunks
            yield writer.finish(ticket.result)
        except RequestFailed as error:
            yield _data(render_openai(error))
        yield b"data: [DONE]\n\n"


class ChunkWriter:
    """Turns events into chunks, without repeating or skipping a character.

    After a crash the next attempt says the same again, because every job carries its seed: what was
    already sent is passed over. Whatever events were missed is made up from the final output.
    """

    def __init__(self, ticket: Ticket, *, include_usage: bool) -> None:
        self._envelope = {
            "id": ticket.request_id,
            "object": "chat.completion.chunk",
            "created": int(ticket.accepted_at.timestamp()),
            "model": ticket.model,
        }
        self._include_usage = include_usage
        self._attempt = 0
        self._sent: dict[int, str] = {}
        self._heard: dict[int, str] = {}
        self._next_seq = 1
        self._whole = True

    def write(self, sent: SentEvent) -> bytes:
        """Give the chunks that an event makes, if any."""
        if sent.attempt < self._attempt:
            return b""
        if sent.attempt > self._attempt:
            self._attempt, self._next_seq, self._whole = sent.attempt, 1, True
            self._heard.clear()
        if sent.seq != self._next_seq:
            self._whole = False
        self._next_seq = sent.seq + 1
        event = sent.event
        if not self._whole or isinstance(event, Started) or not isinstance(event, Tokens):
            return b""
        heard = self._heard.get(event.index, "") + event.text
        self._heard[event.index] = heard
        return self._advance(event.index, heard, event.logprobs)

    def finish(self, closed: Closed) -> bytes:
        """Give what is left: missed text, finish reasons, usage. Raise what made it fail."""
        cut = closed.reason if closed.reason in CAUSES else None
        if cut is None:
            raise_unless_succeeded(closed)
        usage = openai_usage(closed.usage, closed.cost_nanos)
        choices = _choices(closed)
        parts: list[bytes] = []
        for place, choice in enumerate(choices, start=1):
            parts.append(self._advance(choice["index"], choice["text"], None))
            last = place == len(choices) and not self._include_usage
            parts.append(
                self._chunk(
                    [_delta(choice["index"], {}, finish_reason=cut or choice["finish_reason"])],
                    usage=usage if last else None,
                )
            )
        if self._include_usage:
            parts.append(self._chunk([], usage=usage))
        return b"".join(parts)

    def _advance(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Send what of a choice's text so far is not out yet."""
        sent = self._sent.get(index)
        prefix = b""
        if sent is None:
            sent = ""
            prefix = self._chunk([_delta(index, {"role": "assistant", "content": ""})])
        if len(text) <= len(sent):
            self._sent.setdefault(index, sent)
            return prefix
        if not text.startswith(sent):
            raise RequestFailed(
                "stream_diverged",
                "The worker was lost and its successor gave another text; fetch the whole "
                "answer by the request's id.",
                request_id=str(self._envelope["id"]),
            )
        self._sent[index] = text
        delta = _delta(index, {"content": text[len(sent) :]}, logprobs=_logprobs(logprobs))
        return prefix + self._chunk([delta])

    def _chunk(
        self, choices: list[dict[str, Any]], usage: Mapping[str, Any] | None = None
    ) -> bytes:
        chunk: dict[str, Any] = {**self._envelope, "choices": choices}
        if usage is not None:
            chunk["usage"] = usage
        elif self._include_usage:
            chunk["usage"] = None
        return _data(chunk)


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


def _logprobs(tokens: Sequence[Any] | None) -> dict[str, Any] | None:
    """OpenAI's shape, from structs of the wire or from a stored output."""
    if tokens is None:
        return None
    return {
        "content": [
            {
                **_token(token["text"], token["logprob"]),
                "top_logprobs": [_token(text, logprob) for text, logprob in token["top"]],
            }
            for token in (_as_mapping(token) for token in tokens)
        ],
        "refusal": None,
    }


def _as_mapping(token: Any) -> Mapping[str, Any]:
    if isinstance(token, TokenLogprob):
        return {"text": token.text, "logprob": token.logprob, "top": token.top}
    mapping: Mapping[str, Any] = token
    return mapping


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _data(body: Mapping[str, Any]) -> bytes:
    return b"data: " + encode_json(body) + b"\n\n"

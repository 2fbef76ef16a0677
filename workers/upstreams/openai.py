"""Chat completions of an OpenAI-compatible service (vLLM, SGLang, llama-server, OpenAI itself).

The response is always streamed, with usage, unless the entry has ``stream: false``. So a job is
cancelled by closing the connection, and an unresponsive upstream is detected. A call is retried
only if it was refused as busy or not sent at all, because a request that was sent may be charged.
Usage is taken from the upstream. The credential is used in one header and nowhere else.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from typing import Any, Final, Literal

import msgspec

from workers.contract.jobs import (
    ChatInput,
    ChatMessage,
    Choice,
    Completed,
    Event,
    Failed,
    FinishReason,
    Job,
    TokenLogprob,
    Tokens,
    ToolCall,
    Usage,
)
from workers.contract.models import ModelSpec
from workers.protocol.engine import PhaseClock
from workers.upstreams import wire
from workers.upstreams.connections import (
    ExchangeError,
    NotConnectedError,
    NotSentError,
    Response,
)
from workers.upstreams.endpoints import Endpoint, Endpoints
from workers.upstreams.notes import NO_NOTES, Notes
from workers.upstreams.retries import (
    BUSY_PAUSE_S,
    RETRY_AFTER_MAX_S,
    EndpointBusyError,
    NoEndpointError,
    retry_after_s,
    try_endpoints,
)
from workers.upstreams.sse import TooLong, read_events, read_whole

log = logging.getLogger(__name__)

RESPONSE_BYTES_MAX: Final = 16 * 1024 * 1024
ERROR_BYTES_MAX: Final = 64 * 1024
MESSAGE_CHARS_MAX: Final = 300
"""Maximum length of an upstream's error message that is passed on."""
BYTES_PER_TOKEN: Final = 4
"""Approximation for English, for an input that the upstream did not count."""
CLOSING_S: Final = 1.0
"""Time for a complete response to end, so that its connection can be reused."""

_BUSY: Final = frozenset({429, 502, 503})
"""Statuses of calls that were refused without producing anything."""
_NOT_STARTED: Final = (EndpointBusyError, NotConnectedError, NotSentError)
_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "length": "length",
    "content_filter": "content_filter",
}
"""Reasons that are passed on. Tool calls are detected by content; any other reason means stop."""
_PLAIN_FIELDS: Final = (
    *("n", "temperature", "top_p", "top_k", "min_p", "stop", "response_format"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
)
"""Fields sent under the same name if they differ from the default."""
_DEFAULTS: Final = ChatInput(messages=(), max_tokens=0)


class Options(msgspec.Struct, frozen=True):
    """Options of the catalog entry."""

    stream: bool = True
    omit: tuple[str, ...] = ()
    """Fields of the request body that the upstream does not accept, such as ``seed``."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    usage: Literal["required", "estimated"] = "required"
    """Handling of a response without usage: fail, or count each chunk of text as one output token
    and every four bytes of the messages as one input token."""


class OpenAI:
    """The client of one catalog entry; its connections are shared by all jobs."""

    def __init__(self, spec: ModelSpec, environ: Mapping[str, str]) -> None:
        assert spec.upstream is not None
        self.upstream = spec.upstream
        self.options = self.read_options(spec)
        self.source_tokens: int = spec.limits.get("source_tokens") or 0
        """Tokens of a picture that the upstream did not count."""
        self.endpoints = Endpoints(spec.upstream, spec.name, environ)

    @staticmethod
    def read_options(spec: ModelSpec) -> Options:
        """Raise ``ValueError`` if an option is invalid."""
        try:
            return msgspec.convert(spec.options, Options)
        except msgspec.ValidationError as error:
            raise ValueError(f"invalid options: {error}") from error

    @property
    def is_down(self) -> bool:
        return self.endpoints.down

    def call(
        self,
        job: Job,
        send_event: Callable[[Event], None],
        files: Sequence[bytes] = (),
        notes: Notes = NO_NOTES,
    ) -> ChatCall:
        """Raise ``msgspec.ValidationError`` if the job is not a text generation."""
        return ChatCall(self, job, send_event, files)

    async def close(self) -> None:
        await self.endpoints.close()


class ChatCall:
    """One chat completion or text completion."""

    _failure_recorded = False
    """Whether the failure has already been recorded at the endpoint."""

    def __init__(
        self,
        client: OpenAI,
        job: Job,
        send_event: Callable[[Event], None],
        files: Sequence[bytes] = (),
    ) -> None:
        self._client = client
        self._job = job
        self._files = files
        self._has_files = bool(files)
        self._chat = msgspec.convert(job.input, ChatInput)
        self._send_event = send_event
        self._endpoint: Endpoint | None = None
        self._texts = [""] * self._chat.choices
        self._reasoning = [""] * self._chat.choices
        self._calls: list[dict[int, ToolCall]] = [{} for _ in self._texts]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in self._texts]
        self._finished: list[FinishReason | None] = [None] * self._chat.choices
        self._chunks = 0
        self._started_choices: set[int] = set()
        """Choices with at least one event."""
        self._usage: wire.WireUsage | None = None
        self._complete = False

    async def run(self, clock: PhaseClock) -> Completed | Failed:
        with clock.phase("preprocess"):
            body = await asyncio.to_thread(self._body) if self._has_files else self._body()
            self._files = ()
        failure = await self._exchange(body, clock)
        if failure is not None:
            return failure
        usage = self._usage_of(estimate=self._client.options.usage == "estimated")
        if usage is None:
            return _failed("The upstream reported no usage.")
        return Completed(usage=usage, output=self._output())

    @property
    def endpoint(self) -> str:
        return "" if self._endpoint is None else self._endpoint.host

    @property
    def served_by(self) -> str:
        return "" if self._endpoint is None else self._endpoint.label

    async def handover_ready(self) -> None:
        """Return immediately: an interrupted call is made again from the beginning."""

    def stop(self) -> None:
        """Do nothing: the upstream stops when the connection is closed."""

    def partial_result(self) -> tuple[Usage, dict[str, Any]]:
        return self._usage_of(estimate=True) or Usage(), self._output()

    async def _exchange(self, body: dict[str, Any], clock: PhaseClock) -> Failed | None:
        """Send the request and read the response. Translate errors, and record them at the
        endpoint."""
        try:
            failure = await self._try_exchange(body, clock)
        finally:
            endpoint = self._endpoint
            if endpoint is not None:
                endpoint.in_flight -= 1
        if endpoint is not None:
            if failure is None or failure.code in ("upstream_rejected", "context_length_exceeded"):
                endpoint.succeeded()
            elif not self._failure_recorded:
                endpoint.failed()
        return failure

    async def _try_exchange(self, body: dict[str, Any], clock: PhaseClock) -> Failed | None:
        upstream = self._client.upstream
        try:
            async with asyncio.timeout(upstream.first_byte_timeout_s) as timer:
                with clock.phase("transfer"):
                    response = await self._send(body)
                body.clear()  # no retry follows, and the response can take minutes
                with closing(response):
                    if response.status != HTTPStatus.OK:
                        return await self._refused(response)
                    with clock.phase("forward"):
                        return await self._read(response, timer)
        except NotSentError:
            return Failed("upstream_unavailable", "The connections to the upstream were lost.")
        except NoEndpointError:
            return Failed("upstream_unavailable", "No upstream endpoint is available.")
        except NotConnectedError:
            return Failed("upstream_unavailable", "The upstream is unreachable.")
        except EndpointBusyError as busy:
            return Failed("upstream_unavailable", f"The upstream is busy ({busy}).")
        except TimeoutError:
            if self._complete:
                return None
            return Failed(
                "upstream_timeout",
                f"The upstream did not respond within {upstream.first_byte_timeout_s:g} s, "
                f"or paused for more than {upstream.idle_timeout_s:g} s.",
            )
        except TooLong:
            return Failed(
                "output_too_large", f"The upstream sent more than {RESPONSE_BYTES_MAX} bytes."
            )
        except msgspec.DecodeError:
            return _failed("The upstream sent an invalid chat completion.")
        except ExchangeError:
            return _failed("The upstream closed the connection before the end of its response.")

    # --- Request ----------------------------------------------------------------------------------

    def _body(self) -> dict[str, Any]:
        """Return the request body without ``model``, which depends on the endpoint."""
        chat, options = self._chat, self._client.options
        body: dict[str, Any] = {options.max_tokens_field: chat.max_tokens, "seed": chat.seed}
        if chat.prompts:
            body["max_tokens"] = body.pop(options.max_tokens_field)
            body |= {"prompt": chat.prompts if len(chat.prompts) > 1 else chat.prompts[0]}
            body |= {"echo": True} if chat.echo else {}
            body |= {"logprobs": chat.top_logprobs} if chat.logprobs else {}
        else:
            body["messages"] = [self._message(message) for message in chat.messages]
            body |= {"logprobs": True} if chat.logprobs else {}
            body |= {"top_logprobs": chat.top_logprobs} if chat.top_logprobs else {}
        if chat.tools:
            body |= _tools(chat)
        for name in _PLAIN_FIELDS:
            value = getattr(chat, name)
            if value != getattr(_DEFAULTS, name):
                body[name] = value
        if options.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        for name in options.omit:
            body.pop(name, None)
        return body

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        wire_message = _message(message)
        if message.parts:
            wire_message["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else self._picture(part)
                for part in message.parts
            ]
        return wire_message

    def _picture(self, number: int) -> dict[str, Any]:
        kind = self._job.attachments[number].content_type
        data = base64.b64encode(self._files[number]).decode()
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}

    async def _send(self, body: dict[str, Any]) -> Response:
        """Return a response that has started. Until then retry, preferably at another endpoint."""

        async def attempt(endpoint: Endpoint) -> Response:
            return await self._send_once(endpoint, {"model": endpoint.model, **body})

        return await try_endpoints(
            self._client.endpoints, attempt, retried=_NOT_STARTED, key=self._job.drawn_by
        )

    async def _send_once(self, endpoint: Endpoint, body: dict[str, Any]) -> Response:
        if self._endpoint is not None:
            self._endpoint.in_flight -= 1
        self._endpoint, self._failure_recorded = endpoint, False
        endpoint.in_flight += 1
        path = "completions" if self._chat.prompts else "chat/completions"
        encode = msgspec.json.encode
        # Pictures take milliseconds, in which no other job would get its tokens.
        data = await asyncio.to_thread(encode, body) if self._has_files else encode(body)
        try:
            response = await endpoint.connections.open("POST", path, data)
        except ExchangeError:
            endpoint.failed()
            self._failure_recorded = True
            raise
        if response.status in _BUSY:
            response.close()
            requested_s = retry_after_s(response.headers)
            self._failure_recorded = True
            if response.status == HTTPStatus.TOO_MANY_REQUESTS:
                endpoint.pause(min(requested_s or BUSY_PAUSE_S, RETRY_AFTER_MAX_S))
            else:
                endpoint.failed()
            raise EndpointBusyError(response.status, requested_s)
        return response

    # --- Response ---------------------------------------------------------------------------------

    async def _read(self, response: Response, timer: asyncio.Timeout) -> Failed | None:
        if not self._client.options.stream:
            body = await read_whole(response.chunks(), RESPONSE_BYTES_MAX)
            return self._apply(wire.decode_answer(body))
        now_s = asyncio.get_running_loop().time
        async for data in read_events(response.chunks(), RESPONSE_BYTES_MAX):
            if data == b"[DONE]":
                self._complete = True
                timer.reschedule(now_s() + CLOSING_S)
            elif not self._complete:
                timer.reschedule(now_s() + self._client.upstream.idle_timeout_s)
                if failure := self._apply(wire.decode_answer(data)):
                    return failure
        if not self._complete and None in self._finished:
            return _failed("The upstream closed the connection before the end of its response.")
        return None

    def _apply(self, answer: wire.WireAnswer) -> Failed | None:
        if answer.error is not None:
            return self._explain(answer.error, "upstream_error")
        self._usage = answer.usage or self._usage
        for choice in answer.choices:
            if choice.index >= len(self._texts):
                raise msgspec.ValidationError("unexpected choice")
            self._apply_choice(choice)
        return None

    def _apply_choice(self, choice: wire.WireChoice) -> None:
        index = choice.index
        part = choice.delta or choice.message
        text = choice.text or (part.content if part else None) or ""
        reasoning = (part.reasoning_content or part.reasoning or "") if part else ""
        for call in (part.tool_calls if part else None) or ():
            self._merge_call(index, call)
        logprobs = wire.read_logprobs(choice.logprobs) if self._chat.logprobs else None
        finish_reason: FinishReason | None = None
        made: tuple[ToolCall, ...] = ()
        if choice.finish_reason is not None:
            made = tuple(self._calls[index].values())
            finish_reason = _FINISH_REASONS.get(choice.finish_reason, "stop")
            finish_reason = "tool_calls" if made else finish_reason
        if not (text or reasoning or logprobs) and finish_reason is None:
            return
        count = len(logprobs) if logprobs else int(bool(text or reasoning or made))
        self._chunks += count
        self._texts[index] += text
        self._reasoning[index] += reasoning
        self._logprobs[index] += logprobs or ()
        self._finished[index] = finish_reason or self._finished[index]
        read = None
        if self._job.stream and index not in self._started_choices:
            self._started_choices.add(index)
            read = self._usage_of(estimate=True)
        self._send_event(Tokens(index, text, count, logprobs, finish_reason, made, reasoning, read))

    def _merge_call(self, index: int, piece: wire.WireToolCall) -> None:
        """Assemble a tool call. Its parts share an index; a complete call may have none."""
        calls = self._calls[index]
        number = len(calls) if piece.index is None else piece.index
        earlier = calls.get(number, ToolCall("", "", ""))
        calls[number] = ToolCall(
            piece.id or earlier.id or f"call_{self._job.request_id[4:20]}{index}{number}",
            earlier.name + (piece.function.name or ""),
            earlier.arguments + (piece.function.arguments or ""),
        )

    async def _refused(self, response: Response) -> Failed:
        status = response.status
        error = wire.decode_error(await read_whole(response.chunks(), ERROR_BYTES_MAX))
        if status in (400, 413, 422):
            return self._explain(error, "upstream_rejected")
        log.error("upstream refused a call", extra={"model": self._job.model, "status": status})
        if status in (401, 403):
            return Failed(
                "upstream_unavailable", "The upstream does not accept this server's credential."
            )
        return _failed(f"The upstream answered with status {status}.")

    def _explain(
        self, error: wire.Error, code: Literal["upstream_error", "upstream_rejected"]
    ) -> Failed:
        """Return an upstream's error as a failure, with our credential removed."""
        message = error.message
        credential = self._endpoint.credential if self._endpoint else None
        if credential:
            message = message.replace(credential, "***")
        message = message[:MESSAGE_CHARS_MAX] or "It gave no reason."
        if error.code == "context_length_exceeded":
            return Failed("context_length_exceeded", message, "messages")
        return Failed(code, f"The upstream refused the request: {message}", error.param)

    # --- Usage and output -------------------------------------------------------------------------

    def _usage_of(self, *, estimate: bool) -> Usage | None:
        if self._usage is not None:
            return Usage(
                requests=1,
                input_tokens=self._usage.prompt_tokens - self._usage.cached_tokens,
                cached_input_tokens=self._usage.cached_tokens,
                output_tokens=self._usage.completion_tokens,
            )
        if not estimate:
            return None
        chat = self._chat
        texts = [*(message.content for message in chat.messages)]
        texts += [prompt for prompt in chat.prompts if isinstance(prompt, str)]
        ids = sum(len(prompt) for prompt in chat.prompts if not isinstance(prompt, str))
        text_bytes = sum(len(text.encode()) for text in texts)
        pictures = sum(isinstance(part, int) for each in chat.messages for part in each.parts)
        ids += pictures * self._client.source_tokens
        return Usage(
            requests=1,
            input_tokens=math.ceil(text_bytes / BYTES_PER_TOKEN) + ids,
            output_tokens=self._chunks,
        )

    def _output(self) -> dict[str, Any]:
        # Upstreams count the thoughts of all choices together.
        thoughts = [0 if self._usage is None else self._usage.reasoning_tokens]
        output: dict[str, Any] = {
            "choices": [
                Choice(
                    index,
                    text,
                    self._finished[index] or "stop",
                    tuple(self._logprobs[index]) if self._chat.logprobs else None,
                    tuple(self._calls[index].values()),
                    self._reasoning[index],
                    thoughts.pop() if thoughts else 0,
                )
                for index, text in enumerate(self._texts)
            ]
        }
        if self._endpoint is not None and len(self._client.endpoints.all) > 1:
            output["served_by"] = self._endpoint.model
        return output


def _message(message: ChatMessage) -> dict[str, Any]:
    wire_message: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        wire_message["name"] = message.name
    if message.tool_call_id:
        wire_message["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        wire_message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return wire_message


def _tools(chat: ChatInput) -> dict[str, Any]:
    choice: Any = chat.tool_choice
    if chat.tool_name is not None:
        choice = {"type": "function", "function": {"name": chat.tool_name}}
    body: dict[str, Any] = {
        "tools": [
            {"type": "function", "function": msgspec.to_builtins(tool)} for tool in chat.tools
        ],
        "tool_choice": choice,
    }
    return body if chat.parallel_tool_calls else {**body, "parallel_tool_calls": False}


def _failed(message: str) -> Failed:
    return Failed("upstream_error", message)

"""OpenAI's legacy completions: text is continued verbatim, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, TypedDict

from litestar import Controller, Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from pydantic import ConfigDict, Field

from gateway.api.http.answering import StreamOptions, answer, to_submission, wants_usage
from gateway.api.http.answers import UsageView, encode_json, openai_usage
from gateway.api.http.bodies import read_body, refuse_in_batch
from gateway.api.http.content_types import EVENTS
from gateway.api.http.fields import ModelName, refused
from gateway.api.http.request import ApiRequest
from gateway.api.http.text_stream import TextDelta, choices_of
from gateway.api.openai.chat import TASK, TextWriter
from gateway.batches.endpoint import BatchEndpoint, Entries
from gateway.errors import InvalidRequest
from gateway.ledger.closed import ClosedRequest
from gateway.requests.ticket import Ticket
from gateway.tasks.submission import Submission
from gateway.tasks.text import TextCompletion
from workers.contract.jobs import TokenLogprob

LENGTH: Final = 16
"""Default output tokens, as clients of this API expect."""


class Completion(TextCompletion):
    """Body of ``POST /v1/completions``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "pocket-chat", "prompt": "A hold is", "max_tokens": 24}]
        },
    )

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: Annotated[
        str | None, refused("is not supported: the models served here only continue a text.")
    ] = None
    user: str | None = None

    def completion(self) -> TextCompletion:
        """Return the task's input. Raise ``InvalidRequest`` for options that are not supported."""
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest(
                "unsupported_parameter",
                f"best_of is {self.best_of}; selecting among answers is not supported, so leave it "
                "out or make it equal to n.",
                param="best_of",
            )
        return self if self.max_tokens else self.model_copy(update={"max_tokens": LENGTH})


class CompletionLogprobsView(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoiceView(TypedDict):
    text: str
    index: int
    logprobs: CompletionLogprobsView | None
    finish_reason: str | None


class CompletionView(TypedDict):
    """A text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoiceView]
    usage: UsageView


class CompletionsController(Controller):
    path = "/v1/completions"
    tags = ["OpenAI"]
    opt = {"scope": "inference", "holds": True}

    @post(
        status_code=200,
        opt={"media": [EVENTS], "direct": True},
        operation_id="CreateCompletion",
        summary="Continue a text without a chat template, in one response or as a stream",
    )
    async def create(
        self, request: ApiRequest, data: JSONBody[Completion]
    ) -> Response[CompletionView] | Stream:
        include_usage = wants_usage(data.stream_options, stream=data.stream)
        submission = await to_submission(
            request,
            model=data.model,
            task=TASK,
            input=data.completion(),
            stream=bool(data.stream),
        )
        return await answer(
            request,
            submission,
            completion_view,
            lambda ticket: CompletionWriter(ticket, include_usage=include_usage),
        )


def completion_view(closed: ClosedRequest) -> CompletionView:
    return {
        "id": closed.request_id,
        "object": "text_completion",
        "created": int(closed.accepted_at.timestamp()),
        "model": closed.model,
        "choices": [
            _choice(choice.index, choice.text, choice.finish_reason, choice.logprobs)
            for choice in choices_of(closed)
        ],
        "usage": openai_usage(closed.usage, closed.cost_nanos),
    }


def batch_submission(body: Mapping[str, Any], _: Entries) -> Submission:
    """Check one body of a batch, which cannot be streamed."""
    data = read_body(Completion, body)
    refuse_in_batch(data, "stream", "stream_options")
    return Submission(model=data.model, task=TASK, input=data.completion())


BATCHES: Final = BatchEndpoint(
    "/v1/completions",
    read=batch_submission,
    answer=lambda closed, _: encode_json(completion_view(closed)),
)


class CompletionWriter(TextWriter):
    """Writes chunks of a completion."""

    def __init__(self, ticket: Ticket, *, include_usage: bool) -> None:
        super().__init__(ticket, "text_completion", include_usage=include_usage)
        self._lengths: dict[int, int] = {}

    def _write_delta(self, delta: TextDelta) -> bytes:
        if not delta.text:
            return b""
        begin = self._lengths.get(delta.index, 0)
        self._lengths[delta.index] = begin + len(delta.text)
        if delta.logprobs is None:
            return self._text_event(delta.index, delta.text)
        choice = _choice(delta.index, delta.text, None, delta.logprobs, begin=begin)
        return self._event(choices=[choice])

    def _write_text(self, index: int, text: str) -> bytes:
        return self._event(choices=[_choice(index, text, None, None)])

    def _end(self, reasons: Mapping[int, str], usage: UsageView) -> Iterator[bytes]:
        for index, reason in reasons.items():
            yield self._event(choices=[_choice(index, "", reason, None)])
        if self._include_usage:
            yield self._event(choices=[], usage=usage)


def _choice(
    index: int,
    text: str,
    finish_reason: str | None,
    logprobs: Sequence[TokenLogprob] | None,
    *,
    begin: int = 0,
) -> CompletionChoiceView:
    return {
        "text": text,
        "index": index,
        "logprobs": None if logprobs is None else _logprobs(logprobs, begin),
        "finish_reason": finish_reason,
    }


def _logprobs(tokens: Sequence[TokenLogprob], begin: int) -> CompletionLogprobsView:
    """Return log probabilities in the legacy shape: parallel lists, one item per token."""
    texts = [token.text for token in tokens]
    offsets = list(accumulate((len(text) for text in texts), initial=begin))[: len(texts)]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(token.top) for token in tokens],
        "text_offset": offsets,
    }

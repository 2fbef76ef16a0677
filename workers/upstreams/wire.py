"""The fields of OpenAI's chat completions that are read; all others are ignored."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from workers.contract.jobs import TokenLogprob

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: Count | None = None


class WireUsage(msgspec.Struct, frozen=True):
    """``prompt_tokens`` includes cached tokens."""

    prompt_tokens: Count
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def reasoning_tokens(self) -> int:
        details = self.completion_tokens_details
        return min(details.reasoning_tokens or 0, self.completion_tokens) if details else 0

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return min(details.cached_tokens or 0, self.prompt_tokens) if details else 0


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float


class Logprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    top_logprobs: tuple[TopLogprob, ...] = ()


class Logprobs(msgspec.Struct, frozen=True):
    """For chats in ``content``; for completions in parallel lists."""

    content: tuple[Logprob, ...] | None = None
    tokens: tuple[str, ...] | None = None
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None


class Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class WireToolCall(msgspec.Struct, frozen=True):
    """A tool call, or a part of the one with the same ``index``."""

    index: Count | None = None
    id: str | None = None
    function: Function = Function()


class Text(msgspec.Struct, frozen=True):
    content: str | None = None
    tool_calls: tuple[WireToolCall, ...] | None = None
    reasoning_content: str | None = None
    """Reasoning, as named by DeepSeek, vLLM and SGLang."""
    reasoning: str | None = None
    """Reasoning, as named by OpenRouter and newer servers."""


class WireChoice(msgspec.Struct, frozen=True):
    """A choice of a chunk (``delta``), of a complete answer (``message``) or of a completion
    (``text``)."""

    index: Count = 0
    text: str | None = None
    delta: Text | None = None
    message: Text | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | int | None = None
    param: str | None = None


class WireAnswer(msgspec.Struct, frozen=True):
    """A chunk, a complete answer, or an error, which some services send within a stream."""

    choices: tuple[WireChoice, ...] = ()
    usage: WireUsage | None = None
    error: Error | None = None


_decoder: Final[msgspec.json.Decoder[WireAnswer]] = msgspec.json.Decoder(WireAnswer)


def decode_answer(data: bytes) -> WireAnswer:
    """Decode an answer. Raise ``msgspec.DecodeError``."""
    return _decoder.decode(data)


def decode_error(body: bytes) -> Error:
    """Decode an error's body; a malformed one gives an empty error."""
    try:
        return decode_answer(body).error or Error()
    except msgspec.DecodeError:
        return Error()


def read_logprobs(logprobs: Logprobs | None) -> tuple[TokenLogprob, ...] | None:
    if logprobs is not None and logprobs.tokens is not None:
        tops = logprobs.top_logprobs or (None,) * len(logprobs.tokens)
        return tuple(
            TokenLogprob(text, logprob or 0.0, tuple((top or {}).items()))
            for text, logprob, top in zip(
                logprobs.tokens, logprobs.token_logprobs, tops, strict=False
            )
        )
    if logprobs is None or logprobs.content is None:
        return None
    return tuple(
        TokenLogprob(
            token.token,
            token.logprob,
            tuple((top.token, top.logprob) for top in token.top_logprobs),
        )
        for token in logprobs.content
    )

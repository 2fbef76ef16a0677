"""The part of OpenAI's chat completion format that is read back; all else is ignored."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class WireUsage(msgspec.Struct, frozen=True):
    """``prompt_tokens`` includes those that were cached."""

    prompt_tokens: Count
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None

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
    """Of chats in ``content``; of completions in lists, one for each kind of thing."""

    content: tuple[Logprob, ...] | None = None
    tokens: tuple[str, ...] | None = None
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None


class Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class WireToolCall(msgspec.Struct, frozen=True):
    """A call, or a piece of the one with the same ``index``."""

    index: Count | None = None
    id: str | None = None
    function: Function = Function()


class Text(msgspec.Struct, frozen=True):
    content: str | None = None
    tool_calls: tuple[WireToolCall, ...] | None = None
    reasoning_content: str | None = None
    """Reasoning as DeepSeek, vLLM and SGLang name it."""
    reasoning: str | None = None
    """The same as OpenRouter and newer servers name it."""


class WireChoice(msgspec.Struct, frozen=True):
    """Of a chunk, with a ``delta``, of a whole answer, with a ``message``, or with ``text``, of a
    completion."""

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
    """A chunk, a whole answer, or an error, which some services send in the midst of a stream."""

    choices: tuple[WireChoice, ...] = ()
    usage: WireUsage | None = None
    error: Error | None = None


_decoder: Final[msgspec.json.Decoder[WireAnswer]] = msgspec.json.Decoder(WireAnswer)


def decode_answer(data: bytes) -> WireAnswer:
    """Raise ``msgspec.DecodeError`` if it is none."""
    return _decoder.decode(data)


def decode_error(body: bytes) -> Error:
    """Read an error's body as well as it can be read."""
    try:
        return decode_answer(body).error or Error()
    except msgspec.DecodeError:
        return Error()

"""What a client may send for each task, and the most that it can use: pure, no I/O, no clock.

``prepare`` checks an input against the catalog entry and bounds every quantity of it. The bounds
are what the hold covers, so they must never be too low; too high only reserves more for a while.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from gateway.catalog.schema import SECONDS_MAX, Entry, Limits
from gateway.catalog.tasks import TASKS
from gateway.errors import InvalidRequest
from workers.contract.jobs import ChatInput, ChatMessage, Usage

TOKENS_PER_MESSAGE: Final = 16
"""Bound on what a chat template adds around one message (Llama 3, Qwen and Gemma need 4 to 8)."""
TOKENS_PER_PROMPT: Final = 64
"""Bound on what a chat template adds once: a default system prompt, a generation prompt. Where it
is more, the catalog entry says so."""

SECONDS_PER_TOKEN: Final = 0.005
SECONDS_PER_IMAGE: Final = 1.0
PREFILL_SPEEDUP: Final = 16
"""Prompts are read in parallel, answers are written one token at a time."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked input, and the most that running it can use."""

    input: dict[str, Any]
    limits: Usage
    batch_key: str = ""
    choices: int | None = None
    """Of a text whose length was left open: how many answers share the limit on its tokens."""


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation; content is text, or a list of text parts."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, StringConstraints(max_length=64)] | None = None

    @property
    def text(self) -> str:
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class TextGeneration(BaseModel):
    """Input of the task ``text-generation``, named as in OpenAI's chat completions."""

    model_config = ConfigDict(extra="forbid")

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: (
        Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=300)] | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None


class Media(BaseModel):
    """Input of every other task: passed on as sent, with the quantities that a price can name."""

    model_config = ConfigDict(extra="allow")

    prompt: str | None = None
    text: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seconds: Annotated[float, Field(gt=0, le=SECONDS_MAX)] | None = None


Input: TypeAlias = TextGeneration | Media


def parse(task: str, value: Mapping[str, Any], *, prefix: str = "input") -> Input:
    """Check an input's own shape. Raise ``InvalidRequest`` that names the field at fault."""
    schema: type[TextGeneration] | type[Media] = (
        TextGeneration if task == "text-generation" else Media
    )
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise invalid_field(error.errors(include_url=False), prefix=prefix) from None


def invalid_field(errors: Sequence[Mapping[str, Any]], *, prefix: str = "") -> InvalidRequest:
    """Say in one sentence which field was wrong, its value, and what would have been accepted.

    ``errors`` are pydantic's; the first one that is not about an alternative of a union is told.
    """
    first = errors[0]
    place = ".".join(str(part) for part in (*([prefix] if prefix else []), *first["loc"]))
    if first["type"] == "extra_forbidden":
        return InvalidRequest("unknown_parameter", f"Unknown parameter: {place}.", param=place)
    if first["type"] == "missing":
        return InvalidRequest(
            "missing_required_parameter", f"Missing required parameter: {place}.", param=place
        )
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequest(
        "invalid_value", f"Invalid value for {place}: {first['msg']} (got {shown}).", param=place
    )


def prepare(entry: Entry, value: Input, *, prefix: str = "") -> Prepared:
    """Check an input against a catalog entry's limits and bound what it can use."""
    if isinstance(value, TextGeneration):
        return _prepare_text(entry, value, prefix=f"{prefix}." if prefix else "")
    return _prepare_media(entry, value, prefix=f"{prefix}." if prefix else "")


def estimate_cost_s(limits: Usage) -> float:
    """Estimate a request's device seconds. Only ratios between requests of one model matter: the
    queue is fair between accounts by this cost."""
    tokens = limits.input_tokens / PREFILL_SPEEDUP + limits.output_tokens
    seconds = (limits.video_ms + limits.audio_ms) / 1000
    return tokens * SECONDS_PER_TOKEN + limits.images * SECONDS_PER_IMAGE + seconds


def _prepare_text(entry: Entry, value: TextGeneration, *, prefix: str) -> Prepared:
    limits = entry.limits
    choices = value.n or 1
    if choices > (limits.choices or 1):
        raise _over(f"{prefix}n", choices, f"{entry.name} gives at most {limits.choices or 1}")
    if (
        value.max_tokens
        and value.max_completion_tokens
        and value.max_tokens != value.max_completion_tokens
    ):
        raise InvalidRequest(
            "invalid_value",
            "max_tokens and max_completion_tokens differ; send one of them.",
            param=f"{prefix}max_completion_tokens",
        )
    asked = value.max_completion_tokens or value.max_tokens
    output_max = limits.output_tokens or 1
    if asked is not None and asked > output_max:
        field = "max_completion_tokens" if value.max_completion_tokens else "max_tokens"
        raise _over(f"{prefix}{field}", asked, f"{entry.name} writes at most {output_max} tokens")
    if value.top_logprobs and not value.logprobs:
        raise InvalidRequest(
            "invalid_value", "top_logprobs needs logprobs: true.", param=f"{prefix}top_logprobs"
        )
    stop = (value.stop,) if isinstance(value.stop, str) else tuple(value.stop or ())
    if any(not text for text in stop):
        raise InvalidRequest("invalid_value", "A stop string is empty.", param=f"{prefix}stop")

    messages = tuple(
        ChatMessage(
            role="system" if message.role == "developer" else message.role,
            content=message.text,
            name=message.name,
        )
        for message in value.messages
    )
    max_tokens = asked or output_max
    defaults = entry.default_parameters.model_dump(exclude_none=True)
    chat = ChatInput(
        messages=messages,
        max_tokens=max_tokens,
        # Chosen here and not by the worker, so that a second attempt repeats the first.
        seed=value.seed if value.seed is not None else secrets.randbits(63),
        n=choices,
        temperature=_or(value.temperature, defaults.get("temperature", 1.0)),
        top_p=_or(value.top_p, defaults.get("top_p", 1.0)),
        top_k=_or(value.top_k, defaults.get("top_k", 0)),
        min_p=_or(value.min_p, defaults.get("min_p", 0.0)),
        frequency_penalty=_or(value.frequency_penalty, defaults.get("frequency_penalty", 0.0)),
        presence_penalty=_or(value.presence_penalty, defaults.get("presence_penalty", 0.0)),
        repetition_penalty=_or(value.repetition_penalty, defaults.get("repetition_penalty", 1.0)),
        logit_bias=value.logit_bias or {},
        stop=stop,
        logprobs=bool(value.logprobs),
        top_logprobs=value.top_logprobs or 0,
        response_format=_response_format(value.response_format, prefix),
    )
    return Prepared(
        input=msgspec.to_builtins(chat),
        limits=Usage(
            requests=1,
            input_tokens=_input_tokens_max(messages, limits),
            output_tokens=choices * max_tokens,
            gpu_us=_gpu_us_max(limits),
        ),
        choices=choices if asked is None else None,
    )


def _input_tokens_max(messages: tuple[ChatMessage, ...], limits: Limits) -> int:
    """Bound the prompt's tokens without a tokenizer: no byte-level vocabulary makes more than one
    token of a byte, and the template's own tokens are bounded per message."""
    size = (limits.template_tokens or TOKENS_PER_PROMPT) + sum(
        TOKENS_PER_MESSAGE + len(message.content.encode()) + len(message.name or "")
        for message in messages
    )
    return min(size, limits.context_tokens) if limits.context_tokens else size


def _gpu_us_max(limits: Limits) -> int:
    return round((limits.gpu_seconds or 0) * 1_000_000)


def _response_format(value: ResponseFormat | None, prefix: str) -> dict[str, Any] | None:
    if value is None or value.type == "text":
        return None
    if value.type == "json_schema" and value.json_schema is None:
        raise InvalidRequest(
            "missing_required_parameter",
            "response_format of type json_schema needs json_schema.",
            param=f"{prefix}response_format.json_schema",
        )
    return value.model_dump(exclude_none=True)


def _prepare_media(entry: Entry, value: Media, *, prefix: str) -> Prepared:
    limits = entry.limits
    if value.n > (limits.images or 1):
        raise _over(f"{prefix}n", value.n, f"{entry.name} makes at most {limits.images or 1}")
    if value.seconds is not None and limits.seconds and value.seconds > limits.seconds:
        raise _over(
            f"{prefix}seconds", value.seconds, f"{entry.name} makes at most {limits.seconds} s"
        )
    characters = len(value.prompt or "") + len(value.text or "")
    if limits.characters and characters > limits.characters:
        field = "text" if value.text else "prompt"
        raise _over(
            f"{prefix}{field}", characters, f"{entry.name} reads {limits.characters} characters"
        )
    duration_ms = round((value.seconds or limits.seconds or 0) * 1000)
    makes = TASKS[entry.task].makes
    return Prepared(
        input=value.model_dump(exclude_unset=True),
        limits=Usage(
            requests=1,
            images=value.n if makes == "image" else 0,
            video_ms=duration_ms if makes == "video" else 0,
            audio_ms=duration_ms if makes == "audio" else 0,
            characters=characters if makes == "audio" else 0,
            steps=limits.steps or 0,
            gpu_us=_gpu_us_max(limits),
        ),
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _over(param: str, value: float, most: str) -> InvalidRequest:
    return InvalidRequest("invalid_value", f"{param} is {value}, but {most}.", param=param)

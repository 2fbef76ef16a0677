"""Inputs of the task ``text-generation``: a conversation, or text to continue. Pure.

Fields are named as in OpenAI's APIs. Input tokens are bounded without a tokenizer, never too low.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from pydantic import ConfigDict, Field, StrictInt, StrictStr, StringConstraints

from gateway.catalog.schema import CatalogEntry, DefaultParameters, Limits
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.tasks.content_parts import Part, Pictures
from gateway.tasks.logprobs import refuse_many_logprobs
from gateway.tasks.prepared import Prepared, gpu_us_max, over
from workers.contract.jobs import ChatInput, ChatMessage, Prompt, Tool, ToolCall, Usage

TOKENS_PER_MESSAGE: Final = 16
"""Bound on the tokens that a chat template adds to a message (Llama 3, Qwen, Gemma: 4 to 8)."""
TOKENS_PER_PROMPT: Final = 64
"""Bound on the tokens that a chat template adds once; entries may set limits.template_tokens."""
TOKENS_PER_TOOLS: Final = 512
"""Bound on the tokens that a chat template adds once to explain function calls."""
TOKENS_PER_TOOL: Final = 64
"""Bound on the tokens that a chat template adds to each function and to each call."""
MESSAGES_MAX: Final = 2048
SCHEMA_BYTES_MAX: Final = 64 * 1024
SCHEMA_DEPTH_MAX: Final = 32

TOKEN_MAX: Final = 2**31 - 1
"""Largest token id; larger than any vocabulary."""

TokenId: TypeAlias = Annotated[int, Field(ge=0, le=TOKEN_MAX)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
FunctionName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionCall(StrictModel):
    name: FunctionName
    arguments: str
    parsed_arguments: Any | None = None
    """Added by the parsing helpers of OpenAI's clients; ignored in favour of ``arguments``."""


class CalledTool(StrictModel):
    """A call that the model made, as clients send it back with the conversation."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Left by clients that assemble streamed calls; ignored in favour of the order of the list."""


class Message(StrictModel):
    """One turn of a conversation; content is text, or a list of texts and pictures."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: Annotated[str, StringConstraints(max_length=64)] | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, StringConstraints(max_length=200)] | None = None
    # Fields of answers, which clients send back.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    # Added to answers by client helpers and other servers, and sent back with them.
    parsed: Any | None = None
    reasoning: Any | None = None
    reasoning_content: Any | None = None
    reasoning_details: Any | None = None
    thinking_blocks: Any | None = None
    provider_specific_fields: Any | None = None
    cache_control: Any | None = None

    @property
    def text(self) -> str:
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Function(StrictModel):
    name: FunctionName
    description: Annotated[str, StringConstraints(max_length=8192)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(StrictModel):
    type: Literal["function"]
    function: Function
    cache_control: Any | None = None


class NamedFunction(StrictModel):
    name: FunctionName


class NamedTool(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(StrictModel):
    model_config = ConfigDict(populate_by_name=True)

    name: FunctionName
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(StrictModel):
    """Sampling parameters and lengths; the catalog entry has the defaults of omitted fields."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=300)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None


class TextGeneration(Sampling):
    """A conversation to answer; fields as in OpenAI's chat completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


_Tokens: TypeAlias = Annotated[
    list[Annotated[StrictInt, Field(ge=0, le=TOKEN_MAX)]], Field(min_length=1)
]
Texts: TypeAlias = (
    StrictStr
    | Annotated[list[StrictStr], Field(min_length=1, max_length=2048)]
    | _Tokens
    | Annotated[list[_Tokens], Field(min_length=1, max_length=2048)]
)
"""One text or several, each as a string or as token ids."""


def read_texts(given: Texts) -> tuple[Prompt, ...]:
    if isinstance(given, str):
        return (given,)
    prompts: list[Prompt] = []
    tokens: list[int] = []
    for one in given:
        if isinstance(one, int):
            tokens.append(one)
        else:
            prompts.append(one if isinstance(one, str) else tuple(one))
    return (tuple(tokens),) if tokens else tuple(prompts)


class TextCompletion(Sampling):
    """Text to continue, without a chat template; fields as in OpenAI's completions."""

    prompt: Texts
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None


def prepare_text(
    entry: CatalogEntry, value: TextGeneration | TextCompletion, *, prefix: str
) -> Prepared:
    """Check an input against a catalog entry's limits and bound its usage."""
    limits = entry.limits
    requested = _requested_tokens(entry, value, prefix)
    output_max = limits.output_tokens or 1
    given = _sampling(entry, value, requested or output_max, prefix)
    pictures = Pictures(entry)
    if isinstance(value, TextGeneration):
        chat = ChatInput(**given, **_conversation(value, pictures, prefix))
    else:
        if value.echo and value.logprobs is not None:
            raise InvalidRequest(
                "unsupported_parameter",
                "echo with logprobs is not supported: prompts have no log probabilities.",
                param=f"{prefix}echo",
            )
        chat = ChatInput(
            **given,
            messages=(),
            prompts=read_texts(value.prompt),
            echo=bool(value.echo),
            logprobs=value.logprobs is not None,
            top_logprobs=value.logprobs or 0,
        )
    if chat.choices > (limits.choices or 1):
        what = "n" if isinstance(value, TextGeneration) else "n times the number of prompts"
        most = f"{entry.name} gives at most {limits.choices or 1}"
        raise InvalidRequest(
            "invalid_value", f"{what} is {chat.choices}, but {most}.", param=f"{prefix}n"
        )
    if chat.logprobs:
        refuse_many_logprobs(chat, prefix)
    return Prepared(
        input=msgspec.to_builtins(chat),
        limits=Usage(
            requests=1,
            input_tokens=_input_tokens_max(chat, limits, pictures=len(pictures.sources)),
            output_tokens=chat.choices * chat.max_tokens,
            gpu_us=gpu_us_max(limits),
        ),
        choices=chat.choices if requested is None else None,
        sources=pictures.sources,
    )


def _requested_tokens(
    entry: CatalogEntry, value: TextGeneration | TextCompletion, prefix: str
) -> int | None:

    requested, field = value.max_tokens, "max_tokens"
    if isinstance(value, TextGeneration) and value.max_completion_tokens:
        if requested and requested != value.max_completion_tokens:
            raise InvalidRequest(
                "invalid_value",
                "max_tokens and max_completion_tokens differ; send one of them.",
                param=f"{prefix}max_completion_tokens",
            )
        requested, field = value.max_completion_tokens, "max_completion_tokens"
    output_max = entry.limits.output_tokens or 1
    if requested is not None and requested > output_max:
        raise over(
            f"{prefix}{field}", requested, f"{entry.name} writes at most {output_max} tokens"
        )
    return requested


def _sampling(entry: CatalogEntry, value: Sampling, max_tokens: int, prefix: str) -> dict[str, Any]:
    """Return the fields of the job's input that both kinds of text have."""
    stop = (value.stop,) if isinstance(value.stop, str) else tuple(value.stop or ())
    if any(not text for text in stop):
        raise InvalidRequest("invalid_value", "A stop string is empty.", param=f"{prefix}stop")
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        # Chosen here and not by the worker, so that a second attempt repeats the first.
        "seed": value.seed if value.seed is not None else secrets.randbits(63),
        "n": value.n or 1,
        "logit_bias": value.logit_bias or {},
        "stop": stop,
    }
    for name in _DEFAULTED:
        chosen = getattr(value, name)
        if chosen is None:
            chosen = getattr(entry.default_parameters, name)
        if chosen is not None:
            fields[name] = chosen
    return fields


_DEFAULTED: Final = tuple(Sampling.model_fields.keys() & DefaultParameters.model_fields.keys())
"""Parameters of which the catalog entry has defaults."""


def _conversation(value: TextGeneration, pictures: Pictures, prefix: str) -> dict[str, Any]:
    if value.top_logprobs and not value.logprobs:
        raise InvalidRequest(
            "invalid_value", "top_logprobs needs logprobs: true.", param=f"{prefix}top_logprobs"
        )
    tools = _tools(value, prefix) if value.tools or value.tool_choice else ()
    choice = value.tool_choice
    given = value.response_format
    format = None if given is None else _response_format(given, prefix)
    if format is not None and (choice == "required" or isinstance(choice, NamedTool)):
        raise InvalidRequest(
            "invalid_value",
            "An answer cannot both call a function and follow a response_format.",
            param=f"{prefix}tool_choice",
        )
    return {
        "messages": tuple(_messages(value.messages, pictures, prefix)),
        "logprobs": bool(value.logprobs),
        "top_logprobs": value.top_logprobs or 0,
        "response_format": format,
        "tools": tools,
        "tool_choice": "required" if isinstance(choice, NamedTool) else choice or "auto",
        "tool_name": choice.function.name if isinstance(choice, NamedTool) else None,
        "parallel_tool_calls": value.parallel_tool_calls is not False,
    }


def _messages(
    messages: Sequence[Message], pictures: Pictures, prefix: str
) -> Iterator[ChatMessage]:
    """Convert messages; check that each function's result answers an earlier open call."""
    open_calls: set[str] = set()
    for number, message in enumerate(messages):
        place = f"{prefix}messages.{number}"
        parts: tuple[str | int, ...] = ()
        if isinstance(message.content, list):
            parts = pictures.read(message.content, message.role, place)
        calls = message.tool_calls or []
        if calls and message.role != "assistant":
            raise InvalidRequest(
                "invalid_value",
                f"{place}.tool_calls is in a message of the role {message.role}; only assistant "
                "messages can have it.",
                param=f"{place}.tool_calls",
            )
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                raise InvalidRequest(
                    "invalid_value",
                    f"{place}.tool_call_id is {message.tool_call_id!r}, but no unanswered call "
                    "before it has this id.",
                    param=f"{place}.tool_call_id",
                )
            open_calls.discard(message.tool_call_id)
        elif message.tool_call_id is not None:
            raise InvalidRequest(
                "invalid_value",
                f"{place}.tool_call_id is accepted in messages of the role tool only.",
                param=f"{place}.tool_call_id",
            )
        if message.content is None and not calls and message.refusal is None:
            raise InvalidRequest(
                "invalid_value", f"{place}.content is missing.", param=f"{place}.content"
            )
        open_calls |= {call.id for call in calls}
        yield ChatMessage(
            role="system" if message.role == "developer" else message.role,
            content=message.text,
            name=message.name,
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments) for call in calls
            ),
            tool_call_id=message.tool_call_id,
            parts=parts,
        )


def _tools(value: TextGeneration, prefix: str) -> tuple[Tool, ...]:
    tools = tuple(
        Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {})
        for tool in value.tools or ()
    )
    if not tools:
        if value.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "invalid_value", "tool_choice needs tools.", param=f"{prefix}tool_choice"
            )
        return ()
    names = [tool.name for tool in tools]
    for number, tool in enumerate(tools):
        place = f"{prefix}tools.{number}.function"
        if names.index(tool.name) != number:
            raise InvalidRequest(
                "invalid_value", f"Two functions are called {tool.name!r}.", param=f"{place}.name"
            )
        _check_schema(tool.parameters, f"{place}.parameters")
    if isinstance(value.tool_choice, NamedTool) and value.tool_choice.function.name not in names:
        raise InvalidRequest(
            "invalid_value",
            f"tool_choice names {value.tool_choice.function.name!r}, which is not among the tools.",
            param=f"{prefix}tool_choice",
        )
    return tools


def _response_format(value: ResponseFormat, prefix: str) -> dict[str, Any] | None:
    if value.type == "text":
        return None
    if value.type == "json_object":
        return {"type": "json_object"}
    place = f"{prefix}response_format.json_schema"
    if value.json_schema is None:
        raise InvalidRequest(
            "missing_required_parameter",
            "response_format of type json_schema needs json_schema.",
            param=place,
        )
    schema = value.json_schema.schema_ or {"type": "object"}
    _check_schema(schema, f"{place}.schema")
    return {
        "type": "json_schema",
        "json_schema": {"name": value.json_schema.name, "schema": schema},
    }


def _check_schema(schema: Mapping[str, Any], place: str) -> None:
    """Bound the size and depth of a schema. The engine checks whether it supports the schema."""
    size = len(msgspec.json.encode(schema))
    if size > SCHEMA_BYTES_MAX:
        raise over(place, size, f"a schema has at most {SCHEMA_BYTES_MAX} bytes")
    level: list[Any] = [schema]
    for _ in range(SCHEMA_DEPTH_MAX):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise InvalidRequest(
        "invalid_value", f"{place} is more than {SCHEMA_DEPTH_MAX} levels deep.", param=place
    )


def _input_tokens_max(chat: ChatInput, limits: Limits, *, pictures: int) -> int:
    """Bound the prompt's tokens: at most one per byte, plus the template's own per message, plus
    the entry's limit for each picture."""
    once = limits.template_tokens or TOKENS_PER_PROMPT
    context = limits.context_tokens
    if chat.prompts:
        sizes = [once + len(p.encode()) if isinstance(p, str) else len(p) for p in chat.prompts]
        return sum(min(size, context) if context else size for size in sizes)
    size = once + sum(map(_message_bytes, chat.messages))
    size += pictures * (limits.source_tokens or 0)
    if chat.tools:
        size += TOKENS_PER_TOOLS + sum(
            TOKENS_PER_TOOL + len(msgspec.json.encode(tool)) for tool in chat.tools
        )
    if chat.response_format:
        # Engines here constrain sampling instead, but an upstream may add it to the prompt.
        size += TOKENS_PER_TOOL + len(msgspec.json.encode(chat.response_format))
    return min(size, context) if context else size


def _message_bytes(message: ChatMessage) -> int:
    size = TOKENS_PER_MESSAGE + len(message.content.encode()) + len((message.name or "").encode())
    size += len((message.tool_call_id or "").encode())
    return size + sum(
        TOKENS_PER_TOOL + len(f"{call.id}{call.name}{call.arguments}".encode())
        for call in message.tool_calls
    )

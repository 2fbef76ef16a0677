"""Bodies of OpenAI's responses, translated to the conversation of ``gateway.tasks.text``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.http.fields import ModelName, refused
from gateway.api.openrouter.bodies import asks_for_reasoning
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.files.sources import SourceField, UploadedSource
from gateway.tasks.content_parts import ImagePart, ImageUrl, Part, TextPart
from gateway.tasks.text import (
    MESSAGES_MAX,
    CalledTool,
    FunctionName,
    FunctionTool,
    JsonSchema,
    Message,
    NamedTool,
    ResponseFormat,
    TextGeneration,
)

LOGPROBS: Final = "message.output_text.logprobs"
Includable: TypeAlias = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_NOT_KEPT: Final = refused(
    "is not supported: inputs are not stored here; send the whole conversation."
)


class ResponsePart(StrictModel):
    """A text part. Parts of earlier answers can be sent back unchanged, with annotations."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text", "text"]
    text: str


class ResponseRefusalPart(BaseModel):
    """A refusal in an earlier answer."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ResponseImagePart(StrictModel):
    """A picture: one of its URL and the id of an upload."""

    type: Literal["input_image"]
    image_url: SourceField | None = None
    file_id: Annotated[str, Field(max_length=100)] | None = None
    detail: Literal["auto", "low", "high"] | None = None

    @property
    def text(self) -> str:
        return ""


class ResponseMediaPart(BaseModel):
    """A part that is neither text nor a picture; parsed only to be refused by name."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_file", "input_audio"]


Content: TypeAlias = (
    str | list[ResponsePart | ResponseRefusalPart | ResponseImagePart | ResponseMediaPart]
)


class MessageItem(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(StrictModel):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    name: FunctionName
    arguments: str
    id: str | None = None
    status: str | None = None


class ResultItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    output: Content
    id: str | None = None
    status: str | None = None


class ReasoningItem(BaseModel):
    """Reasoning of an earlier answer; skipped, because no model here reads it."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]


class ReferenceItem(BaseModel):
    """A reference to an item stored on a server; parsed only to be refused by name."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["item_reference"]


class FlatFunction(StrictModel):
    """A function in the flat form of the responses API."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(StrictModel):
    type: Literal["function"]
    name: FunctionName


class Format(StrictModel):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(StrictModel):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted without effect: the models served here ignore it."""


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool = False


class ResponseBody(StrictModel):
    """Body of ``POST /v1/responses``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "pocket-chat", "input": "What is a hold?", "stream": True}]
        },
    )

    model: ModelName
    input: (
        str
        | Annotated[
            list[MessageItem | CallItem | ResultItem | ReasoningItem | ReferenceItem],
            Field(min_length=1, max_length=2048),
        ]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[FlatFunction], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

    # Accepted without effect, or only with values that change nothing.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    """A conversation that is too long is refused with either value; it is never truncated."""
    include: Annotated[list[Includable], Field(max_length=len(get_args(Includable)))] | None = None
    """Additions to the answer. Only log probabilities exist here."""
    reasoning: dict[str, Any] | None = None

    # Known but refused: ignoring them would change the answer without notice.
    previous_response_id: Annotated[Any | None, _NOT_KEPT] = None
    conversation: Annotated[Any | None, _NOT_KEPT] = None
    prompt: Annotated[
        Any | None,
        refused("is not supported: prompt templates are not stored here; send the text itself."),
    ] = None
    max_tool_calls: Annotated[
        Any | None,
        refused(
            "is not supported: the only tools are your own functions, and every call is returned "
            "to you."
        ),
    ] = None
    context_management: Annotated[
        Any | None, refused("is not supported: conversations are never truncated here.")
    ] = None

    def generation(self) -> TextGeneration:
        """Return the task's input. Raise ``InvalidRequest`` for options that are not supported."""
        if asks_for_reasoning(self.reasoning):
            raise InvalidRequest(
                "unsupported_parameter",
                "reasoning is not supported: how much a model thinks cannot be chosen here.",
                param="reasoning",
            )
        if self.background and self.store is False:
            raise InvalidRequest(
                "invalid_value",
                "A background response must be stored, because it is fetched later.",
                param="store",
            )
        messages = list(self._messages())
        if not 1 <= len(messages) <= MESSAGES_MAX:
            raise InvalidRequest(
                "invalid_value",
                f"input and instructions contain {len(messages)} messages; 1 to {MESSAGES_MAX} are "
                "accepted.",
                param="input",
            )
        return TextGeneration(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=True if LOGPROBS in (self.include or ()) or self.top_logprobs else None,
            top_logprobs=self.top_logprobs,
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._format(),
        )

    def _messages(self) -> Iterator[Message]:
        if self.instructions:
            yield Message(role="system", content=self.instructions)
        if isinstance(self.input, str):
            yield Message(role="user", content=self.input)
            return
        calls: list[CalledTool] = []
        for number, item in enumerate(self.input):
            place = f"input.{number}"
            if isinstance(item, ReasoningItem):
                continue
            if isinstance(item, ReferenceItem):
                raise InvalidRequest(
                    "unsupported_content",
                    f"{place} is an item_reference, but items are not stored here; send the item "
                    "itself.",
                    param=place,
                )
            if isinstance(item, CallItem):
                function = {"name": item.name, "arguments": item.arguments}
                calls.append(CalledTool.model_validate({"id": item.call_id, "function": function}))
                continue
            if calls:
                # Consecutive calls were made in one turn.
                yield Message(role="assistant", tool_calls=calls)
                calls = []
            if isinstance(item, MessageItem):
                content = self._content(item.content, f"{place}.content")
                yield Message(role=item.role, content=content)
            else:
                content = self._content(item.output, f"{place}.output")
                yield Message(role="tool", content=content, tool_call_id=item.call_id)
        if calls:
            yield Message(role="assistant", tool_calls=calls)

    def _content(self, content: Content, place: str) -> str | list[Part]:
        """Return the parts of a content, joined to one text if there are no pictures. Raise
        ``InvalidRequest`` for other parts."""
        if isinstance(content, str):
            return content
        parts: list[Part] = []
        for number, part in enumerate(content):
            if isinstance(part, ResponseMediaPart):
                raise InvalidRequest(
                    "unsupported_content",
                    f"{self.model} does not read {part.type}; {place}.{number} is one.",
                    param=f"{place}.{number}",
                )
            if isinstance(part, ResponseImagePart):
                parts.append(_picture(part, f"{place}.{number}"))
            else:
                parts.append(TextPart(type="text", text=part.text))
        if any(isinstance(part, ImagePart) for part in parts):
            return parts
        return "".join(part.text for part in parts)

    def _format(self) -> ResponseFormat | None:
        format = self.text.format if self.text else None
        if format is None or format.type != "json_schema":
            return None if format is None else ResponseFormat(type=format.type)
        if format.name is None or format.schema_ is None:
            raise InvalidRequest(
                "missing_required_parameter",
                "text.format of type json_schema requires name and schema.",
                param="text.format",
            )
        return ResponseFormat(
            type="json_schema", json_schema=JsonSchema(name=format.name, schema_=format.schema_)
        )


def _picture(part: ResponseImagePart, place: str) -> ImagePart:
    """Raise ``InvalidRequest`` unless a picture has either a URL or the id of an upload."""
    if (part.image_url is None) == (part.file_id is None):
        raise InvalidRequest(
            "invalid_value", f"{place} needs either image_url or file_id.", param=place
        )
    given = part.image_url or UploadedSource(part.file_id or "")
    return ImagePart(type="image_url", image_url=ImageUrl(url=given))


def _tool(tool: FlatFunction) -> FunctionTool:
    return FunctionTool.model_validate(
        {"type": "function", "function": tool.model_dump(exclude={"type"})}
    )


def _choice(choice: Any) -> Any:
    if isinstance(choice, FlatChoice):
        return NamedTool.model_validate({"type": "function", "function": {"name": choice.name}})
    return choice

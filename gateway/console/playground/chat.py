"""Texts of the playground: fields of conversations and of texts that are continued, and the form's
messages, tools and schema as the API's input. Pure.

The script of the page keeps a conversation and sends all of it each time; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from gateway.catalog.schema import CatalogEntry
from gateway.checks.decoding import decode_json
from gateway.console.playground.parts import Field, make_choice, make_field, make_number
from gateway.errors import InvalidRequest

MESSAGE: Final = "message"
"""The newest message of a conversation."""
PICTURES: Final = "images"
"""The pictures of the newest message."""
EARLIER: Final = "pictures"
"""The pictures of earlier messages, which name them by their places."""
FILE: Final = "file:"
"""What precedes the place of a picture among those of earlier messages."""
ANSWERABLE: Final = ("user", "tool")
"""Roles of a last message that a model answers without a newer one."""
SCHEMA_NAME: Final = "answer"
STOP: Final = "stop"
TOP_LOGPROBS_MAX: Final = 20
COMPLETION_LOGPROBS_MAX: Final = 5
LOGPROBS_HINT: Final = "How likely each token of the answer was, listed below it."


def chat_fields(entry: CatalogEntry) -> Iterator[Field]:
    yield make_field(
        "system", "text", aside=True, hint="How it should answer, before everything else."
    )
    yield make_field(MESSAGE, "text", required=True)
    if "image" in entry.input:
        yield make_field(PICTURES, "file", hint="Chosen, dropped or pasted; sent with the message.")
    yield from _sampling_fields(entry)
    yield replace(
        make_choice("logprobs", ("true", "false"), "false", aside=True, hint=LOGPROBS_HINT),
        type="boolean",
    )
    yield make_number("top_logprobs", type="integer", least=0, most=TOP_LOGPROBS_MAX, aside=True)
    yield make_field(
        "tools",
        "text",
        aside=True,
        hint=(
            "Functions that it may call, as a JSON list: "
            '[{"name": "weather", "parameters": {"type": "object", "properties": '
            '{"city": {"type": "string"}}}}]'
        ),
    )
    yield make_choice("tool_choice", ("auto", "required", "none"), "auto", aside=True)
    yield make_field("schema", "text", aside=True, hint="JSON schema that the answer keeps to.")


def completion_fields(entry: CatalogEntry) -> Iterator[Field]:
    """Yield the fields of a text that is continued word for word, without a chat's template."""
    yield make_field("prompt", "text", required=True, hint="The model goes on where it ends.")
    most = entry.limits.choices or 1
    if most > 1:
        yield make_number("n", type="integer", least=1, most=most, default=1)
    yield from _sampling_fields(entry)
    yield make_number(
        "logprobs",
        type="integer",
        least=0,
        most=COMPLETION_LOGPROBS_MAX,
        aside=True,
        hint="How likely each token was, with so many alternatives.",
    )


def _sampling_fields(entry: CatalogEntry) -> Iterator[Field]:
    default, most = entry.default_parameters, entry.limits.output_tokens
    yield make_number("temperature", least=0, most=2, default=default.temperature, aside=True)
    yield make_number("top_p", least=0, most=1, default=default.top_p, aside=True)
    yield make_number("top_k", type="integer", least=0, most=1000, aside=True)
    yield make_number("min_p", least=0, most=1, aside=True)
    for name in ("frequency_penalty", "presence_penalty"):
        yield make_number(name, least=-2, most=2, aside=True)
    yield make_number("repetition_penalty", least=0, most=2, aside=True)
    yield make_number("max_tokens", type="integer", least=1, most=most, aside=True)
    yield make_field(STOP, "text", aside=True, hint="At most four texts, one a line.")
    yield make_number("seed", type="integer", least=0, aside=True)


def pictures_in(messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects whose ``url`` stands for a picture of a conversation, in order."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            found = part.get("image_url") if isinstance(part, dict) else None
            if isinstance(found, dict) and isinstance(found.get("url"), str):
                yield found


def conversation(made: Mapping[str, Any], earlier: str) -> dict[str, Any]:
    """Return the input of a chat: the new message after the earlier ones, and the system's before
    them. Raise ``InvalidRequest``."""
    made = dict(made)
    messages = _decoded(earlier, "messages", "The conversation")
    if not isinstance(messages, list):
        raise InvalidRequest("invalid_value", "The conversation cannot be read.", param="messages")
    system, message = made.pop("system", None), made.pop(MESSAGE, None)
    # A single file has the name of one picture.
    pictures = made.pop(PICTURES, None) or [each for each in (made.pop("image", None),) if each]
    if pictures:
        parts = [{"type": "image_url", "image_url": {"url": each}} for each in pictures]
        text = [{"type": "text", "text": message}] if message is not None else []
        messages.append({"role": "user", "content": [*text, *parts]})
    elif message is not None:
        messages.append({"role": "user", "content": message})
    elif not messages or not _may_be_last(messages[-1]):
        raise InvalidRequest("missing_required_parameter", "Write a message first.", param=MESSAGE)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    schema, tools = made.pop("schema", None), made.pop("tools", None)
    if schema is not None:
        made["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": SCHEMA_NAME, "schema": _object(schema, "schema")},
        }
    if tools is not None:
        made["tools"] = [_tool(each) for each in _list(tools, "tools")]
    else:
        made.pop("tool_choice", None)
    return {"messages": messages, **made}


def _may_be_last(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ANSWERABLE


def _tool(given: Any) -> Any:
    """Return a tool in the API's shape; a function alone is enough."""
    if isinstance(given, dict) and "type" not in given:
        return {"type": "function", "function": given}
    return given


def _object(text: str, param: str) -> dict[str, Any]:
    found = _decoded(text, param, "The schema")
    if not isinstance(found, dict):
        raise InvalidRequest("invalid_value", "The schema is not a JSON object.", param=param)
    return found


def _list(text: str, param: str) -> list[Any]:
    found = _decoded(text, param, "The list of tools")
    if isinstance(found, dict):
        return [found]
    if not isinstance(found, list):
        raise InvalidRequest("invalid_value", "Tools are a JSON list of functions.", param=param)
    return found


def _decoded(text: str, param: str, what: str) -> Any:
    try:
        return decode_json(text.encode())
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            "invalid_value", f"{what} cannot be read as JSON: {error}.", param=param
        ) from None

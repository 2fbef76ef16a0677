"""What was sent with an earlier request, in the form again: every field, or what has none. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.console.playground.chat import MESSAGE
from gateway.console.playground.fields import LINES
from gateway.console.playground.origins import PREFIX, SENT, SEPARATOR
from gateway.console.playground.parts import Field

_JSON: Final = frozenset({"tools", "schema"})
"""Texts of a form that are JSON."""
_ALONE: Final = frozenset({"previews", "stream", "tool_choice"})
"""What the playground sends by itself, or what means nothing without another field."""


@dataclass(slots=True)
class Carried:
    """The values of a form, and the names of what it has no field for."""

    values: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


def carried(request_id: str, sent: Mapping[str, Any], fields: Sequence[Field]) -> Carried:
    """Put an input of ``POST /v1/requests`` into the fields of a form."""
    known = {each.name: each for each in fields}
    found = Carried()
    for name, value in _flat(sent):
        if value is None or (name in _ALONE and name not in known):
            continue
        if name == "messages":
            found.values[name] = _text(_with_places(value, request_id))
            continue
        field = _field(name, known)
        if field is None:
            found.lost.append(name)
        elif field.kind == "file":
            files = value if isinstance(value, list) else [value]
            numbers = [number for each in files if (number := _attachment(each)) is not None]
            if len(numbers) < len(files) or len(numbers) > (1, len(files))[field.many]:
                found.lost.append(name)
            else:
                places = (f"{request_id}/{SENT}{number}" for number in numbers)
                found.values[f"{PREFIX}{field.name}"] = SEPARATOR.join(places)
        elif (text := _entered(field, value)) is None:
            found.lost.append(name)
        else:
            found.values[field.name] = text
    return found


def _entered(field: Field, value: Any) -> str | None:
    """Return what is entered in a field for a value; None if the field cannot have it."""
    if field.name in LINES and field.kind == "text":
        lines = value if isinstance(value, list) else [value]
        are_lines = all(
            isinstance(one, str) and one.strip() and one.splitlines() == [one] for one in lines
        )
        return "\n".join(lines) if are_lines else None
    if field.kind == "choice" and isinstance(value, list) and len(value) == 1:
        (value,) = value
    text = _text(value)
    if field.kind == "choice":
        return next((one for one in field.options if one in (text, str(value))), None)
    is_text = isinstance(value, str | int | float) or field.name in _JSON
    return text if is_text else None


def _flat(sent: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield an input's fields by the names of the form's."""
    for name, value in sent.items():
        if name == "parameters" and isinstance(value, Mapping):
            yield from value.items()
        elif name == "messages":
            yield from _conversation(list(value))
        elif name == "response_format" and isinstance(value, Mapping):
            given = dict(value.get("json_schema") or {})
            schema, _ = given.pop("schema", None), given.pop("name", None)
            yield ("schema", schema) if schema is not None else (name, value)
            yield from ((f"{name}.{each}", one) for each, one in given.items())
        else:
            yield name, value


def _conversation(messages: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the system's message, the earlier ones and the newest of the user."""
    if messages and _is_text_of("system", messages[0]):
        yield "system", messages.pop(0)["content"]
    if messages and _is_text_of("user", messages[-1]):
        yield MESSAGE, messages.pop()["content"]
    yield "messages", messages


def _is_text_of(role: str, message: Mapping[str, Any]) -> bool:
    return message.get("role") == role and isinstance(message.get("content"), str)


def _field(name: str, known: Mapping[str, Field]) -> Field | None:
    # Several pictures are one field of the form, as is a single one.
    return known.get(name) or known.get({"image": "images", "images": "image"}.get(name, ""))


def _with_places(value: Any, request_id: str) -> Any:
    """Name the pictures of a conversation as files that were sent with the request."""
    if (number := _attachment(value)) is not None:
        return f"{request_id}/{SENT}{number}"
    if isinstance(value, Mapping):
        return {name: _with_places(one, request_id) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_places(one, request_id) for one in value]
    return value


def _attachment(value: Any) -> int | None:
    number = value.get("attachment") if isinstance(value, Mapping) else None
    return number if isinstance(number, int) else None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(int(value)) if value == int(value) else str(value)
    return json.dumps(value, ensure_ascii=False)

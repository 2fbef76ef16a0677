"""What was sent with an earlier request, in the form again: every field, or what has none. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.console.playground.chat import MESSAGE
from gateway.console.playground.origins import PREFIX, SENT
from gateway.console.playground.parts import Field

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
        place = _place(name, known)
        if place in known and known[place].kind == "file":
            files = value if isinstance(value, list) else [value]
            if len(files) == 1 and (number := _attachment(files[0])) is not None:
                found.values[f"{PREFIX}{place}"] = f"{request_id}/{SENT}{number}"
                continue
            place = None
        if place is None:
            found.lost.append(name)
        else:
            found.values[place] = _text(value)
    return found


def _flat(sent: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield an input's fields by the names of the form's."""
    for name, value in sent.items():
        if name == "parameters" and isinstance(value, Mapping):
            yield from value.items()
        elif name == "messages":
            yield from _conversation(list(value))
        elif name == "stop":
            yield name, "\n".join(value) if isinstance(value, list) else value
        elif name == "input" and isinstance(value, list):
            yield name, "\n".join(map(str, value))
        elif name == "response_format" and isinstance(value, Mapping):
            schema = (value.get("json_schema") or {}).get("schema")
            yield ("schema", schema) if schema is not None else (name, value)
        else:
            yield name, value


def _conversation(messages: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the system's message, the earlier ones and the newest of the user."""
    if messages and messages[0].get("role") == "system" and isinstance(messages[0]["content"], str):
        yield "system", messages.pop(0)["content"]
    if messages and messages[-1].get("role") == "user" and isinstance(messages[-1]["content"], str):
        yield MESSAGE, messages.pop()["content"]
    yield "messages", messages


def _place(name: str, known: Mapping[str, Field]) -> str | None:
    if name in known:
        return name
    # Several pictures are one field of the form, as is a single one.
    other = {"image": "images", "images": "image"}.get(name)
    return other if other in known else None


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
        return f"{value:g}" if isinstance(value, float) else str(value)
    return json.dumps(value, ensure_ascii=False)

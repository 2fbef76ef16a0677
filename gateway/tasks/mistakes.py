"""Converts pydantic's errors to one sentence for the client: field, value, what is accepted. Pure.

Pydantic reports a value that fits no alternative of a union once per alternative, with the
alternative's name in the path. This module selects the alternative that fits best, and its paths
contain only names that the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from gateway.errors import InvalidRequest

UNSUPPORTED: Final = "unsupported_parameter"
"""Type of pydantic's error for a known field that is refused by name; it is also the code."""
SHOWN_MAX: Final = 80
"""Maximum length of an invalid value in an error, in characters."""
_TYPES: Final = re.compile(
    r"(str|int|float|bool|none|bytes)"
    r"|(constrained|function|lax|strict|is|json)-.*"
    r"|(list|dict|tuple|set|literal|nullable|union|tagged-union|chain|default|model)\[.*"
)


def invalid_field(errors: Sequence[Mapping[str, Any]], *, prefix: str = "") -> InvalidRequest:
    """Return an error that names the invalid field, its value and what is accepted.

    ``errors`` are pydantic's; the first one is reported.
    """
    models = frozenset(_models(BaseModel))
    first, *others = _alternatives(errors, models)
    place = ".".join(
        str(part) for part in (*([prefix] if prefix else []), *_path(first["loc"], models))
    )
    if first["type"] == "extra_forbidden":
        return InvalidRequest("unknown_parameter", f"Unknown parameter: {place}.", param=place)
    if first["type"] == UNSUPPORTED:
        return InvalidRequest(UNSUPPORTED, f"{place} {first['msg']}", param=place)
    if first["type"] == "missing":
        return InvalidRequest(
            "missing_required_parameter", f"Missing required parameter: {place}.", param=place
        )
    return InvalidRequest(
        "invalid_value",
        f"Invalid value for {place}: {_joined([first, *others])} (got {_shown(first['input'])}).",
        param=place,
    )


def _alternatives(
    errors: Sequence[Mapping[str, Any]], models: frozenset[str]
) -> list[Mapping[str, Any]]:
    """Return the first error or, for a union, the first of each alternative that fits best."""
    first = errors[0]
    union = next((n for n, part in enumerate(first["loc"]) if _is_label(part, models)), None)
    if union is None:
        return [first]
    place = first["loc"][:union]
    branches: dict[str, list[Mapping[str, Any]]] = {}
    for error in errors:
        loc = error["loc"]
        if loc[:union] == place and len(loc) > union and _is_label(loc[union], models):
            branches.setdefault(loc[union], []).append(error)

    def fit(branch: list[Mapping[str, Any]]) -> tuple[bool, bool, int]:
        """Rank a branch: the JSON type is right, ``type`` is right, depth that it is valid to."""
        right_kind = not any(_is_kind(error) and error["loc"][:-1] == place for error in branch)
        right_type = not any(
            error["type"] == "literal_error"
            and error["loc"][-1] == "type"
            and len(error["loc"]) == union + 2
            for error in branch
        )
        return right_kind, right_type, max(len(_path(error["loc"], models)) for error in branch)

    best = max(map(fit, branches.values()))
    fitting = [branch for branch in branches.values() if fit(branch) == best]
    if len(fitting) == 1:
        # Resolve a union inside this alternative.
        inner = [{**error, "loc": (*place, *error["loc"][union + 1 :])} for error in fitting[0]]
        return _alternatives(inner, models)
    return [branch[0] for branch in fitting]


def _joined(errors: Sequence[Mapping[str, Any]]) -> str:
    """Join the distinct messages of all alternatives."""
    messages = dict.fromkeys(error["msg"].removeprefix("Value error, ") for error in errors)
    start = "Input should be "
    if len(messages) > 1 and all(one.startswith(start) for one in messages):
        return start + " or ".join(one.removeprefix(start) for one in messages)
    return "; or ".join(messages)


def _is_kind(error: Mapping[str, Any]) -> bool:
    """Whether the value has another JSON type than the alternative accepts."""
    return str(error["type"]).endswith("_type") or error["type"] == "none_required"


def _path(loc: Sequence[Any], models: frozenset[str]) -> tuple[Any, ...]:
    return tuple(part for part in loc if not _is_label(part, models))


def _is_label(part: Any, models: frozenset[str]) -> bool:
    """Whether a part of a path is pydantic's name of an alternative, not a field or an index."""
    return isinstance(part, str) and (part in models or _TYPES.fullmatch(part) is not None)


def _models(root: type[BaseModel]) -> Iterator[str]:
    for model in root.__subclasses__():
        yield model.__name__
        yield from _models(model)


def _shown(value: Any) -> str:
    """Format an invalid value as JSON, truncated."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError):
        text = repr(value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."

"""JSON schemas of the declared response types.

msgspec generates schemas of structs and dataclasses, but rejects unions of several ``TypedDict``,
which responses have; so those and the types around them are generated here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import msgspec

REF: Final = "#/components/schemas/"
_PLAIN: Final[Mapping[Any, Mapping[str, Any]]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
}


class Schemas:
    """Collects the schemas of types by name."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}
        self._types: dict[str, Any] = {}

    def of(self, kind: Any, bound: Mapping[Any, Any] | None = None) -> dict[str, Any]:
        """Return the schema of a type, or a reference to it. Raise ``TypeError`` for others."""
        bound = bound or {}
        if isinstance(kind, TypeVar):
            return self.of(bound[kind], bound)
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            metas = [each for each in arguments[1:] if isinstance(each, msgspec.Meta)]
            extra = [each.extra_json_schema for each in metas if each.extra_json_schema]
            return dict(extra[0]) if extra else self.of(arguments[0], bound)
        if origin in (NotRequired, Required):
            return self.of(arguments[0], bound)
        if origin is Literal:
            return _literal(arguments)
        if origin in (Union, types.UnionType):
            return _any_of([self.of(each, bound) for each in arguments])
        if is_typeddict(origin or kind):
            return self._reference(kind, bound)
        if isinstance(kind, type) and (
            issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)
        ):
            return self._foreign(kind)
        if origin is not None and issubclass(origin, Mapping):
            values = self.of(arguments[1], bound)
            return {"type": "object", "additionalProperties": values or True}
        if origin is not None and issubclass(origin, Sequence):
            return {"type": "array", "items": self.of(arguments[0], bound)}
        raise TypeError(f"{kind} cannot be described in the OpenAPI document")

    def _reference(self, kind: Any, bound: Mapping[Any, Any]) -> dict[str, Any]:
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        given = tuple(bound.get(each, each) for each in arguments)
        name = _name(origin, given)
        whole = (origin, given)
        if self._types.setdefault(name, whole) != whole:
            raise ValueError(f"two types of the document are called {name}")
        if name not in self.components:
            # Before its fields, which can refer to it.
            self.components[name] = {}
            inner = dict(zip(getattr(origin, "__parameters__", ()), given, strict=True))
            inner |= _inherited(origin, inner)
            self.components[name] = self._typed_dict(origin, name, inner)
        return {"$ref": REF + name}

    def _typed_dict(self, kind: Any, name: str, bound: Mapping[Any, Any]) -> dict[str, Any]:
        hints = get_type_hints(kind, include_extras=True)
        described = {"description": text} if (text := _doc(kind)) else {}
        required = [field for field, hint in hints.items() if _is_required(kind, field, hint)]
        return {
            "title": name,
            **described,
            "type": "object",
            "properties": {field: self.of(hint, bound) for field, hint in hints.items()},
            **({"required": required} if required else {}),
        }

    def _foreign(self, kind: type) -> dict[str, Any]:
        (schema,), found = msgspec.json.schema_components([kind], ref_template=REF + "{name}")
        for name, component in found.items():
            if self.components.setdefault(name, component) != component:
                raise ValueError(f"two types of the document are called {name}")
        return dict(schema)


def _name(origin: Any, arguments: Sequence[Any]) -> str:
    """Name a type: ``ListView[KeyView]`` is ``KeyViewListView``, ``list[X]`` is ``XList``."""
    parts = []
    for each in arguments:
        inner = get_origin(each) or each
        parts.append(_name(inner, get_args(each)))
    return "".join(parts) + re.sub(r"\W", "", origin.__name__[:1].upper() + origin.__name__[1:])


def _inherited(kind: Any, bound: Mapping[Any, Any]) -> dict[Any, Any]:
    """Map the type parameters of generic bases to their arguments."""
    found: dict[Any, Any] = {}
    for base in getattr(kind, "__orig_bases__", ()):
        origin = get_origin(base)
        if origin is not None and is_typeddict(origin):
            given = [bound.get(each, each) for each in get_args(base)]
            inner = dict(zip(origin.__parameters__, given, strict=True))
            found |= {**inner, **_inherited(origin, inner)}
    return found


def _is_required(kind: Any, field: str, hint: Any) -> bool:
    # String annotations hide ``NotRequired`` from ``__required_keys__``.
    if get_origin(hint) in (NotRequired, Required):
        return get_origin(hint) is Required
    return field in kind.__required_keys__


def _doc(kind: Any) -> str:
    text = kind.__dict__.get("__doc__")
    return " ".join(inspect.cleandoc(text).split()) if text else ""


def _literal(options: Sequence[Any]) -> dict[str, Any]:
    named = {"type": "string"} if all(isinstance(each, str) for each in options) else {}
    return {**named, **({"const": options[0]} if len(options) == 1 else {"enum": list(options)})}


def _any_of(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {} if {} in schemas else {"anyOf": list(schemas)}

"""The OpenAPI document as pages show it: routes, their fields, types and examples. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.catalog.listing import examples_of
from gateway.catalog.schema import CatalogEntry

REF: Final = "#/components/schemas/"
_CONSTRAINTS: Final[Mapping[str, str]] = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "minLength": "characters at least",
    "maxLength": "characters at most",
    "minItems": "items at least",
    "maxItems": "items at most",
}
_TYPES: Final[Mapping[str, Sequence[str]]] = {"input": ("object",)}
"""Types of fields that other routes have with another meaning."""
_USUAL: Final = frozenset({"content"})
"""Fields that an example has although they can be left out."""
_FILLED: Final[Mapping[str, Any]] = {"string": "…", "integer": 1, "number": 1, "boolean": True}


@dataclass(frozen=True, slots=True)
class DocumentField:
    """A field of a body or a type, or a parameter, whose ``place`` is its path or query."""

    name: str
    type: str
    links: Sequence[str]
    """Types that it refers to."""
    required: bool
    accepted: str
    default: str
    description: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Content:
    """What is sent or answered as one content type; fields of a form or of JSON."""

    media: str
    type: str
    links: Sequence[str]
    fields: Sequence[DocumentField]
    schema: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Answered:
    status: str
    description: str
    contents: Sequence[Content]


@dataclass(frozen=True, slots=True)
class Operation:
    """A route; ``words`` is what a search looks through."""

    id: str
    method: str
    path: str
    tag: str
    summary: str
    description: str
    needs_key: bool
    parameters: Sequence[DocumentField]
    bodies: Sequence[Content]
    answers: Sequence[Answered]
    words: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ApiReference:
    """The whole document."""

    version: str
    tags: Mapping[str, str]
    """Descriptions of the groups, in their order."""
    operations: Mapping[str, Operation]
    schemas: Mapping[str, Any] = field(repr=False)

    def find(self, words: str | None, tag: str | None) -> list[Operation]:
        """Return the routes that have all words, in the order of the groups."""
        asked = (words or "").lower().split()
        order = list(self.tags)
        found = [
            one
            for one in self.operations.values()
            if (tag is None or one.tag == tag) and all(word in one.words for word in asked)
        ]
        return sorted(found, key=lambda one: (order.index(one.tag), one.path, one.method))

    def fields_of(self, name: str) -> list[DocumentField]:
        """Return the fields of a type. Raise ``KeyError``."""
        return _fields(self.schemas[name])


def read_document(document: Mapping[str, Any]) -> ApiReference:
    tags = {each["name"]: each.get("description", "") for each in document.get("tags", ())}
    found = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if isinstance(operation, dict) and "operationId" in operation:
                made = _operation(path, method, operation, document["components"]["schemas"])
                found[made.id] = made
    return ApiReference(
        document["info"]["version"], tags, found, document["components"].get("schemas", {})
    )


def _operation(
    path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Operation:
    parameters = [
        _field(each["name"], each.get("schema", {}), bool(each.get("required")), each)
        for each in operation.get("parameters", ())
    ]
    bodies = _contents(operation.get("requestBody", {}).get("content", {}), schemas)
    answers = [
        Answered(
            status,
            each["description"].replace("`", ""),
            _contents(each.get("content", {}), schemas),
        )
        for status, each in operation["responses"].items()
    ]
    names = [each.name for each in (*parameters, *(one for body in bodies for one in body.fields))]
    texts = (
        *(path, method, operation["operationId"], operation.get("summary", "")),
        *(operation.get("description", ""), *operation.get("tags", ()), *names),
    )
    return Operation(
        id=operation["operationId"],
        method=method.upper(),
        path=path,
        tag=operation.get("tags", ["Other"])[0],
        summary=operation.get("summary", ""),
        description=operation.get("description", "").replace("`", ""),
        needs_key=operation.get("security") != [],
        parameters=parameters,
        bodies=bodies,
        answers=answers,
        words=" ".join(texts).lower(),
    )


def _contents(contents: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[Content]:
    found = []
    for media, content in contents.items():
        schema = content.get("schema", {})
        name = schema.get("$ref", "").removeprefix(REF)
        whole = schemas.get(name, schema)
        found.append(Content(media, _type(schema), _links(schema), _fields(whole), whole))
    return found


def _fields(schema: Mapping[str, Any]) -> list[DocumentField]:
    required = schema.get("required", ())
    return [
        _field(name, each, name in required, each)
        for name, each in schema.get("properties", {}).items()
    ]


def _field(
    name: str, schema: Mapping[str, Any], required: bool, described: Mapping[str, Any]
) -> DocumentField:
    default = schema.get("default")
    return DocumentField(
        name=name,
        type=_type(schema),
        links=_links(schema),
        required=required,
        accepted=_accepted(schema),
        default="" if default is None else json.dumps(default, ensure_ascii=False),
        description=_description(described) or _description(schema),
        place=described.get("in", "") if isinstance(described.get("in"), str) else "",
    )


def _members(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives of a schema, without null."""
    members = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [each for each in members if each.get("type") != "null"]


def _type(schema: Mapping[str, Any]) -> str:
    names = []
    for each in _members(schema):
        if "$ref" in each:
            names.append(each["$ref"].removeprefix(REF))
        elif each is not schema and ("anyOf" in each or "oneOf" in each):
            names.append(_type(each))
        elif each.get("type") == "array":
            names.append(f"list of {_type(each.get('items', {})) or 'values'}")
        elif "const" in each:
            names.append(json.dumps(each["const"]))
        else:
            kind = each.get("type", "any")
            names.append(" or ".join(kind) if isinstance(kind, list) else str(kind))
    return " or ".join(dict.fromkeys(names))


def _links(schema: Any) -> list[str]:
    return list(dict.fromkeys(_references(schema, depth=4)))


def _references(schema: Any, depth: int) -> Iterator[str]:
    if isinstance(schema, Mapping) and depth:
        if isinstance(ref := schema.get("$ref"), str):
            yield ref.removeprefix(REF)
        for key in ("anyOf", "oneOf", "items", "additionalProperties"):
            each = schema.get(key)
            for one in each if isinstance(each, list) else [each]:
                yield from _references(one, depth - 1)


def _accepted(schema: Mapping[str, Any]) -> str:
    found = []
    for each in _members(schema):
        if options := each.get("enum"):
            found.append(", ".join(map(str, options)))
        found += [f"{text} {each[key]:g}" for key, text in _CONSTRAINTS.items() if key in each]
        if each.get("type") == "array" and isinstance(each.get("items"), dict):
            found += [text for text in [_accepted(each["items"])] if text]
    return "; ".join(dict.fromkeys(found))


def _description(schema: Mapping[str, Any]) -> str:
    members = [schema, *_members(schema)]
    found = next((each["description"] for each in members if each.get("description")), "")
    return str(found).replace("`", "")


# --- Examples -------------------------------------------------------------------------------------


def example_of(content: Content, entry: CatalogEntry | None, schemas: Mapping[str, Any]) -> Any:
    """Return an example of a body: the document's own or one made from its required fields, for a
    model and with that model's own defaults."""
    body = _filled(content.schema, schemas)
    if entry is None or "model" not in {one.name for one in content.fields}:
        return body
    return {**body, "model": entry.name, **_defaults(content, entry)}


def _filled(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int = 5) -> Any:
    """Return a value that fits a schema: an example, a default, or what is required."""
    if isinstance(ref := schema.get("$ref"), str):
        return _filled(schemas.get(ref.removeprefix(REF), {}), schemas, depth - 1)
    if schema.get("examples"):
        return schema["examples"][0]
    for key in ("default", "const"):
        if schema.get(key) is not None:
            return schema[key]
    if options := schema.get("enum"):
        return "user" if "user" in options else options[0]
    if (members := _members(schema)) and members[0] is not schema:
        return _filled(members[0], schemas, depth - 1)
    kind = schema.get("type")
    if kind == "array" and depth:
        return [_filled(schema.get("items", {}), schemas, depth - 1)]
    if "properties" in schema and depth:
        required = (*schema.get("required", ()), *(_USUAL & schema["properties"].keys()))
        return {
            name: _filled(schema["properties"][name], schemas, depth - 1)
            for name in dict.fromkeys(required)
        }
    return _FILLED.get(kind, {}) if isinstance(kind, str) else {}


def _defaults(content: Content, entry: CatalogEntry) -> dict[str, Any]:
    """Return the values that a model has for the fields of a body."""
    own: dict[str, Any] = {
        **entry.default_parameters.model_dump(exclude_none=True),
        **{name: values[0] for name, values in (
            ("size", entry.sizes), ("voice", entry.known_voices), ("resolution", entry.resolutions),
        ) if values},
    }  # fmt: skip
    if entry.limits.output_tokens:
        own["max_tokens"] = entry.limits.output_tokens
    own["input"] = next(iter(examples_of(entry)), {"prompt": "a lighthouse at dusk"})
    names = {one.name for one in content.fields if one.type in _TYPES.get(one.name, (one.type,))}
    return {name: value for name, value in own.items() if name in names}

"""The OpenAPI document: bodies and parameters from Litestar, responses added here.

Responses are derived from handlers' return types, which mypy checks, and errors from the functions
that render them. A handler declares in its ``opt`` what its type cannot express: ``media`` lists
content types other than JSON, ``answers`` further statuses with the same content, and ``errors``
further errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, get_args, get_origin, get_type_hints

from litestar import Response
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.spec import OpenAPI
from litestar.response import Stream
from litestar.routes import BaseRoute, HTTPRoute

from gateway.api.http.content_types import EVENTS, JSON
from gateway.api.http.dialects import dialect_of
from gateway.api.http.operations import REASON_HEADER
from gateway.api.http.schemas import REF, Schemas
from gateway.checks.entered import REASON_MAX

_ORDER: Final = (402, 404, 409, 410, 413, 424, 429)
"""Errors of routes that can end in a hold."""
_ERRORS: Final[Mapping[int, str]] = {
    400: "A field, a parameter or the body is not valid.",
    401: "No key was sent, or one that is not valid.",
    402: "The credit, a budget or the key's limit does not cover the request.",
    403: "The key lacks the scope of the route, or its account may not do this.",
    404: "It does not exist, or belongs to another account.",
    409: "It conflicts with what is stored.",
    410: "It has expired and was deleted.",
    413: "The body, a file or the output is too large.",
    416: "The range is outside the content.",
    424: "The accepted request failed; nothing was charged.",
    429: "A limit was reached; try again after `Retry-After`.",
    500: "An error of the gateway, which is logged.",
    503: "The database, the queue or a store is unavailable, or no worker serves the model.",
}
_NAMES: Final = frozenset({"account", "after", "id"})
"""Parameters that refer to something which might not exist."""
_REASON: Final = {
    "name": REASON_HEADER,
    "in": "header",
    "required": False,
    "description": "Reason, recorded in the audit log if the body has none.",
    "schema": {"type": "string", "maxLength": REASON_MAX},
}
_RETRY_AFTER: Final = {
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string"}}
}
_HEADERS: Final[Mapping[int, Mapping[str, Any]]] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}


@dataclass
class DocumentConfig(OpenAPIConfig):
    """Litestar's configuration of the document; completes it when it is first requested."""

    routes: Sequence[BaseRoute] = field(default_factory=list)
    """The application's routes, set once it exists."""

    def to_openapi_schema(self) -> OpenAPI:
        made = super().to_openapi_schema()
        document = _Document(**{each.name: getattr(made, each.name) for each in fields(made)})
        document.routes = self.routes
        return document


class _Document(OpenAPI):
    routes: Sequence[BaseRoute]

    def to_schema(self) -> dict[str, Any]:
        document = super().to_schema()
        complete(document, self.routes)
        return document


def complete(document: dict[str, Any], routes: Iterable[BaseRoute]) -> None:
    """Replace the responses of each operation by those that its handler declares."""
    operations = list(_operations(document, routes))
    schemas = Schemas()
    for path, operation, handler in operations:
        error = schemas.of(_error_type(path))
        shown = [schemas.of(found) for found in _json_types(handler)]
        operation["responses"] = _answers(operation, handler, shown, error)
        if handler.opt.get("scope") is None:
            # Litestar omits an empty list, which means that no key is needed.
            operation.setdefault("security", handler.opt.get("security", []))
        elif dialect_of(path).key_header is not None:
            operation["security"] = [{"key": []}, {"header": []}]
        if handler.opt.get("scope") == "admin" and _changes(handler):
            operation.setdefault("parameters", []).append(_REASON)
    known = _reachable(document)
    if twice := known.keys() & schemas.components.keys():
        raise ValueError(f"two types of the document are called {min(twice)}")
    whole = {**known, **schemas.components}
    document["components"]["schemas"] = {
        # Client generators name classes by the title.
        name: {**whole[name], "title": name}
        for name in sorted(whole)
    }
    _split_null(document)


def _changes(handler: HTTPRouteHandler) -> bool:
    """Whether calls change something; a route that only ``reads`` can need a body, too."""
    return not handler.http_methods & {"GET", "HEAD"} and not handler.opt.get("reads")


def _operations(
    document: Mapping[str, Any], routes: Iterable[BaseRoute]
) -> Iterator[tuple[str, dict[str, Any], HTTPRouteHandler]]:
    for route in routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                for method in handler.http_methods:
                    shown = document["paths"].get(route.path_format, {}).get(method.lower())
                    if shown is not None:
                        yield route.path_format, shown, handler


def _members(handler: HTTPRouteHandler) -> Sequence[Any]:
    annotation = handler.parsed_fn_signature.return_type.annotation
    is_one = get_origin(annotation) in (None, Response) or isinstance(annotation, type)
    return (annotation,) if is_one else get_args(annotation)


def _json_types(handler: HTTPRouteHandler) -> list[Any]:
    """Return the types of JSON that a handler responds with."""
    found = []
    for member in _members(handler):
        if get_origin(member) is Response or member is Response:
            (member,) = get_args(member) or (Any,)
        if member not in (bytes, None, type(None), Any, Stream):
            found.append(member)
    return found


def _error_type(path: str) -> Any:
    return get_type_hints(dialect_of(path).render)["return"]


def _answers(
    operation: Mapping[str, Any],
    handler: HTTPRouteHandler,
    shown: Sequence[Mapping[str, Any]],
    error: Mapping[str, Any],
) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if shown:
        content[JSON] = {"schema": shown[0] if len(shown) == 1 else {"anyOf": list(shown)}}
    for media in handler.opt.get("media", ()):
        content[media] = {"schema": _content(media)}
    answers: dict[int, dict[str, Any]] = {}
    if content or handler.http_methods == {"HEAD"}:
        for status in (handler.status_code, *handler.opt.get("answers", ())):
            answers[status] = {"description": operation.get("summary", "")}
            if content and handler.http_methods != {"HEAD"}:
                answers[status]["content"] = content
    for status in sorted(_errors(operation, handler)):
        refused: dict[str, Any] = {"description": _ERRORS[status]}
        if handler.http_methods != {"HEAD"}:
            refused["content"] = {JSON: {"schema": error}}
        if status in _HEADERS:
            refused["headers"] = _HEADERS[status]
        if status in answers:
            # Such as a probe that responds with 503 and its own body.
            both = [*(each["schema"] for each in content.values()), error]
            refused["content"] = {JSON: {"schema": {"anyOf": both}}}
        answers[status] = refused
    return {str(status): answer for status, answer in sorted(answers.items())}


def _content(media: str) -> dict[str, Any]:
    """Return the schema of content other than JSON: text, bytes, or server-sent events."""
    if media == EVENTS:
        # Some tools apply it to each event, others to the whole text.
        return {"description": "Server-sent events, whose data is JSON."}
    return {"type": "string", **({} if media.startswith("text/") else {"format": "binary"})}


def _errors(operation: Mapping[str, Any], handler: HTTPRouteHandler) -> set[int]:
    scope, methods = handler.opt.get("scope"), handler.http_methods
    errors = {400, 500, *handler.opt.get("errors", ())}
    named = {each["name"]: each["in"] for each in operation.get("parameters", ())}
    if scope is not None:
        errors |= {401, 403, 503}
    if "path" in named.values() or named.keys() & _NAMES or scope == "admin":
        errors.add(404)
    if "requestBody" in operation:
        errors |= {404, 413}
    if scope == "inference" and methods & {"POST", "PUT"}:
        errors.update(_ORDER)
    return errors


def _reachable(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the components that bodies and parameters refer to, directly or indirectly."""
    schemas = document["components"].get("schemas", {})
    for item in document["paths"].values():
        for operation in item.values():
            schemas |= _hoisted(operation)
    names: set[str] = set()
    waiting = [
        [operation.get("parameters"), operation.get("requestBody")]
        for item in document["paths"].values()
        for operation in item.values()
        if isinstance(operation, dict)
    ]
    while waiting:
        for name in set(_references(waiting.pop())) - names:
            names.add(name)
            waiting.append(schemas[name])
    return {name: schemas[name] for name in sorted(names)}


def _hoisted(operation: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the definitions that pydantic puts into the schema of a form."""
    found: dict[str, Any] = {}
    for content in operation.get("requestBody", {}).get("content", {}).values():
        found |= content["schema"].pop("$defs", {})
    return found


def _split_null(node: Any) -> None:
    """Turn an enum with null into a union, which client generators support."""
    if isinstance(node, dict):
        options = node.get("enum")
        if isinstance(options, list) and None in options:
            others = [each for each in options if each is not None]
            kinds = [each for each in node.pop("type", ()) if each != "null"]
            del node["enum"]
            chosen = {"const": others[0]} if len(others) == 1 else {"enum": others}
            node["anyOf"] = [{"type": kinds[0], **chosen}, {"type": "null"}]
        for value in list(node.values()):
            _split_null(value)
    elif isinstance(node, list):
        for value in node:
            _split_null(value)


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                yield value.removeprefix(REF)
            else:
                yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)

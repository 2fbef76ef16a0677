"""Answers ordinary calls of hot routes without the framework's routing, guards and injection.

A route takes part by ``direct`` in its ``opt``. Its handler is called from here if the call is
ordinary: a key that was authenticated a moment ago, no unusual header, and a small body that fits
the handler's model. Any other call is passed on to the framework as it was received, so whatever is
refused before the handler is refused there. Errors of the handler get the framework's response.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec
from litestar import Litestar, Response
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream
from litestar.routes import HTTPRoute
from litestar.types import Message, Receive, Send
from pydantic import BaseModel

from gateway.accounts.keys import KeyInfo
from gateway.api.http.bodies import error_response
from gateway.api.http.headers import add_limit_headers
from gateway.api.http.large_bodies import SMALL
from gateway.api.http.request import ApiRequest, Services
from gateway.checks.decoding import ESCAPED_NULL
from gateway.requests.caller import Caller

_HOST: Final = re.compile(rb"[A-Za-z0-9.-]+(?::[0-9]+)?")
_UNUSUAL: Final = frozenset({b"origin", b"transfer-encoding"})


class _Route(NamedTuple):
    handler: HTTPRouteHandler
    call: Callable[..., Awaitable[Response[Any] | Stream]]
    body: type[BaseModel]
    bytes_max: int


class Direct:
    """Wraps the application; calls that are not answered directly are passed on to it."""

    def __init__(self, app: Litestar) -> None:
        self._app = app
        handlers = {
            route.path: route.route_handler_map["POST"][0]
            for route in app.routes
            if isinstance(route, HTTPRoute) and "POST" in route.route_handler_map
        }
        self._routes = {
            path: _read_route(handler)
            for path, handler in handlers.items()
            if handler.opt.get("direct")
        }

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        key = self._known_key(scope, route) if route is not None else None
        if route is not None and key is not None:
            message: Any = await receive()
            data = _read_body(message, route.body)
            if data is not None:
                scope["app"] = scope["litestar_app"] = self._app
                scope["route_handler"] = route.handler
                scope.setdefault("state", {})["call"] = Caller(key)
                request = ApiRequest(scope, receive, send)
                request.keep_body(message["body"])
                await _answer(route, request, data)
                return
            receive = _again(message, receive)
        await self._app(scope, receive, send)

    def _known_key(self, scope: Any, route: _Route) -> KeyInfo | None:
        """Return the key of a call; None if the call is not ordinary."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        kind, _, secret = headers.get(b"authorization", b"").partition(b" ")
        if (
            scope["method"] != "POST"
            or scope["query_string"]
            or scope.get("root_path")
            or len(headers) != len(scope["headers"])
            or not _UNUSUAL.isdisjoint(headers)
            or not _HOST.fullmatch(headers.get(b"host", b""))
            or not length.isdigit()
            or int(length) > route.bytes_max
            or kind.lower() != b"bearer"
        ):
            return None
        services: Services = self._app.state.services
        key = services.access.remembered(secret.strip().decode("latin-1"))
        known = key is not None and route.handler.opt["scope"] in key.scopes
        # A viewer is refused by the guard.
        return key if key is not None and known and key.member_role != "viewer" else None


def _read_route(handler: HTTPRouteHandler) -> _Route:
    # The framework could do more for the call, such as other parameters, which is not done here.
    assert set(handler.parsed_fn_signature.parameters) == {"request", "data"}, handler
    assert handler.parsed_data_field is not None
    assert handler.opt.get("scope"), handler
    assert not handler.guards, handler
    most = handler.resolve_request_max_body_size()
    return _Route(
        handler,
        handler.fn,
        handler.parsed_data_field.annotation,
        SMALL if most is None else min(most, SMALL),
    )


def _read_body(message: Any, schema: type[BaseModel]) -> BaseModel | None:
    """Read a body that arrived in one piece; None if it did not, or does not fit the model."""
    if (
        message["type"] != "http.request"
        or message.get("more_body")
        or ESCAPED_NULL in message["body"]
    ):
        return None
    try:
        return schema.model_validate(msgspec.json.decode(message["body"]))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _again(message: Any, receive: Receive) -> Receive:
    """Return a ``receive`` that returns a message again, and then the rest."""
    waiting = [message]

    async def receive_again() -> Any:
        return waiting.pop() if waiting else await receive()

    return receive_again


async def _answer(route: _Route, request: ApiRequest, data: BaseModel) -> None:
    """Call the handler and send its response, or that to its error."""
    scope: Any = request.scope
    try:
        response = await route.call(request=request, data=data)
    except Exception as error:  # a boundary, as in the framework
        response = error_response(request, error)
    if isinstance(response, Stream):

        async def send(message: Message) -> None:
            await add_limit_headers(message, scope)
            await request.send(message)

        stream = response.to_asgi_response(app=None, request=request)
        await stream.start_response(send)
        await stream.send_body(request.send, request.receive)
        return
    # What the framework would send for a response that is JSON already.
    content: Any = response.content
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.headers.items()
    ]
    headers.append((b"content-type", b"application/json"))
    headers.append((b"content-length", b"%d" % len(content)))
    start: Any = {"type": "http.response.start", "status": response.status_code, "headers": headers}
    body: Any = {"type": "http.response.body", "body": content, "more_body": False}
    await add_limit_headers(start, scope)
    await request.send(start)
    await request.send(body)

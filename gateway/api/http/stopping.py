"""Responds to clients that still wait when a stopping gateway's grace period ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.http.answers import encode_json
from gateway.api.http.dialects import dialect_of
from gateway.errors import Unavailable

RETRY_AFTER_S: Final = 1


def answered_when_stopped(app: ASGIApp) -> ASGIApp:
    """Wrap an application: a request that is cancelled before its response has begun gets 503.

    An accepted request continues if the client can find it again: by its ``Idempotency-Key``, or by
    repeating it immediately.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        def watched(message: Message) -> Awaitable[None]:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            return send(message)

        try:
            await app(scope, receive, watched)
        except asyncio.CancelledError:
            if started or "path" not in scope:  # such as the lifespan scope
                raise
            error = Unavailable(
                "gateway_stopping",
                "This gateway is stopping; send the request again.",
                retry_after_s=RETRY_AFTER_S,
            )
            await send(
                {
                    "type": "http.response.start",
                    "status": error.http_status,
                    "headers": [
                        (b"content-type", b"application/json"),
                        (b"connection", b"close"),
                        *((k.lower().encode(), v.encode()) for k, v in error.headers.items()),
                    ],
                }
            )
            body = encode_json(dialect_of(scope["path"]).render(error))
            await send({"type": "http.response.body", "body": body, "more_body": False})

    return wrapped

"""Answers the clients that still wait when a gateway ends and its grace is over."""

from __future__ import annotations

import asyncio
from typing import Final

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.http.answers import encode_json
from gateway.api.http.dialects import dialect_of
from gateway.errors import Unavailable

RETRY_AFTER_S: Final = 1


def answered_when_stopped(app: ASGIApp) -> ASGIApp:
    """Wrap an application: a request that the server cancels before its answer has begun gets 503.

    What it ordered goes on where the order can be found again: by its ``Idempotency-Key``, or when
    the client repeats it at once.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await app(scope, receive, watched)
        except asyncio.CancelledError:
            if started or "path" not in scope:  # as that of a lifespan
                raise
            error = Unavailable(
                "gateway_stopping",
                "This gateway is being stopped; send the request again.",
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

"""The page at ``/console/enter``, and what its forms send: a link's secret, its code, or a key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeVar

from litestar import Controller, Response, get, post
from litestar.params import FromQuery
from litestar.response import Redirect

from gateway.accounts.sessions import Method, Session
from gateway.api.http.request import ApiRequest
from gateway.console.addresses import may_enter, public_address
from gateway.console.csrf import entrance_token, new_entrance_secret
from gateway.console.guards import address_of
from gateway.console.rendering import page
from gateway.console.sessions import (
    entrance_cookie,
    entrance_of,
    entrance_secret,
    network_of,
    session_cookie,
)
from gateway.console.visitors import visitor_of
from gateway.errors import Forbidden, NotFound
from gateway.metrics import CONSOLE_ENTRANCES
from gateway.operations.entrance.sessions import Credential, Entered, enter

HOME: Final = "/console"
REFUSED: Final = (
    "This is not a valid link, code or key: it is unknown, was used already, has expired or was "
    "revoked."
)
FLOOR_S: Final = 0.15
"""Minimum time of an attempt, so that it does not show why one was refused."""

T = TypeVar("T")


class EntranceController(Controller):
    path = "/enter"
    opt = {"open": True}

    @get("/")
    async def show(self, request: ApiRequest, next: FromQuery[str] = HOME) -> Response[Any]:
        return await entrance_page(request, next=next)

    @post("/link")
    async def by_link(self, request: ApiRequest) -> Response[Any]:
        return await _enter(request, "link")

    @post("/code")
    async def by_code(self, request: ApiRequest) -> Response[Any]:
        return await _enter(request, "code")

    @post("/key")
    async def by_key(self, request: ApiRequest) -> Response[Any]:
        if not request.services.settings.console_key_login:
            raise NotFound("not_found", "Entering with a key is turned off.")
        return await _enter(request, "key")


async def entrance_page(
    request: ApiRequest, *, next: str, message: str = "", status: int = 200
) -> Response[Any]:
    """Return the page with its forms, and the cookie that their token belongs to."""
    settings, address = request.services.settings, address_of(request)
    secret = entrance_secret(request, address) or new_entrance_secret()
    public = public_address(settings)
    found = await page(
        request,
        visitor_of(request),
        "entrance/enter.html",
        title="Enter",
        status=status,
        secret=True,
        csrf=entrance_token(secret, request.services.pepper),
        next=local_path(next),
        message=message,
        open=may_enter(settings, address),
        public=None if public is None else public.origin,
        key_login=settings.console_key_login,
        oidc=settings.oidc_issuer is not None,
    )
    found.set_cookie(entrance_cookie(address, secret))
    return found


def entered(request: ApiRequest, token: str, session: Session, next: str) -> Response[Any]:
    """Return the redirect of a visitor who has entered, with the cookie of the session."""
    cookie = session_cookie(address_of(request), token, session)
    return Redirect(local_path(next), status_code=303, cookies=[cookie])


def local_path(path: str) -> str:
    """Return a path of the console as it is, and the front page in place of anything else."""
    plain = path.isascii() and path.isprintable() and "\\" not in path
    own = path == HOME or path.startswith((f"{HOME}/", f"{HOME}?"))
    return path if plain and own and not path.startswith(f"{HOME}/enter") else HOME


async def attempt(
    request: ApiRequest, method: Method, try_it: Callable[[], Awaitable[T | None]]
) -> T | None:
    """Make an attempt to prove who one is. Raise ``TooManyRequests`` if there were too many."""
    attempts, network = request.services.attempts, network_of(request, v4=32, v6=64)
    await attempts.begin(network)
    began = time.monotonic()
    found = await try_it()
    if found is not None:
        await attempts.succeeded(network)
    else:
        await attempts.failed(method)
        await asyncio.sleep(max(0.0, began + FLOOR_S - time.monotonic()))
    CONSOLE_ENTRANCES.labels(method, "failed" if found is None else "succeeded").inc()
    return found


async def _enter(request: ApiRequest, kind: Literal["link", "code", "key"]) -> Response[Any]:
    services, form = request.services, await request.form()
    if not may_enter(services.settings, address_of(request)):
        raise Forbidden("insecure_address", "The console cannot be entered without TLS here.")
    proof = Credential.entered(kind, str(form.get("secret", "")))
    entrance = entrance_of(request, lasting=form.get("lasting") == "yes")

    async def try_it() -> Entered | None:
        return await services.database.write(lambda each: enter(each, proof, entrance=entrance))

    found = await attempt(request, proof.method, try_it)
    next = str(form.get("next", HOME))
    if found is None:
        return await entrance_page(request, next=next, message=REFUSED, status=403)
    return entered(request, found.token, found.session, next)

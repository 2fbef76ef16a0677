"""Guards: checks of the key, the path, the query and the account, before a body is read."""

from __future__ import annotations

import hmac
import time
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from litestar.connection import ASGIConnection, Request
from litestar.handlers import BaseRouteHandler

from gateway.accounts.keys import KeyInfo
from gateway.accounts.rates import refuse_overrun, wanted
from gateway.accounts.roles import Area, check_member, check_role, least_role
from gateway.api.http.access import call_of
from gateway.api.http.dialects import dialect_of
from gateway.api.http.large_bodies import may_be_large
from gateway.api.http.request import services_of
from gateway.checks.decoding import check_text
from gateway.errors import Forbidden, NotFound, Unauthorized
from gateway.ledger.prices import LIST
from gateway.requests.caller import Caller
from gateway.settings import Settings

VISITOR: Final = KeyInfo(
    id=0,
    account_id=LIST,
    account="",
    name="",
    prefix="",
    scopes=frozenset({"read"}),
    created_at=datetime(1970, 1, 1, tzinfo=UTC),
    expires_at=None,
    revoked_at=None,
    requests_per_minute=None,
    tokens_per_minute=None,
    spend_limit_nanos=None,
    spent_nanos=0,
    held_nanos=0,
)
"""Stands for the key of a call without one: it sees list prices."""


async def require_key(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Litestar guard: authenticate, then check the scope in the route's ``opt``."""
    scope: str | None = handler.opt.get("scope")
    # OPTIONS only lists the methods of a path; a browser sends it without a key.
    if scope is None or connection.scope.get("method") == "OPTIONS":
        return
    services = services_of(connection)
    if handler.opt.get("public") and services.settings.public_catalog and not _sent(connection):
        client = connection.scope.get("client")
        services.visitors.admit(client[0] if client else "", time.monotonic())
        connection.scope["state"]["call"] = Caller(VISITOR)
        return
    secret = _secret(connection)
    key = await services.access.key(secret, remembered=bool(handler.opt.get("holds")))
    connection.scope["state"]["key"] = key
    if scope not in key.scopes:
        raise Forbidden(
            "missing_scope",
            f"This call requires the scope {scope}; the key has {', '.join(sorted(key.scopes))}.",
        )
    if scope == "admin":
        _check_role(connection, handler, key)
    else:
        _check_member(scope, handler, key)
    connection.scope["state"]["call"] = Caller(key)
    if isinstance(connection, Request) and may_be_large(connection):
        await services.bodies.receive(connection, handler, key)


def _check_role(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler, key: KeyInfo
) -> None:
    """Check that an administrator's role may read or write the area of a route."""
    area: Area = handler.opt["area"]
    write = connection.scope.get("method") not in ("GET", "HEAD")
    # A key that a gateway of an earlier version created has no role yet.
    check_role(key.role or "operator", area, write=write)


def _check_member(scope: str, handler: BaseRouteHandler, key: KeyInfo) -> None:
    """Check that a key of a member has the role that a route needs.

    Other keys are restricted by their scopes; routes that manage keys are for owners only.
    """
    if key.member_role is not None:
        check_member(key.member_role, least_role(scope, handler.opt.get("least")))
    elif handler.opt.get("members_only"):
        raise Forbidden("role_not_allowed", "This call requires a key of a member of the account.")


async def check_scraper(connection: ASGIConnection[Any, Any, Any, Any], settings: Settings) -> None:
    """Check that a caller may read the metrics, which include revenue by model.

    The token is compared without the database, so that scraping works during an outage of it.
    Raise ``Unauthorized``, ``Forbidden``, or ``NotFound`` if metrics are off.
    """
    if settings.metrics == "open":
        return
    if settings.metrics == "off":
        raise NotFound("not_found", "Metrics are turned off by TOLLGATE_METRICS.")
    secret = _secret(connection)
    token = settings.metrics_token.get_secret_value() if settings.metrics_token else ""
    if token and hmac.compare_digest(secret.encode(), token.encode()):
        return
    key = await services_of(connection).access.key(secret, remembered=False)
    if "admin" not in key.scopes:
        raise Forbidden(
            "missing_scope", "Metrics require a key with the scope admin, or the scraper's token."
        )


async def check_address(
    connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler
) -> None:
    """Litestar guard: refuse U+0000 in the path and the query."""
    check_text(connection.scope["path"], "")
    if b"%00" in connection.scope["query_string"]:
        for name, value in connection.query_params.multi_items():
            check_text(name, "")
            check_text(value, name)


async def may_store(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Litestar guard of routes that store something: a file, a batch, a voice or an upload URL.

    It runs before the body is read, so that an account that is suspended, has nothing to spend, is
    at a limit per minute or has no room is refused immediately. Counts the call in the requests
    per minute. Raise ``TollgateError``.
    """
    services = services_of(connection)
    call = call_of(connection)
    announced = connection.headers.get("content-length", "")
    size = int(announced) if announced.isdecimal() and handler.opt.get("stores_body") else 0
    await services.room.check(call.key.account_id, size=size)
    found = wanted(call.key.limits, call.key.id, "", tokens=0)
    call.taken = await services.rates.take([rate for rate in found if rate.unit == "requests"])
    refuse_overrun(call.taken.usages)


def _sent(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Return the secret that was sent; empty if there is none."""
    header = dialect_of(connection.scope["path"]).key_header
    kind, _, secret = connection.headers.get("authorization", "").partition(" ")
    found = connection.headers.get(header, "").strip() if header else ""
    return secret.strip() if not found and kind.lower() == "bearer" else found


def _secret(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Return the secret that was sent. Raise ``Unauthorized`` if there is none."""
    return _sent(connection) or refuse_visitor(connection)


def refuse_visitor(connection: ASGIConnection[Any, Any, Any, Any]) -> NoReturn:
    """Raise ``Unauthorized``, as for a call without a key."""
    header = dialect_of(connection.scope["path"]).key_header
    how = f"{header}: tg_…" if header else "Authorization: Bearer tg_…"
    raise Unauthorized("invalid_api_key", f"No API key was sent. Send it as '{how}'.")

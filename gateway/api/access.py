"""Who is calling: the key of a request, checked before its body is read.

Every handler names the scope that it needs in its ``opt``. A key that spends money is read again
inside the hold's own transaction, so what is remembered here for a few seconds can admit nothing
that has been revoked; every other route asks the database.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account
from gateway.accounts.keys import KeyInfo, authenticate, hash_secret
from gateway.api.dialects import dialect_of
from gateway.database import Database
from gateway.errors import Forbidden, NotFound, Unauthorized
from gateway.requests.call import Call

REMEMBER_S: Final = 10.0
REMEMBER_MAX: Final = 10_000


class Access:
    """Finds the key of a secret; remembers it briefly for the routes that say so."""

    def __init__(self, database: Database, *, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper
        # By the hash: secrets are not kept, not even in memory.
        self._remembered: dict[bytes, tuple[float, KeyInfo]] = {}

    async def key(self, secret: str, *, remembered: bool) -> KeyInfo:
        """Raise ``Unauthorized`` if no valid key has this secret."""
        now = time.monotonic()
        name = hash_secret(secret, self._pepper)
        if remembered:
            known = self._remembered.get(name)
            if known is not None and now - known[0] < REMEMBER_S:
                return known[1]
        key = await self._database.read(
            lambda connection: authenticate(connection, secret, self._pepper)
        )
        if len(self._remembered) >= REMEMBER_MAX:
            self._remembered.clear()
        self._remembered[name] = (now, key)
        return key


async def require_key(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Litestar guard: authenticate, then check the scope in the route's ``opt``."""
    scope: str | None = handler.opt.get("scope")
    if scope is None:
        return
    secret = _secret(connection)
    access: Access = connection.app.state.access
    key = await access.key(secret, remembered=scope == "inference")
    if scope not in key.scopes:
        raise Forbidden(
            "missing_scope",
            f"This key has the scopes {', '.join(sorted(key.scopes))}; this call needs {scope}.",
        )
    connection.state.call = Call(key)


def _secret(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Raise ``Unauthorized`` if there is none."""
    own = dialect_of(connection.scope["path"]).key_header
    kind, _, secret = connection.headers.get("authorization", "").partition(" ")
    found = connection.headers.get(own, "").strip() if own else ""
    if not found and kind.lower() == "bearer":
        found = secret.strip()
    if not found:
        how = f"{own}: tg_…" if own else "Authorization: Bearer tg_…"
        raise Unauthorized("invalid_api_key", f"No API key was sent. Send it as '{how}'.")
    return found


def call_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Call:
    """The call that ``require_key`` let through."""
    call: Call = connection.state.call
    return call


def find_asked(
    request: ASGIConnection[Any, Any, Any, Any], connection: Connection, account: str | None
) -> Account:
    """The account that a call asks about: its own, or with the scope ``admin`` any that it names.

    Raise ``NotFound`` for another one, whether or not it exists.
    """
    key = caller(request)
    if account is None:
        return find_account(connection, key.account_id)
    with contextlib.suppress(LookupError):
        found = find_account(connection, account)
        if found.id == key.account_id or "admin" in key.scopes:
            return found
    raise NotFound("account_not_found", f"There is no account {account!r}.", param="account")


def caller(connection: ASGIConnection[Any, Any, Any, Any]) -> KeyInfo:
    """The key that ``require_key`` found."""
    return call_of(connection).key

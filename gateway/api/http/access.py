"""Who is calling: the key of a request, checked before its body is read.

Every handler names the scope that it needs in its ``opt``. A route that ends in a hold says so by
``holds``: the hold's own transaction reads its key again, so a key that is remembered here for a
few seconds admits nothing after it was revoked. Every other route asks the database, so that a
revocation acts at once on all of them and in every gateway.
"""

from __future__ import annotations

import contextlib
import hmac
import time
from collections import OrderedDict
from typing import Any, Final, Generic, TypeVar

from litestar.connection import ASGIConnection, Request
from litestar.handlers import BaseRouteHandler
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account, find_accounts
from gateway.accounts.keys import KeyInfo, authenticate, hash_secret, unknown_key
from gateway.api.http.dialects import dialect_of
from gateway.api.http.large_bodies import Bodies, may_be_large
from gateway.errors import Forbidden, NotFound, Unauthorized
from gateway.requests.caller import Caller
from gateway.settings import Settings
from gateway.sql.database import Database

T = TypeVar("T")

REMEMBER_S: Final = 10.0
REMEMBER_MAX: Final = 20_000
"""Keys remembered; the one that was used least recently is dropped first."""
UNKNOWN_S: Final = 5.0
"""Time for which a secret that no key has is refused without asking again."""
UNKNOWN_MAX: Final = 10_000


class Recent(Generic[T]):
    """What was found by a name, for a while; the least recently used is dropped first."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._found: OrderedDict[bytes, tuple[float, T]] = OrderedDict()

    def get(self, name: bytes, now: float) -> T | None:
        found = self._found.get(name)
        if found is None or now - found[0] >= self._seconds:
            return None
        self._found.move_to_end(name)
        return found[1]

    def put(self, name: bytes, value: T, now: float) -> None:
        self._found[name] = (now, value)
        self._found.move_to_end(name)
        if len(self._found) > self._most:
            self._found.popitem(last=False)


class Access:
    """Finds the key of a secret; remembers it briefly for the routes that say so."""

    def __init__(self, database: Database, *, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper
        # By the hash: secrets are not kept, not even in memory.
        self._remembered = Recent[KeyInfo](REMEMBER_S, REMEMBER_MAX)
        self._unknown = Recent[bool](UNKNOWN_S, UNKNOWN_MAX)

    async def key(self, secret: str, *, remembered: bool) -> KeyInfo:
        """Raise ``Unauthorized`` if no valid key has this secret."""
        now = time.monotonic()
        name = hash_secret(secret, self._pepper)
        known = self._remembered.get(name, now) if remembered else None
        if known is not None:
            return known
        if self._unknown.get(name, now) is not None:
            raise unknown_key()
        try:
            key = await self._database.read(
                lambda connection: authenticate(connection, secret, self._pepper)
            )
        except Unauthorized as error:
            # Only an unknown one: a key that was revoked or has expired says so each time.
            if error.code == "invalid_api_key":
                self._unknown.put(name, True, now)
            raise
        self._remembered.put(name, key, now)
        return key


async def require_key(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Litestar guard: authenticate, then check the scope in the route's ``opt``."""
    scope: str | None = handler.opt.get("scope")
    # OPTIONS only says which methods a path takes; a browser asks it without a key.
    if scope is None or connection.scope.get("method") == "OPTIONS":
        return
    secret = _secret(connection)
    access: Access = connection.app.state.access
    key = await access.key(secret, remembered=bool(handler.opt.get("holds")))
    if scope not in key.scopes:
        raise Forbidden(
            "missing_scope",
            f"This key has the scopes {', '.join(sorted(key.scopes))}; this call needs {scope}.",
        )
    connection.state.call = Caller(key)
    if isinstance(connection, Request) and may_be_large(connection):
        bodies: Bodies = connection.app.state.bodies
        await bodies.take_in(connection, handler, key)


async def check_scraper(connection: ASGIConnection[Any, Any, Any, Any], settings: Settings) -> None:
    """Check that a caller may read the metrics, which include revenue by model.

    The token is compared without the database, so that a scraper sees an outage of it. Raise
    ``Unauthorized``, ``Forbidden``, or ``NotFound`` if metrics are off.
    """
    if settings.metrics == "open":
        return
    if settings.metrics == "off":
        raise NotFound("not_found", "Metrics are turned off here (TOLLGATE_METRICS).")
    secret = _secret(connection)
    token = settings.metrics_token.get_secret_value() if settings.metrics_token else ""
    if token and hmac.compare_digest(secret.encode(), token.encode()):
        return
    access: Access = connection.app.state.access
    key = await access.key(secret, remembered=False)
    if "admin" not in key.scopes:
        raise Forbidden(
            "missing_scope", "Metrics need a key of the scope admin, or the token for scrapers."
        )


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


def call_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Caller:
    """The call that ``require_key`` let through."""
    call: Caller = connection.state.call
    return call


def find_asked(
    request: ASGIConnection[Any, Any, Any, Any], connection: Connection, account: str | None
) -> Account:
    """The account that a call asks about: its own, or with the scope ``admin`` any that it names.

    Raise ``NotFound`` for another one, whether or not it exists, and ``AmbiguousAccount`` to an
    administrator who can mean two.
    """
    key = caller(request)
    if account is None:
        return find_account(connection, key.account_id)
    if "admin" in key.scopes:
        with contextlib.suppress(LookupError):
            return find_account(connection, account)
    for found in find_accounts(connection, account):
        if found.id == key.account_id:
            return found
    raise NotFound("account_not_found", f"There is no account {account!r}.", param="account")


def caller(connection: ASGIConnection[Any, Any, Any, Any]) -> KeyInfo:
    """The key that ``require_key`` found."""
    return call_of(connection).key

"""Authentication: finds the key of a caller, and the account that a call is about.

Every handler declares the scope that it needs in its ``opt``. A route that ends in a hold declares
``holds``: the hold's transaction reads the key again, so a key that is cached here for a few
seconds admits nothing after it was revoked. Every other route queries the database, so that a
revocation takes effect immediately on all of them and in every gateway.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import OrderedDict
from typing import Any, Final, Generic, TypeVar

from litestar.connection import ASGIConnection
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account, find_accounts
from gateway.accounts.key_uses import KeyUses
from gateway.accounts.keys import KeyInfo, authenticate, unknown_key
from gateway.accounts.roles import Area, check_role
from gateway.errors import NotFound, Unauthorized
from gateway.requests.caller import Caller
from gateway.sql.database import Database

T = TypeVar("T")

REMEMBER_S: Final = 10.0
REMEMBER_MAX: Final = 20_000
"""Maximum number of cached keys; the least recently used is dropped first."""
UNKNOWN_S: Final = 5.0
"""Time for which an unknown secret is refused without another query."""
UNKNOWN_MAX: Final = 10_000


class Recent(Generic[T]):
    """A cache whose items expire; the least recently used is dropped first."""

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
    """Finds the key of a secret; caches it briefly for routes that declare ``holds``."""

    def __init__(self, database: Database, *, pepper: bytes, uses: KeyUses) -> None:
        self._database = database
        self._uses = uses
        self._pepper = pepper
        # By a keyed hash of this process: secrets are not stored, not even in memory.
        self._hash_key = os.urandom(32)
        self._remembered = Recent[KeyInfo](REMEMBER_S, REMEMBER_MAX)
        self._unknown = Recent[bool](UNKNOWN_S, UNKNOWN_MAX)

    def remembered(self, secret: str) -> KeyInfo | None:
        """Return the key with this secret if it was authenticated a moment ago."""
        now = time.monotonic()
        known = self._remembered.get(self._name(secret), now)
        if known is not None:
            self._uses.note(known.id, now)
        return known

    async def key(self, secret: str, *, remembered: bool) -> KeyInfo:
        """Return the key with this secret. Raise ``Unauthorized`` if no valid key has it."""
        now = time.monotonic()
        name = self._name(secret)
        known = self._remembered.get(name, now) if remembered else None
        if known is not None:
            self._uses.note(known.id, now)
            return known
        if self._unknown.get(name, now) is not None:
            raise unknown_key()
        try:
            key = await self._database.read(
                lambda connection: authenticate(connection, secret, self._pepper)
            )
        except Unauthorized as error:
            # Only unknown secrets: a revoked or expired key gets its own error each time.
            if error.code == "invalid_api_key":
                self._unknown.put(name, True, now)
            raise
        self._remembered.put(name, key, now)
        self._uses.note(key.id, now)
        return key

    def _name(self, secret: str) -> bytes:
        return hashlib.blake2b(secret.encode(), key=self._hash_key, digest_size=32).digest()


def call_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Caller:
    """Return the caller that ``require_key`` authenticated."""
    call: Caller = connection.scope["state"]["call"]
    return call


def requested_account(
    request: ASGIConnection[Any, Any, Any, Any],
    connection: Connection,
    account: str | None,
    area: Area,
) -> Account:
    """Return the account that a call is about: the caller's or, with the scope ``admin`` and a role
    that may read the area, the one named.

    Raise ``NotFound`` for another account, whether or not it exists, ``AmbiguousAccount`` if an
    administrator's name fits two, and ``Forbidden`` if the role may not read the area.
    """
    key = call_of(request).key
    if account is None:
        return find_account(connection, key.account_id)
    if "admin" in key.scopes:
        with contextlib.suppress(LookupError):
            named = find_account(connection, account)
            if named.id != key.account_id:
                check_role(key.role or "operator", area, write=False)
            return named
    for found in find_accounts(connection, account):
        if found.id == key.account_id:
            return found
    raise NotFound("account_not_found", f"No such account: {account!r}.", param="account")

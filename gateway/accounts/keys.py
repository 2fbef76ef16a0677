"""API keys: authenticate calls. A secret is displayed once; only its keyed hash is stored.

A key has scopes, can expire or be revoked, and can be limited to models, and in requests, tokens
and money. The spend limit is enforced by the ledger's transactions and by a CHECK of the key's row.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    bindparam,
    false,
    func,
    insert,
    or_,
    select,
    update,
)

from gateway.accounts.limits import LIMIT_MAX, Limit, key_limit, limits_of_key, read_limit
from gateway.accounts.locks import lock_accounts
from gateway.accounts.roles import MemberRole, Role
from gateway.checks.decoding import ID_MAX, read_id
from gateway.checks.entered import NAME_MAX, check_moment, check_text
from gateway.errors import Forbidden, Unauthorized
from gateway.sql.database import upsert
from gateway.tables.core import accounts, keys, rate_limits
from gateway.tables.users import members, users

SCOPES: Final = ("inference", "read", "admin")
PREFIX_LENGTH: Final = 10
CONSOLE_KEY: Final = "console"
"""Name, and prefix, of the key with which the console orders for an account."""
KeyStatus: TypeAlias = Literal["active", "expired", "revoked"]
KEY_STATUSES: Final[tuple[KeyStatus, ...]] = get_args(KeyStatus)


class KeyValues(TypedDict, total=False):
    """Attributes of a key that can be changed; None removes a limit."""

    name: str
    expires_at: datetime | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    spend_limit_nanos: int | None
    models: Collection[str] | None


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key without its secret."""

    id: int
    account_id: int
    account: str
    name: str
    prefix: str
    scopes: frozenset[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    spend_limit_nanos: int | None
    spent_nanos: int
    held_nanos: int
    models: frozenset[str] | None = None
    """Models that it may use; None: all."""
    replaces: int | None = None
    """The key that it replaces."""
    role: Role | None = None
    """Role of an administrator's key; None without the scope ``admin``."""
    user_id: int | None = None
    """The member whose key it is."""
    member_role: MemberRole | None = None
    """The member's role; None if it is nobody's, and restricted by its scopes only."""
    keeps_inputs: bool = False
    """Whether its account keeps what is sent with requests."""
    limits: tuple[Limit, ...] = ()
    """All limits that can cover its requests; read by ``authenticate`` only."""

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raise ``Forbidden`` if it may not use a model."""
        if self.models is not None and model not in self.models:
            raise Forbidden(
                "model_not_allowed",
                f"The API key {self.prefix}… may not use the model {model!r}, only "
                f"{', '.join(sorted(self.models))}.",
                param="model",
            )


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """Keys to list; None is not filtered. ``name`` is the start of a name."""

    account_id: int | None = None
    status: KeyStatus | None = None
    name: str | None = None

    def conditions(self, now: datetime) -> list[ColumnElement[bool]]:
        found: list[ColumnElement[bool]] = []
        if self.account_id is not None:
            found.append(keys.c.account_id == self.account_id)
        if self.name is not None:
            found.append(keys.c.name.startswith(self.name, autoescape=True))
        if self.status is not None:
            revoked = keys.c.revoked_at.is_not(None)
            expired = and_(~revoked, func.coalesce(keys.c.expires_at <= now, false()))
            found.append(
                {"revoked": revoked, "expired": expired, "active": and_(~revoked, ~expired)}[
                    self.status
                ]
            )
        return found


def create_key(
    connection: Connection,
    account_id: int,
    *,
    pepper: bytes,
    name: str = "",
    scopes: Collection[str] = ("inference", "read"),
    expires_at: datetime | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    spend_limit_nanos: int | None = None,
    models: Collection[str] | None = None,
    replaces: int | None = None,
    role: Role | None = None,
    user_id: int | None = None,
) -> tuple[str, KeyInfo]:
    """Create a key; return its secret, which is not stored, and the key.

    A key with the scope ``admin`` has a role, by default ``operator``. The key of a user has the
    user's role in the account. Raise ``ValueError`` if a scope is unknown or none is given, another
    key has a role, a name or moment cannot be stored, a limit is not positive, or the user is not
    a member or disabled.
    """
    values = check_values(
        KeyValues(
            name=name,
            expires_at=expires_at,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            spend_limit_nanos=spend_limit_nanos,
            models=models,
        )
    )
    if not scopes:
        raise ValueError(f"a key needs a scope; use {', '.join(SCOPES)}")
    if unknown := set(scopes) - set(SCOPES):
        raise ValueError(f"unknown scope {min(unknown)!r}; use {', '.join(SCOPES)}")
    if role is not None and "admin" not in scopes:
        raise ValueError(f"only keys with the scope admin have a role, such as {role}")
    member_role = None if user_id is None else _member_role(connection, account_id, user_id)
    if member_role is not None and "admin" in scopes:
        raise ValueError("a key of a member cannot have the scope admin")
    secret = ("tga_" if "admin" in scopes else "tg_") + secrets.token_urlsafe(30)
    id = connection.execute(
        insert(keys)
        .values(
            **values,
            account_id=account_id,
            prefix=secret[:PREFIX_LENGTH],
            secret_hash=hash_secret(secret, pepper),
            scopes=sorted(scopes),
            created_at=datetime.now(UTC),
            replaces=replaces,
            role=(role or "operator") if "admin" in scopes else None,
            user_id=user_id,
            member_role=member_role,
        )
        .returning(keys.c.id)
    ).scalar_one()
    row = connection.execute(_KEYS.where(keys.c.id == id)).mappings().one()
    return secret, _info(row)


def authenticate(connection: Connection, secret: str, pepper: bytes) -> KeyInfo:
    """Find the key of a secret, with its limits.

    Raise ``Unauthorized`` if it is unknown, revoked or expired.
    """
    found = connection.execute(_LIMITED, {"secret_hash": hash_secret(secret, pepper)})
    rows = found.mappings().all()
    if not rows:
        raise unknown_key()
    key = replace(_info(rows[0]), limits=_limits(rows))
    if key.revoked_at is not None:
        raise Unauthorized("key_revoked", f"The API key {key.prefix}… has been revoked.")
    if key.expires_at is not None and key.expires_at <= datetime.now(UTC):
        raise Unauthorized("key_expired", f"The API key {key.prefix}… has expired.")
    return key


def find_console_key(connection: Connection, account_id: int, pepper: bytes) -> KeyInfo | None:
    """Return the key with which the console orders for an account, with its limits."""
    found = connection.execute(_LIMITED, {"secret_hash": _console_hash(account_id, pepper)})
    rows = found.mappings().all()
    return replace(_info(rows[0]), limits=_limits(rows)) if rows else None


def create_console_key(
    connection: Connection, account_id: int, *, spend_limit_nanos: int, pepper: bytes
) -> KeyInfo:
    """Create the key with which the console orders for an account, unless it exists.

    Nobody has its secret: its hash is not that of any secret.
    """
    made = upsert(connection, keys).values(
        account_id=account_id,
        name=CONSOLE_KEY,
        prefix=CONSOLE_KEY,
        secret_hash=_console_hash(account_id, pepper),
        scopes=["inference", "read"],
        created_at=datetime.now(UTC),
        spend_limit_nanos=spend_limit_nanos,
    )
    connection.execute(made.on_conflict_do_nothing(index_elements=[keys.c.secret_hash]))
    found = find_console_key(connection, account_id, pepper)
    assert found is not None
    return found


def find_secret(connection: Connection, secret: str, pepper: bytes) -> KeyInfo | None:
    """Return the key of a secret, whether or not it is active; None if it is unknown."""
    own = keys.c.secret_hash == hash_secret(secret, pepper)
    row = connection.execute(_KEYS.where(own)).mappings().first()
    return None if row is None else _info(row)


def unknown_key() -> Unauthorized:
    return Unauthorized("invalid_api_key", "Unknown API key.")


def check_values(values: KeyValues) -> dict[str, Any]:
    """Check attributes of a key, and return them as its row stores them.

    Raise ``ValueError`` if a name, moment or number cannot be stored, or no model is named.
    """
    checked: dict[str, Any] = dict(values)
    check_text(values.get("name", ""), "the name of a key", longest=NAME_MAX)
    if (expires_at := values.get("expires_at")) is not None:
        checked["expires_at"] = check_moment(expires_at, "the expiry of the key")
    for limit in (values.get("requests_per_minute"), values.get("tokens_per_minute")):
        if limit is not None and not 1 <= limit <= LIMIT_MAX:
            raise ValueError(f"limit per minute is {limit}; it must be between 1 and {LIMIT_MAX}")
    if (spend := values.get("spend_limit_nanos")) is not None and spend < 0:
        raise ValueError("a spend limit cannot be negative")
    if (models := values.get("models")) is not None:
        if not models:
            raise ValueError("a key that may use no model is useless; name one, or revoke the key")
        checked["models"] = sorted(set(models))
    return checked


def list_keys(
    connection: Connection, wanted: KeyFilter, *, limit: int | None = None, after: int = 0
) -> list[KeyInfo]:
    """List keys in order of their numbers, those greater than ``after``."""
    conditions = wanted.conditions(datetime.now(UTC))
    query = _KEYS.where(keys.c.id > after, *conditions).order_by(keys.c.id).limit(limit)
    return [_info(row) for row in connection.execute(query).mappings()]


def status_of(key: KeyInfo, now: datetime) -> KeyStatus:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"


def successors(connection: Connection, key_ids: Collection[int]) -> dict[int, int]:
    """Return the newest key that replaces each of some keys; others are absent."""
    query = select(keys.c.replaces, func.max(keys.c.id).label("id"))
    query = query.where(keys.c.replaces.in_(sorted(key_ids))).group_by(keys.c.replaces)
    return {row.replaces: row.id for row in connection.execute(query)}


def find_key(connection: Connection, prefix_or_id: str) -> KeyInfo:
    """Find a key by its prefix or number. Raise ``LookupError`` unless exactly one matches."""
    condition = keys.c.prefix == prefix_or_id[:PREFIX_LENGTH]
    key_id = read_id(prefix_or_id)
    if key_id is not None:
        condition = or_(condition, keys.c.id == key_id)
    rows = connection.execute(_KEYS.where(condition)).mappings().all()
    if len(rows) != 1:
        number = "no key" if not rows else f"{len(rows)} keys"
        raise LookupError(f"{number} found for {prefix_or_id[:PREFIX_LENGTH]!r}; see `key list`")
    return _info(rows[0])


def key_by_id(connection: Connection, key_id: int) -> KeyInfo:
    """Return a key, without its ``limits``. Raise ``LookupError`` if it does not exist."""
    if not 0 < key_id <= ID_MAX:
        raise LookupError(f"unknown key {key_id}")
    row = connection.execute(_KEYS.where(keys.c.id == key_id)).mappings().first()
    if row is None:
        raise LookupError(f"unknown key {key_id}")
    return _info(row)


def limited_key(connection: Connection, key_id: int) -> KeyInfo:
    """Return a key with its limits. Raise ``LookupError`` if it does not exist."""
    rows = connection.execute(_WITH_LIMITS.where(keys.c.id == key_id)).mappings().all()
    if not rows:
        raise LookupError(f"unknown key {key_id}")
    return replace(_info(rows[0]), limits=_limits(rows))


def revoke_key(connection: Connection, prefix_or_id: str) -> KeyInfo:
    """Revoke a key, immediately and in every process; revoking it again changes nothing.

    Raise ``LookupError`` unless exactly one key matches.
    """
    found = find_key(connection, prefix_or_id)
    connection.execute(
        update(keys)
        .where(keys.c.id == found.id, keys.c.revoked_at.is_(None))
        .values(revoked_at=datetime.now(UTC))
    )
    return _info(connection.execute(_KEYS.where(keys.c.id == found.id)).mappings().one())


def revoke_keys_of(connection: Connection, user_id: int, account_id: int | None = None) -> None:
    """Revoke the keys of a user, in one account or all."""
    own = keys.c.user_id == user_id
    if account_id is not None:
        own &= keys.c.account_id == account_id
    revoked = update(keys).where(own, keys.c.revoked_at.is_(None))
    connection.execute(revoked.values(revoked_at=datetime.now(UTC)))


def hash_secret(secret: str, pepper: bytes) -> bytes:
    """Return the HMAC-SHA-256 of a secret: with 240 random bits, no slow hash is needed."""
    return hmac.digest(pepper, secret.encode(), hashlib.sha256)


def _console_hash(account_id: int, pepper: bytes) -> bytes:
    """Return a value in place of a secret's hash, which no secret has: it is hashed once more."""
    return hashlib.sha256(hash_secret(f"console {account_id}", pepper)).digest()


_KEYS: Final = select(keys, accounts.c.name.label("account"), accounts.c.keep_inputs).join(
    accounts, accounts.c.id == keys.c.account_id
)
_WITH_LIMITS: Final = (
    # One statement for a key and its limits: a row for each limit, at least one.
    _KEYS.add_columns(
        *(column.label(f"limit_{column.name}") for column in rate_limits.c)
    ).outerjoin(rate_limits, limits_of_key())
)
_LIMITED: Final = _WITH_LIMITS.where(keys.c.secret_hash == bindparam("secret_hash"))


def _member_role(connection: Connection, account_id: int, user_id: int) -> MemberRole:
    """Return a user's role in a locked account. Raise ``ValueError``."""
    # Under the account's lock, so that the role cannot change before the key exists.
    lock_accounts(connection, [account_id])
    found = connection.execute(
        select(members.c.role, users.c.status)
        .join(users, users.c.id == members.c.user_id)
        .where(members.c.user_id == user_id, members.c.account_id == account_id)
    ).first()
    if found is None or found.status != "active":
        why = "not a member of the account" if found is None else "disabled"
        raise ValueError(f"user {user_id} is {why}")
    role: MemberRole = found.role
    return role


def _limits(rows: Sequence[RowMapping]) -> tuple[Limit, ...]:
    found = [
        read_limit({name: row[f"limit_{name}"] for name in rate_limits.c.keys()})  # noqa: SIM118
        for row in rows
        if row["limit_account_id"] is not None
    ]
    own = key_limit(dict(rows[0]))
    return (own, *found) if own.requests_per_minute or own.tokens_per_minute else tuple(found)


def _info(row: RowMapping) -> KeyInfo:
    return KeyInfo(
        id=row["id"],
        account_id=row["account_id"],
        account=row["account"],
        name=row["name"],
        prefix=row["prefix"],
        scopes=frozenset(row["scopes"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        requests_per_minute=row["requests_per_minute"],
        tokens_per_minute=row["tokens_per_minute"],
        spend_limit_nanos=row["spend_limit_nanos"],
        spent_nanos=row["spent_nanos"],
        held_nanos=row["held_nanos"],
        models=None if row["models"] is None else frozenset(row["models"]),
        replaces=row["replaces"],
        role=row["role"],
        user_id=row["user_id"],
        member_role=row["member_role"],
        keeps_inputs=row["keep_inputs"],
    )

"""API keys: create, list, change, rotate, revoke."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal, TypedDict

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from gateway.accounts.key_changes import OVERLAP_MAX, change_key, rotate_key
from gateway.accounts.key_uses import last_uses
from gateway.accounts.keys import (
    PREFIX_LENGTH,
    KeyFilter,
    KeyInfo,
    KeyStatus,
    KeyValues,
    create_console_key,
    create_key,
    find_console_key,
    find_key,
    key_by_id,
    list_keys,
    revoke_key,
    status_of,
    successors,
)
from gateway.accounts.limits import concurrent_of, set_concurrent
from gateway.accounts.locks import lock_accounts
from gateway.accounts.roles import MemberRole, Role
from gateway.accounts.users import find_user
from gateway.audit_log import Author, record
from gateway.checks.moments import timestamp
from gateway.errors import Forbidden, NotFound
from gateway.operations.accounts import find_owner, owner_id
from gateway.operations.bodies import Body, Id, Label, Limit, Moment, Name, UsdAmount
from gateway.operations.limits import check_model
from gateway.operations.pages import cut_page, read_cursor
from gateway.operations.refusals import refusals
from gateway.pricing import format_usd

MODELS_MAX: Final = 1000
OVERLAP_S: Final = 86_400
Models = Annotated[tuple[Name, ...], Field(min_length=1, max_length=MODELS_MAX)]


class NewKeyBody(Body):
    """What every key to be created has. Without ``models``, it may use all."""

    name: Label = ""
    user: Name | Id | None = None
    """Email or number of a member of the account, whose role the key has."""
    models: Models | None = None
    expires_at: Moment | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent: Limit | None = None
    spend_limit: UsdAmount | None = None


class KeyBody(NewKeyBody):
    """A key to be created. Without ``models``, it may use all."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "ci", "spend_limit": "2.50", "models": ["pocket-chat"]}]
        },
    )

    scopes: Annotated[tuple[Literal["inference", "read", "admin"], ...], Field(min_length=1)] = (
        "inference",
        "read",
    )
    role: Role | None = None
    """Only with the scope ``admin``; default: operator."""


class MemberKeyBody(NewKeyBody):
    """A key that an owner creates in the own account. Without ``user`` it is nobody's."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "ann", "user": "ann@example.com"}]},
    )

    scopes: Annotated[tuple[Literal["inference", "read"], ...], Field(min_length=1)] = (
        "inference",
        "read",
    )


class KeyChange(Body):
    """Change of a key; omitted fields keep their value, and null removes a limit."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"spend_limit": "10", "expires_at": None}]}
    )

    name: Label = ""
    models: Models | None = None
    expires_at: Moment | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent: Limit | None = None
    spend_limit: UsdAmount | None = None

    def values(self) -> KeyValues:
        """Return the attributes that were sent, but for ``concurrent``."""
        values = KeyValues()
        for name in ("name", "models", "expires_at", "requests_per_minute", "tokens_per_minute"):
            if name in self.model_fields_set:
                values[name] = getattr(self, name)
        if "spend_limit" in self.model_fields_set:
            values["spend_limit_nanos"] = self.spend_limit
        return values


class RotationBody(Body):
    """Rotation of a key: seconds for which the old one stays valid."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"overlap_s": 3600}]})

    overlap_s: Annotated[int, Field(ge=0, le=int(OVERLAP_MAX.total_seconds()))] = OVERLAP_S


class KeyLimitsView(TypedDict):
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None
    spend: str | None


class KeyView(TypedDict):
    """A key. ``models`` is null if it may use all; ``last_used_at`` is exact to a minute. That of a
    member has ``user_id``, and the member's role in the account."""

    object: Literal["key"]
    id: int
    account: str
    name: str
    prefix: str
    status: KeyStatus
    scopes: list[str]
    role: Role | None
    user_id: int | None
    member_role: MemberRole | None
    models: list[str] | None
    created_at: str
    expires_at: str | None
    revoked_at: str | None
    last_used_at: str | None
    replaces: int | None
    replaced_by: int | None
    limits: KeyLimitsView
    spent: str
    held: str


class NewKeyView(KeyView):
    """A key with its secret, which is returned only once."""

    secret: str


@refusals()
def create(
    connection: Connection,
    author: Author,
    account: str,
    body: KeyBody | MemberKeyBody,
    *,
    pepper: bytes,
) -> NewKeyView:
    _check_models(connection, body.models)
    user_id = None if body.user is None else find_user(connection, str(body.user)).id
    secret, made = create_key(
        connection,
        find_owner(connection, account).id,
        pepper=pepper,
        name=body.name,
        scopes=body.scopes,
        expires_at=body.expires_at,
        requests_per_minute=body.requests_per_minute,
        tokens_per_minute=body.tokens_per_minute,
        spend_limit_nanos=body.spend_limit,
        models=body.models,
        role=body.role if isinstance(body, KeyBody) else None,
        user_id=user_id,
    )
    if body.concurrent is not None:
        set_concurrent(connection, made.account_id, made.id, body.concurrent)
    view = show(connection, made.id)
    record(connection, author, "key.create", subject(made), account_id=made.account_id, after=view)
    return {**view, "secret": secret}


def console_key(
    connection: Connection,
    author: Author,
    account_id: int,
    *,
    spend_limit_nanos: int,
    pepper: bytes,
) -> KeyInfo:
    """Return the key with which the console orders for an account; create it if necessary.

    Raise ``Forbidden`` if it was revoked.
    """
    found = find_console_key(connection, account_id, pepper)
    if found is None:
        found = create_console_key(
            connection, account_id, spend_limit_nanos=spend_limit_nanos, pepper=pepper
        )
        view = show(connection, found.id)
        record(connection, author, "key.create", subject(found), account_id=account_id, after=view)
    if status_of(found, datetime.now(UTC)) != "active":
        raise Forbidden(
            "key_revoked", f"The key {found.id} of the console has been revoked or has expired."
        )
    return found


def list_page(
    connection: Connection,
    *,
    account: str | None,
    status: KeyStatus | None,
    name: str | None,
    limit: int,
    cursor: str | None,
) -> tuple[list[KeyView], str | None]:
    """List keys in order of their numbers, and return the cursor of the next page."""
    after = read_cursor(cursor, "a key")
    wanted = KeyFilter(owner_id(connection, account), status, name)
    found = list_keys(connection, wanted, limit=limit + 1, after=after)
    page, more = cut_page(found, limit)
    return _views(connection, page), more


def own_key(connection: Connection, account_id: int, key: str) -> int:
    """Return the number of an account's key, found by prefix or number. Raise ``NotFound``, whether
    or not another account has it."""
    try:
        found = find_key(connection, key)
    except LookupError:
        found = None
    if found is None or found.account_id != account_id or "admin" in found.scopes:
        raise NotFound("not_found", f"This account has no key {key[:PREFIX_LENGTH]!r}.")
    return found.id


def show(connection: Connection, key_id: int) -> KeyView:
    (view,) = _views(connection, [key_by_id(connection, key_id)])
    return view


@refusals()
def change(connection: Connection, author: Author, key: str, body: KeyChange) -> KeyView:
    found = find_key(connection, key)
    _check_models(connection, body.models)
    lock_accounts(connection, [found.account_id])
    before = show(connection, found.id)
    change_key(connection, found.id, body.values())
    if "concurrent" in body.model_fields_set:
        set_concurrent(connection, found.account_id, found.id, body.concurrent)
    view = show(connection, found.id)
    record(
        connection,
        author,
        "key.change",
        subject(found),
        account_id=found.account_id,
        before=before,
        after=view,
    )
    return view


@refusals()
def rotate(
    connection: Connection, author: Author, key: str, body: RotationBody, *, pepper: bytes
) -> NewKeyView:
    """Create a key that replaces another one, which expires after the overlap."""
    secret, made, old = rotate_key(
        connection,
        find_key(connection, key).id,
        pepper=pepper,
        overlap=timedelta(seconds=body.overlap_s),
        now=datetime.now(UTC),
    )
    view = show(connection, made.id)
    expiry = timestamp(old.expires_at) if old.expires_at else None
    record(
        connection,
        author,
        "key.rotate",
        subject(old),
        account_id=old.account_id,
        after={**view, "old_expires_at": expiry},
    )
    return {**view, "secret": secret}


@refusals()
def revoke(connection: Connection, author: Author, key: str) -> KeyView:
    found = find_key(connection, key)
    lock_accounts(connection, [found.account_id])
    before = show(connection, found.id)
    revoke_key(connection, key)
    view = show(connection, found.id)
    record(
        connection,
        author,
        "key.revoke",
        subject(found),
        account_id=found.account_id,
        before=before,
        after=view,
    )
    return view


def subject(key: KeyInfo) -> str:
    return f"key {key.id}"


def _check_models(connection: Connection, models: Collection[str] | None) -> None:
    """Raise ``NotFound`` unless every model is or was on sale."""
    for model in models or ():
        check_model(connection, model)


def _views(connection: Connection, found: Sequence[KeyInfo]) -> list[KeyView]:
    ids = [key.id for key in found]
    used, concurrent = last_uses(connection, ids), concurrent_of(connection, ids)
    replaced_by = successors(connection, ids)
    now = datetime.now(UTC)
    return [
        _view(
            key,
            now,
            used_at=used.get(key.id),
            concurrent=concurrent.get(key.id),
            replaced_by=replaced_by.get(key.id),
        )
        for key in found
    ]


def _view(
    key: KeyInfo,
    now: datetime,
    *,
    used_at: datetime | None,
    concurrent: int | None,
    replaced_by: int | None,
) -> KeyView:
    """Return a key without its secret, which is not stored."""
    limit = key.spend_limit_nanos
    return {
        "object": "key",
        "id": key.id,
        "account": key.account,
        "name": key.name,
        "prefix": key.prefix,
        "status": status_of(key, now),
        "scopes": sorted(key.scopes),
        "role": key.role,
        "user_id": key.user_id,
        "member_role": key.member_role,
        "models": None if key.models is None else sorted(key.models),
        "created_at": timestamp(key.created_at),
        "expires_at": timestamp(key.expires_at) if key.expires_at else None,
        "revoked_at": timestamp(key.revoked_at) if key.revoked_at else None,
        "last_used_at": timestamp(used_at) if used_at else None,
        "replaces": key.replaces,
        "replaced_by": replaced_by,
        "limits": {
            "requests_per_minute": key.requests_per_minute,
            "tokens_per_minute": key.tokens_per_minute,
            "concurrent": concurrent,
            "spend": format_usd(limit) if limit is not None else None,
        },
        "spent": format_usd(key.spent_nanos),
        "held": format_usd(key.held_nanos),
    }

"""API keys: create, list, revoke."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from pydantic import Field
from sqlalchemy import Connection

from gateway.accounts.keys import KeyInfo, create_key, list_keys, revoke_key
from gateway.checks.moments import timestamp
from gateway.operations.accounts import find_owner, owner_id
from gateway.operations.bodies import Body, Label, Limit, Moment, UsdAmount
from gateway.operations.refusals import refusals
from gateway.pricing import format_usd


class KeyBody(Body):
    name: Label = ""
    scopes: Annotated[tuple[Literal["inference", "read", "admin"], ...], Field(min_length=1)] = (
        "inference",
        "read",
    )
    expires_at: Moment | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    spend_limit: UsdAmount | None = None


class KeyLimitsView(TypedDict):
    requests_per_minute: int | None
    tokens_per_minute: int | None
    spend: str | None


class KeyView(TypedDict):
    object: Literal["key"]
    id: int
    account: str
    name: str
    prefix: str
    scopes: list[str]
    created_at: str
    expires_at: str | None
    revoked_at: str | None
    limits: KeyLimitsView
    spent: str
    held: str


class NewKeyView(KeyView):
    """A key with its secret, which is returned only once."""

    secret: str


@refusals()
def create(connection: Connection, account: str, body: KeyBody, *, pepper: bytes) -> NewKeyView:
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
    )
    return {**key_view(made), "secret": secret}


def list_all(connection: Connection, account: str | None) -> list[KeyView]:
    return [key_view(each) for each in list_keys(connection, owner_id(connection, account))]


@refusals()
def revoke(connection: Connection, key: str) -> KeyView:
    return key_view(revoke_key(connection, key))


def key_view(key: KeyInfo) -> KeyView:
    """Return a key without its secret, which is not stored."""
    limit = key.spend_limit_nanos
    return {
        "object": "key",
        "id": key.id,
        "account": key.account,
        "name": key.name,
        "prefix": key.prefix,
        "scopes": sorted(key.scopes),
        "created_at": timestamp(key.created_at),
        "expires_at": timestamp(key.expires_at) if key.expires_at else None,
        "revoked_at": timestamp(key.revoked_at) if key.revoked_at else None,
        "limits": {
            "requests_per_minute": key.requests_per_minute,
            "tokens_per_minute": key.tokens_per_minute,
            "spend": format_usd(limit) if limit is not None else None,
        },
        "spent": format_usd(key.spent_nanos),
        "held": format_usd(key.held_nanos),
    }

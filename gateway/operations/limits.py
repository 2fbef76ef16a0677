"""Limits of rate, concurrency and cancelled work: set, list, remove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from pydantic import ConfigDict
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names, find_account
from gateway.accounts.limits import Limit as RateLimit
from gateway.accounts.limits import list_limits, remove_limit, set_limit
from gateway.accounts.locks import lock_accounts
from gateway.audit_log import Author, record
from gateway.errors import unknown_model
from gateway.ledger.prices import check_sold
from gateway.operations.bodies import Body, Id, Limit, Name
from gateway.operations.refusals import refusals


class RateLimitBody(Body):
    """A limit to be set. Without key or model, it covers all of them together."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"account": "acme", "model": "pocket-chat", "requests_per_minute": 600}]
        },
    )

    account: Name | Id
    key: Id | None = None
    model: Name | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent: Limit | None = None
    cancelled_seconds_per_hour: Limit | None = None
    """Device time of cancelled, uncharged work, in seconds. Only without key and model."""


class RateLimitView(TypedDict):
    object: Literal["rate_limit"]
    account: str
    key: int | None
    model: str | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None
    cancelled_seconds_per_hour: int | None


@refusals()
def put(connection: Connection, author: Author, body: RateLimitBody) -> RateLimitView:
    """Create a limit, or replace the existing one for the same account, key and model."""
    check_model(connection, body.model)
    owner = find_account(connection, body.account)
    limit = RateLimit(
        owner.id,
        body.key,
        body.model,
        requests_per_minute=body.requests_per_minute,
        tokens_per_minute=body.tokens_per_minute,
        concurrent_max=body.concurrent,
        cancelled_seconds_per_hour=body.cancelled_seconds_per_hour,
    )
    place = (limit.key_id, limit.model)
    lock_accounts(connection, [owner.id])
    known = list_limits(connection, owner.id)
    replaced = [one for one in known if (one.key_id, one.model) == place]
    (view,) = _views({owner.id: owner.name}, [set_limit(connection, limit)])
    record(
        connection,
        author,
        "limit.set",
        _subject(limit),
        account_id=owner.id,
        before=_views({owner.id: owner.name}, replaced)[0] if replaced else None,
        after=view,
    )
    return view


@refusals()
def list_all(connection: Connection, account: str | None) -> list[RateLimitView]:
    """List the limits of one account or of all."""
    if account is not None:
        return of_account(connection, find_account(connection, account))
    found = list_limits(connection)
    return _views(account_names(connection, {each.account_id for each in found}), found)


def of_account(connection: Connection, owner: Account) -> list[RateLimitView]:
    return _views({owner.id: owner.name}, list_limits(connection, owner.id))


@refusals()
def remove(
    connection: Connection, author: Author, account: str, *, key: int | None, model: str | None
) -> RateLimitView:
    owner = find_account(connection, account)
    removed = remove_limit(connection, owner.id, key_id=key, model=model)
    (view,) = _views({owner.id: owner.name}, [removed])
    record(connection, author, "limit.remove", _subject(removed), account_id=owner.id, before=view)
    return view


def check_model(connection: Connection, model: str | None) -> None:
    """Raise ``NotFound`` unless a model is or was on sale; a limit of any other has no effect."""
    if model is None:
        return
    try:
        check_sold(connection, model)
    except LookupError:
        raise unknown_model(model) from None


def _subject(limit: RateLimit) -> str:
    key = "" if limit.key_id is None else f" key {limit.key_id}"
    model = "" if limit.model is None else f" model {limit.model}"
    return f"account {limit.account_id}{key}{model}"


def _views(names: Mapping[int, str], found: Sequence[RateLimit]) -> list[RateLimitView]:
    return [
        {
            "object": "rate_limit",
            "account": names[limit.account_id],
            "key": limit.key_id,
            "model": limit.model,
            "requests_per_minute": limit.requests_per_minute,
            "tokens_per_minute": limit.tokens_per_minute,
            "concurrent": limit.concurrent_max,
            "cancelled_seconds_per_hour": limit.cancelled_seconds_per_hour,
        }
        for limit in found
    ]

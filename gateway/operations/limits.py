"""Limits of rate, concurrency and cancelled work: set, list, remove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from pydantic import ConfigDict
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names, find_account
from gateway.accounts.limits import Limit as RateLimit
from gateway.accounts.limits import find_limit, list_limits, remove_limit, set_limit
from gateway.accounts.locks import lock_accounts
from gateway.audit_log import Author, record
from gateway.errors import unknown_model
from gateway.ledger.prices import check_sold
from gateway.operations.bodies import Body, Id, Limit, Name
from gateway.operations.pages import cut_places, read_place
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
    lock_accounts(connection, [owner.id])
    replaced = find(connection, owner, key=limit.key_id, model=limit.model)
    (view,) = _views({owner.id: owner.name}, [set_limit(connection, limit)])
    record(
        connection,
        author,
        "limit.set",
        _subject(limit),
        account_id=owner.id,
        before=replaced,
        after=view,
    )
    return view


@refusals()
def list_page(
    connection: Connection, account: str | None, *, limit: int, cursor: str | None
) -> tuple[list[RateLimitView], str | None]:
    """List the limits of one account or of all by account, key and model, and return the cursor of
    the next page."""
    owner = None if account is None else find_account(connection, account)
    return page_of(connection, owner, limit=limit, cursor=cursor)


def page_of(
    connection: Connection, owner: Account | None, *, limit: int, cursor: str | None
) -> tuple[list[RateLimitView], str | None]:
    """List the limits of one account or of all."""
    after = read_place(cursor)
    found = list_limits(
        connection, None if owner is None else owner.id, limit=limit + 1, after=after
    )
    page, more = cut_places(found, limit, place_of)
    names = account_names(connection, {each.account_id for each in page})
    return _views(names, page), more


def place_of(limit: RateLimit) -> tuple[int, int, str]:
    return limit.account_id, limit.key_id or 0, limit.model or ""


def find(
    connection: Connection, owner: Account, *, key: int | None, model: str | None
) -> RateLimitView | None:
    """Return the limit of an account, key and model."""
    found = find_limit(connection, owner.id, key_id=key, model=model)
    return None if found is None else _views({owner.id: owner.name}, [found])[0]


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

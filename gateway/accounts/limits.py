"""The configured rate and concurrency limits, in SQL.

Rates are enforced by ``rates``, which counts in Redis and knows no SQL; concurrency is enforced by
``ledger.concurrency``.

A limit covers an account or one of its keys, and one model or all. Every limit that covers a
request applies to it. Per-minute limits of a key over all models are columns of ``keys``; all other
limits are rows of ``rate_limits``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    exists,
    insert,
    or_,
    select,
    tuple_,
    update,
)

from gateway.accounts.locks import lock_accounts
from gateway.checks.decoding import ID_MAX
from gateway.tables.core import accounts, budgets, keys, rate_limits

Unit: TypeAlias = Literal["requests", "tokens"]

LIMIT_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit. ``key_id`` and ``model`` are None if it covers all keys or all models together."""

    account_id: int
    key_id: int | None = None
    model: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_max: int | None = None
    cancelled_seconds_per_hour: int | None = None
    """Device time of cancelled work that was not charged. Only for accounts as a whole."""

    def covers(self, key_id: int, model: str) -> bool:
        return self.key_id in (None, key_id) and self.model in (None, model)

    def per_minute(self, unit: Unit) -> int | None:
        return self.requests_per_minute if unit == "requests" else self.tokens_per_minute


def set_limit(connection: Connection, limit: Limit) -> Limit:
    """Create a limit, or replace the existing one for the same account, key and model.

    Raise ``LookupError`` if the account does not exist or does not own the key, ``ValueError`` if
    no number is given or one is outside 1 to ``LIMIT_MAX``.
    """
    numbers = (
        limit.requests_per_minute,
        limit.tokens_per_minute,
        limit.concurrent_max,
        limit.cancelled_seconds_per_hour,
    )
    if all(number is None for number in numbers):
        raise ValueError(
            "a limit needs requests or tokens per minute, concurrent requests, or cancelled "
            "seconds per hour"
        )
    if limit.cancelled_seconds_per_hour is not None and (limit.key_id or limit.model):
        raise ValueError(
            "cancelled seconds per hour can only be limited per account; omit key and model"
        )
    for number in numbers:
        if number is not None and not 1 <= number <= LIMIT_MAX:
            raise ValueError(f"limit is {number}; it must be between 1 and {LIMIT_MAX}")
    _write(connection, limit)
    return limit


def remove_limit(
    connection: Connection, account_id: int, *, key_id: int | None = None, model: str | None = None
) -> Limit:
    """Delete a limit and return it. Raise ``LookupError`` if it does not exist."""
    found = find_limit(connection, account_id, key_id=key_id, model=model)
    if found is not None:
        _write(connection, Limit(account_id, key_id, model))
        return found
    whose = f"account {account_id}" + (f", key {key_id}" if key_id is not None else "")
    raise LookupError(f"no such limit: {whose}{f', model {model}' if model else ''}")


def set_concurrent(
    connection: Connection, account_id: int, key_id: int, concurrent_max: int | None
) -> None:
    """Set how many requests of a key can be queued or running, over all models; None: the default.

    Raise ``LookupError`` if the account does not own the key.
    """
    lock_accounts(connection, [account_id])
    own = find_limit(connection, account_id, key_id=key_id) or Limit(account_id, key_id)
    _write(connection, replace(own, concurrent_max=concurrent_max))


def concurrent_of(connection: Connection, key_ids: Collection[int]) -> dict[int, int]:
    """Return the concurrency limits of keys over all models; keys without one are absent."""
    query = select(rate_limits.c.key_id, rate_limits.c.concurrent_max).where(
        rate_limits.c.key_id.in_(sorted(key_ids)),
        rate_limits.c.model == "",
        rate_limits.c.concurrent_max.is_not(None),
    )
    return {row.key_id: row.concurrent_max for row in connection.execute(query)}


def list_limits(
    connection: Connection,
    account_id: int | None = None,
    *,
    limit: int | None = None,
    after: tuple[int, int, str] | None = None,
) -> list[Limit]:
    """Return the limits of one account, or of all, ordered by account, key and model.

    ``limit``: their number at most. ``after``: account, key or 0, model or '' of the one before.
    """
    table = rate_limits.c
    of_tables = select(rate_limits).order_by(table.account_id, table.key_id, table.model)
    of_keys = select(keys).order_by(keys.c.account_id, keys.c.id)
    if after is not None:
        of_tables = of_tables.where(
            tuple_(table.account_id, table.key_id, table.model) > tuple_(*after)
        )
        # A key's limit over all models is before those of its models.
        of_keys = of_keys.where(tuple_(keys.c.account_id, keys.c.id) > tuple_(*after[:2]))
    if account_id is not None:
        of_tables = of_tables.where(rate_limits.c.account_id == account_id)
        of_keys = of_keys.where(keys.c.account_id == account_id)
    of_keys = of_keys.where(*_limited_keys())
    found: dict[tuple[int, int, str], Limit] = {}
    for row in connection.execute(of_tables.limit(limit)).mappings():
        found[row["account_id"], row["key_id"], row["model"]] = read_limit(dict(row))
    for row in connection.execute(of_keys.limit(limit)).mappings():
        place = (row["account_id"], row["id"], "")
        other = found.get(place)
        found[place] = key_limit(dict(row), concurrent_max=other.concurrent_max if other else None)
    # Models of a key stay in the order of the database, which is that of its pages.
    places = sorted(found, key=lambda place: (place[0], place[1], place[2] != ""))
    return [found[place] for place in places[:limit]]


def find_limit(
    connection: Connection, account_id: int, *, key_id: int | None = None, model: str | None = None
) -> Limit | None:
    """Return the limit of an account, key and model."""
    table = rate_limits.c
    query = select(rate_limits).where(
        table.account_id == account_id, table.key_id == (key_id or 0), table.model == (model or "")
    )
    row = connection.execute(query).mappings().first()
    found = None if row is None else read_limit(dict(row))
    if key_id is None or model is not None:
        return found
    of_key = select(keys).where(
        keys.c.id == key_id, keys.c.account_id == account_id, *_limited_keys()
    )
    row = connection.execute(of_key).mappings().first()
    if row is None:
        return found
    return key_limit(dict(row), concurrent_max=found.concurrent_max if found else None)


def _limited_keys() -> tuple[ColumnElement[bool], ...]:
    """SQL conditions: the key is in use and has limits over all models of its own."""
    return (
        keys.c.revoked_at.is_(None),
        or_(keys.c.requests_per_minute.is_not(None), keys.c.tokens_per_minute.is_not(None)),
    )


def read_limit(row: Mapping[str, Any]) -> Limit:
    """Build a limit from a row of ``rate_limits``."""
    return Limit(
        account_id=row["account_id"],
        key_id=row["key_id"] or None,
        model=row["model"] or None,
        requests_per_minute=row["requests_per_minute"],
        tokens_per_minute=row["tokens_per_minute"],
        concurrent_max=row["concurrent_max"],
        cancelled_seconds_per_hour=row["cancelled_seconds_per_hour"],
    )


def key_limit(row: Mapping[str, Any], *, concurrent_max: int | None = None) -> Limit:
    """Build a key's limit over all models from its row in ``keys``."""
    return Limit(
        account_id=row["account_id"],
        key_id=row["id"],
        requests_per_minute=row["requests_per_minute"],
        tokens_per_minute=row["tokens_per_minute"],
        concurrent_max=concurrent_max,
    )


def limits_of_key() -> ColumnElement[bool]:
    """SQL condition: the ``rate_limits`` row covers the ``keys`` row, for one model or all."""
    return and_(
        rate_limits.c.account_id == keys.c.account_id,
        or_(rate_limits.c.key_id == 0, rate_limits.c.key_id == keys.c.id),
    )


def _write(connection: Connection, limit: Limit) -> None:
    """Upsert a limit under the account's lock; without any number, delete it."""
    # Under the lock, so that a hold being decided cannot miss a new concurrency limit.
    if limit.account_id not in lock_accounts(connection, [limit.account_id]):
        raise LookupError(f"unknown account {limit.account_id}")
    values: dict[str, Any] = {
        "requests_per_minute": limit.requests_per_minute,
        "tokens_per_minute": limit.tokens_per_minute,
    }
    if limit.key_id is not None:
        if not 0 < limit.key_id <= ID_MAX:
            raise LookupError(f"account {limit.account_id} has no key {limit.key_id}")
        own = keys.c.id == limit.key_id, keys.c.account_id == limit.account_id
        if connection.execute(select(keys.c.id).where(*own)).first() is None:
            raise LookupError(f"account {limit.account_id} has no key {limit.key_id}")
        if limit.model is None:
            connection.execute(update(keys).where(*own).values(values))
            values = dict.fromkeys(values)
    values["concurrent_max"] = limit.concurrent_max
    values["cancelled_seconds_per_hour"] = limit.cancelled_seconds_per_hour
    place = {
        "account_id": limit.account_id,
        "key_id": limit.key_id or 0,
        "model": limit.model or "",
    }
    connection.execute(delete(rate_limits).filter_by(**place))
    if any(value is not None for value in values.values()):
        connection.execute(insert(rate_limits).values(**place, **values))
    _update_bounded(connection, limit.account_id)


def _update_bounded(connection: Connection, account_id: int) -> None:
    """Update ``accounts.bounded``, which tells ``hold`` whether to load budgets and limits."""
    concurrent = exists().where(
        rate_limits.c.account_id == account_id, rate_limits.c.concurrent_max.is_not(None)
    )
    budgeted = exists().where(budgets.c.account_id == account_id, budgets.c.ended_at.is_(None))
    connection.execute(
        update(accounts)
        .where(accounts.c.id == account_id)
        .values(bounded=select(or_(concurrent, budgeted)).scalar_subquery())
    )

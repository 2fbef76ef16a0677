"""Prices in SQL: immutable rows, found by content, put in force by price periods.

A hold stores the id of its price, so every past charge can be recomputed. A changed price is a new
row and a new period; requests that were accepted before keep the old one. A period that has not
begun can be cancelled: its row stays and has no effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypedDict

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    and_,
    exists,
    insert,
    literal,
    select,
    tuple_,
)

from gateway.checks.entered import NAME_MAX, REASON_MAX, check_moment, check_text
from gateway.checks.moments import timestamp
from gateway.pricing import Component, Price
from gateway.tables.core import price_periods, prices
from gateway.tables.prices import ONLY, cancelled_prices, price_version

LIST: Final = 0
"""Account id of list prices in ``price_periods``."""

OPERATOR_NOTICE_S: Final = 10.0
"""Minimum time between an operator's price change and its start, so that every gateway reads it.
Commands run in a separate process, which gateways do not notice."""

PRICES_READ: Final = 1000
"""Prices of one statement."""
_TICK: Final = timedelta(microseconds=1)
_SHOWN: Final = timedelta(seconds=1)
"""Precision with which commands display the start of a price."""
_PERIOD: Final = ("model", "account_id", "effective_from")
"""Key of ``price_periods`` and of ``cancelled_prices``."""


@dataclass(frozen=True, slots=True)
class PriceCancellation:
    """The cancellation of a price before its start: when, by whom and why."""

    cancelled_at: datetime
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class PricePeriod:
    """A price in force from a moment until the next period of the same model and account.

    ``price_id`` is None if the period ends an account's price override.
    """

    model: str
    account_id: int
    effective_from: datetime
    price_id: int | None
    source: Literal["catalog", "operator"]
    actor: str
    reason: str
    cancelled: PriceCancellation | None = None


class PriceConflict(Exception):
    """Two prices with the same start, or the cancellation of a price that has begun."""


PriceCache = dict[int, Price]
"""Prices by id. Price rows never change, so a process can cache them."""


def put_in_force(connection: Connection, model: str, price: Price, now: datetime) -> int:
    """Make the catalog's price the list price of a model from now on; return its id.

    No effect if the catalog's price has not changed, so that an operator's later price stays in
    force.
    """
    price_id = store_price(connection, model, price)
    latest = connection.execute(
        select(price_periods.c.price_id, price_periods.c.effective_from)
        .where(
            price_periods.c.model == model,
            price_periods.c.account_id == LIST,
            price_periods.c.source == "catalog",
        )
        .order_by(price_periods.c.effective_from.desc())
        .limit(1)
    ).first()
    if latest is None or latest.price_id != price_id:
        starts_at = now if latest is None else max(now, latest.effective_from + _TICK)
        connection.execute(
            insert(price_periods).values(
                model=model, account_id=LIST, effective_from=starts_at, price_id=price_id
            )
        )
    return price_id


class PriceChange(TypedDict):
    """The catalog's price of a model and the one before it, by their ids."""

    before: int | None
    after: int
    starts_at: str


def read_catalog_change(connection: Connection, model: str) -> PriceChange:
    """Return the last change of a model's price by the catalog."""
    found = connection.execute(
        select(price_periods.c.price_id, price_periods.c.effective_from)
        .where(
            price_periods.c.model == model,
            price_periods.c.account_id == LIST,
            price_periods.c.source == "catalog",
        )
        .order_by(price_periods.c.effective_from.desc())
        .limit(2)
    ).all()
    before = found[1].price_id if len(found) > 1 else None
    return {
        "before": before,
        "after": found[0].price_id,
        "starts_at": timestamp(found[0].effective_from),
    }


def set_price(
    connection: Connection,
    model: str,
    price: Price | None,
    *,
    account_id: int = LIST,
    starts_at: datetime,
    actor: str,
    reason: str,
) -> PricePeriod:
    """Put a list price or one account's price override in force from a moment on.

    Without a price, end the account's override. Raise ``LookupError`` if the model has never been
    on sale or the account has no override to end, ``PriceConflict`` if another price has the same
    start, ``ValueError`` if a value cannot be stored. If a cancelled price has the same start, the
    new one begins a microsecond later.
    """
    if price is None and account_id == LIST:
        raise ValueError("a list price cannot be ended; remove the model from the catalog instead")
    starts_at = _check_entry(starts_at, actor=actor, reason=reason)
    check_sold(connection, model)
    if price is None:
        _check_own(connection, model, account_id)
    _lock_prices(connection)
    for other in _periods_from(connection, model, account_id, starts_at):
        if other.effective_from != starts_at:
            break
        if other.cancelled is None:
            raise PriceConflict(f"another price of {model} begins at {starts_at.isoformat()}")
        starts_at += _TICK
    period = PricePeriod(
        model=model,
        account_id=account_id,
        effective_from=starts_at,
        price_id=None if price is None else store_price(connection, model, price),
        source="operator",
        actor=actor,
        reason=reason,
    )
    values = asdict(period)
    del values["cancelled"]
    connection.execute(insert(price_periods).values(values))
    return period


def cancel_price(
    connection: Connection,
    model: str,
    *,
    account_id: int = LIST,
    starts_at: datetime,
    now: datetime,
    actor: str,
    reason: str,
) -> PricePeriod:
    """Cancel a price, or the end of a price override, that an operator has scheduled.

    ``starts_at`` is its start; fractions of a second may be omitted. The price in force before
    stays in force. Raise ``LookupError`` if no such price is scheduled, ``PriceConflict`` if it has
    begun or begins too soon for every gateway to learn of it, ``ValueError`` if a value cannot be
    stored.
    """
    starts_at = _check_entry(starts_at, actor=actor, reason=reason)
    _lock_prices(connection)
    standing = [
        each
        for each in _periods_from(connection, model, account_id, min(starts_at, now))
        if each.source == "operator" and each.cancelled is None
    ]
    whose = f"account {account_id}" if account_id != LIST else "everybody"
    found = next((p for p in standing if starts_at <= p.effective_from < starts_at + _SHOWN), None)
    if found is None:
        ahead = ", ".join(p.effective_from.isoformat() for p in standing if p.effective_from > now)
        raise LookupError(
            f"no price of {model!r} for {whose} is scheduled for {starts_at.isoformat()}; "
            + (f"scheduled prices begin at {ahead}" if ahead else "none is scheduled")
        )
    if found.effective_from <= now:
        raise PriceConflict(
            f"the price of {model} for {whose} began at {found.effective_from.isoformat()} and "
            "cannot be cancelled; set a new price, or end an account's override"
        )
    if found.effective_from - now < timedelta(seconds=OPERATOR_NOTICE_S):
        raise PriceConflict(
            f"the price of {model} for {whose} begins at {found.effective_from.isoformat()}, and "
            f"can be cancelled until {OPERATOR_NOTICE_S:g} s before, so that every gateway learns "
            "of it"
        )
    made = PriceCancellation(cancelled_at=now, actor=actor, reason=reason)
    key = {name: getattr(found, name) for name in _PERIOD}
    connection.execute(insert(cancelled_prices).values(**key, **asdict(made)))
    return replace(found, cancelled=made)


def _check_entry(starts_at: datetime, *, actor: str, reason: str) -> datetime:
    """Check the start, actor and reason of a price change. Raise ``ValueError``."""
    checked = check_moment(starts_at, "the start of the price")
    check_text(reason, "the reason", longest=REASON_MAX, required=True)
    check_text(actor, "the actor", longest=NAME_MAX, required=True)
    return checked


def check_sold(connection: Connection, model: str) -> None:
    """Raise ``LookupError`` unless a model is or was on sale; this catches mistyped names."""
    sold = select(price_periods.c.model).where(
        price_periods.c.model == model, price_periods.c.account_id == LIST
    )
    if connection.execute(sold.limit(1)).first() is None:
        raise LookupError(
            f"the model {model!r} has never been on sale; a new catalog entry is on sale once a "
            "gateway has read it"
        )


def price_periods_of(
    connection: Connection,
    *,
    model: str | None = None,
    account_ids: Collection[int] | None = None,
    limit: int | None = None,
    after: tuple[str, int, datetime] | None = None,
) -> list[PricePeriod]:
    """List price periods, oldest first, of one model or some accounts or of all.

    ``limit``: their number at most. ``after``: model, account and start of the one before.
    """
    key = [price_periods.c[name] for name in _PERIOD]
    query = _with_cancellations().order_by(*key).limit(limit)
    if model is not None:
        query = query.where(price_periods.c.model == model)
    if account_ids is not None:
        query = query.where(price_periods.c.account_id.in_(sorted(account_ids)))
    if after is not None:
        query = query.where(tuple_(*key) > tuple_(*map(_bound, key, after)))
    return [_period(row) for row in connection.execute(query).mappings()]


def _bound(column: ColumnElement[Any], value: object) -> ColumnElement[Any]:
    return literal(value, column.type)


def not_cancelled() -> ColumnElement[bool]:
    """SQL condition: the ``price_periods`` row was not cancelled before it began."""
    same = (cancelled_prices.c[name] == price_periods.c[name] for name in _PERIOD)
    return ~exists().where(*same)


def read_version(connection: Connection) -> int:
    """Return the version of prices and discounts; each change increments it."""
    found = select(price_version.c.version).where(price_version.c.id == ONLY)
    return int(connection.execute(found).scalar_one())


def in_force(connection: Connection, now: datetime, *, account_id: int = LIST) -> dict[str, int]:
    """Return the price id of every model in force for an account at a moment."""
    found: dict[int, dict[str, int | None]] = {LIST: {}, account_id: {}}
    periods = connection.execute(
        select(price_periods.c.account_id, price_periods.c.model, price_periods.c.price_id)
        .where(price_periods.c.account_id.in_(list(found)), price_periods.c.effective_from <= now)
        .where(not_cancelled())
        .order_by(price_periods.c.effective_from)
    )
    for period in periods:
        found[period.account_id][period.model] = period.price_id
    return {
        model: own
        for model, price_id in found[LIST].items()
        if (own := found[account_id].get(model) or price_id) is not None
    }


def _check_own(connection: Connection, model: str, account_id: int) -> None:
    """Raise ``LookupError`` unless an account ever had, or will have, its own price of a model."""
    own = select(price_periods.c.model).where(
        price_periods.c.model == model,
        price_periods.c.account_id == account_id,
        price_periods.c.price_id.is_not(None),
        not_cancelled(),
    )
    if connection.execute(own.limit(1)).first() is None:
        raise LookupError(f"account {account_id} has no price override for {model!r}")


def _lock_prices(connection: Connection) -> None:
    """Make other price changes wait until this one is committed."""
    connection.execute(select(price_version).with_for_update())


def _periods_from(
    connection: Connection, model: str, account_id: int, moment: datetime
) -> list[PricePeriod]:
    """Read the periods of a model and account that begin at or after a moment, in order."""
    query = _with_cancellations().where(
        price_periods.c.model == model,
        price_periods.c.account_id == account_id,
        price_periods.c.effective_from >= moment,
    )
    rows = connection.execute(query.order_by(price_periods.c.effective_from)).mappings()
    return [_period(row) for row in rows]


def _with_cancellations() -> Select[Any]:
    same = (cancelled_prices.c[name] == price_periods.c[name] for name in _PERIOD)
    return select(
        price_periods,
        cancelled_prices.c.cancelled_at,
        cancelled_prices.c.actor.label("cancelled_by"),
        cancelled_prices.c.reason.label("cancelled_for"),
    ).outerjoin(cancelled_prices, and_(*same))


def _period(row: RowMapping) -> PricePeriod:
    values = dict(row)
    at, actor, reason = (values.pop(f"cancelled_{name}") for name in ("at", "by", "for"))
    return PricePeriod(
        **values, cancelled=None if at is None else PriceCancellation(at, actor, reason)
    )


def read_price(connection: Connection, price_id: int, cache: PriceCache) -> Price:
    """Read a price, from the cache if possible."""
    price = cache.get(price_id)
    if price is None:
        row = connection.execute(select(prices).where(prices.c.id == price_id)).mappings().one()
        price = cache[price_id] = _parse(row)
    return price


def read_prices(connection: Connection, ids: Iterable[int], cache: PriceCache) -> None:
    """Read prices into the cache, many in one statement."""
    missing = sorted(set(ids) - set(cache))
    for start in range(0, len(missing), PRICES_READ):
        some = missing[start : start + PRICES_READ]
        rows = connection.execute(select(prices).where(prices.c.id.in_(some))).mappings()
        cache.update((row["id"], _parse(row)) for row in rows)


def store_price(connection: Connection, model: str, price: Price) -> int:
    """Return the id of a model's price; insert a row if there is none with the same content."""
    components = msgspec.to_builtins(price.components)
    content = msgspec.json.encode([components, price.minimum_nanos], order="sorted")
    sha256 = hashlib.sha256(content).hexdigest()
    known = connection.execute(
        select(prices.c.id).where(prices.c.model == model, prices.c.content_sha256 == sha256)
    ).scalar()
    if known is not None:
        return int(known)
    inserted = connection.execute(
        insert(prices)
        .values(
            model=model,
            components=components,
            minimum_nanos=price.minimum_nanos,
            content_sha256=sha256,
        )
        .returning(prices.c.id)
    )
    return int(inserted.scalar_one())


def _parse(row: RowMapping) -> Price:
    """Build a price from a row. Raise ``ValueError`` if an amount or unit count is invalid."""
    components = msgspec.convert(row["components"], tuple[Component, ...])
    if any(each.per < 1 or each.amount_nanos < 0 for each in components):
        raise ValueError("an amount is negative, or applies to less than one unit")
    return Price(components, row["minimum_nanos"])

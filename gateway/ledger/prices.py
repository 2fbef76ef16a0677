"""Prices as rows: immutable, found by content, put into force by a period.

A hold keeps the id of its price, so a past charge can be recomputed for ever. A changed price is a
new row and a new period; what was accepted before keeps the old one.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import Connection, RowMapping, insert, select

from gateway.pricing import Component, Price
from gateway.tables import price_periods, prices

LIST: Final = 0
"""The account id that stands for everybody in ``price_periods``."""

_TICK: Final = timedelta(microseconds=1)

PriceCache = dict[int, Price]
"""Price rows never change, so a process may remember them."""


def put_in_force(connection: Connection, model: str, price: Price, now: datetime) -> int:
    """Make a price the list price of a model from now on; return its id. Does nothing if it is."""
    price_id = _store(connection, model, price)
    latest = connection.execute(
        select(price_periods.c.price_id, price_periods.c.effective_from)
        .where(price_periods.c.model == model, price_periods.c.account_id == LIST)
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


def in_force(connection: Connection, now: datetime) -> dict[str, int]:
    """Give the id of every model's list price at a moment."""
    periods = connection.execute(
        select(price_periods.c.model, price_periods.c.price_id)
        .where(price_periods.c.account_id == LIST, price_periods.c.effective_from <= now)
        .order_by(price_periods.c.effective_from)
    )
    return {period.model: period.price_id for period in periods}


def read_price(connection: Connection, price_id: int, cache: PriceCache) -> Price:
    """Read a price row, from the cache if it was read before."""
    price = cache.get(price_id)
    if price is None:
        row = connection.execute(select(prices).where(prices.c.id == price_id)).mappings().one()
        price = cache[price_id] = _parse(row)
    return price


def _store(connection: Connection, model: str, price: Price) -> int:
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
    components = tuple(Component(**component) for component in row["components"])
    return Price(components, row["minimum_nanos"])

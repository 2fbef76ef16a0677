"""Finds price changes that accounts are to be told: ahead of time, or soon after.

An account is told of a list price if it used the model lately, and of its own price always.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, select

from gateway.checks.moments import microseconds_of, timestamp
from gateway.ledger.prices import LIST, PriceCache, PricePeriod, price_periods_of, read_price
from gateway.notices.due import LOOK_BACK
from gateway.notices.kinds import Notice, in_words
from gateway.notices.store import known_keys
from gateway.notices.subscriptions import subscriptions_of
from gateway.pricing import Price, format_usd
from gateway.tables.core import accounts, price_periods
from gateway.tables.usage import usage_hourly

log = logging.getLogger(__name__)

KIND: Final = "price.changed"
FAR: Final = timedelta(days=30)
"""Time ahead for which every retention keeps a notice until its price begins."""
LATELY: Final = timedelta(days=30)
"""Time for which an account that used a model is told of its prices."""


def price_notices(
    connection: Connection, account_ids: Collection[int], now: datetime, *, cache: PriceCache
) -> list[Notice]:
    """Return the price changes, and cancellations of announced ones, that some accounts have not
    been told of."""
    recent = price_periods.c.effective_from > now - LOOK_BACK
    models = connection.scalars(select(price_periods.c.model).where(recent).distinct()).all()
    if not models:
        return []
    wanting = sorted(
        id
        for id, to in subscriptions_of(connection, account_ids).items()
        if any(one.wants(KIND) for one in to)
    )
    named = select(accounts.c.id, accounts.c.name).where(accounts.c.id.in_(wanting))
    names: dict[int, str] = {row.id: row.name for row in connection.execute(named)}
    found: dict[str, Notice] = {}
    cancelled: dict[str, Notice] = {}
    for model in sorted(models):
        periods = price_periods_of(connection, model=model, account_ids=(LIST, *names))
        users = _users(connection, model, wanting, now - LATELY)
        for account_id, name in names.items():
            for period in periods:
                told = period.account_id == account_id or (
                    period.account_id == LIST and account_id in users
                )
                if not told or period.effective_from <= now - LOOK_BACK:
                    continue
                key = (
                    f"price:{account_id}:{model}:{period.account_id}:"
                    f"{microseconds_of(period.effective_from)}"
                )
                if period.cancelled is not None:
                    cancelled[key] = _cancelled(key, account_id, name, period, now)
                elif pair := _change(periods, period, account_id):
                    try:
                        old, new = (read_price(connection, id, cache) for id in pair)
                    except (LookupError, TypeError, ValueError):
                        # Set aside by the gateways, which do not sell the model at this price.
                        log.warning("a price of %r cannot be read; nobody is told of it", model)
                        continue
                    found[key] = _changed(key, account_id, name, period, now, old=old, new=new)
    announced = known_keys(connection, [*found, *cancelled])
    changes = [each for key, each in found.items() if key not in announced]
    ends = [each for key, each in cancelled.items() if key in announced]
    known = known_keys(connection, [each.key for each in ends])
    return changes + [each for each in ends if each.key not in known]


def _users(
    connection: Connection, model: str, account_ids: Sequence[int], since: datetime
) -> set[int]:
    """Return those accounts that used a model since a moment, from the hourly usage."""
    table = usage_hourly
    query = select(table.c.account_id).where(
        table.c.account_id.in_(account_ids), table.c.hour >= since, table.c.model == model
    )
    return set(connection.scalars(query.distinct()))


def _change(
    periods: Sequence[PricePeriod], period: PricePeriod, account_id: int
) -> tuple[int, int] | None:
    """Return the prices of an account before and after the start of a period, or None if it had
    none or they are the same."""
    standing = [each for each in periods if each.cancelled is None]
    starts_at = period.effective_from
    old = _in_force([each for each in standing if each.effective_from < starts_at], account_id)
    new = _in_force([each for each in standing if each.effective_from <= starts_at], account_id)
    return None if old is None or new is None or old == new else (old, new)


def _in_force(begun: Sequence[PricePeriod], account_id: int) -> int | None:
    latest = {each.account_id: each.price_id for each in begun}
    own = latest.get(account_id)
    return own if own is not None else latest.get(LIST)


def _changed(
    key: str,
    account_id: int,
    name: str,
    period: PricePeriod,
    now: datetime,
    *,
    old: Price,
    new: Price,
) -> Notice:
    when, ahead = in_words(period.effective_from), period.effective_from > now
    verb, before, after = (
        ("changes", "Until then", "From then on") if ahead else ("changed", "Before", "Since then")
    )
    return Notice(
        key=key,
        account_id=account_id,
        kind=KIND,
        subject=f"model {period.model}",
        title=f"The price of {period.model} {verb} at {when}",
        text=(
            f"The price of {period.model} for account {name} {verb} at {when}. {before}: "
            f"{_in_words(old)}. {after}: {_in_words(new)}. A request pays the price that is in "
            "force when it is accepted."
        ),
        data={
            "model": period.model,
            "from": timestamp(period.effective_from),
            "own": period.account_id != LIST,
            "cancelled": False,
            "old": _view(old),
            "new": _view(new),
        },
        lasting=period.effective_from > now + FAR,
    )


def _cancelled(key: str, account_id: int, name: str, period: PricePeriod, now: datetime) -> Notice:
    when = in_words(period.effective_from)
    return Notice(
        key=f"{key}:cancelled",
        account_id=account_id,
        kind=KIND,
        subject=f"model {period.model}",
        title=f"The price of {period.model} does not change at {when}",
        text=(
            f"The change of the price of {period.model} for account {name} that was announced for "
            f"{when} was cancelled. The price stays as it is."
        ),
        data={
            "model": period.model,
            "from": timestamp(period.effective_from),
            "own": period.account_id != LIST,
            "cancelled": True,
            "old": None,
            "new": None,
        },
        lasting=period.effective_from > now + FAR,
    )


def _in_words(price: Price) -> str:
    parts = list(_parts(price))
    if price.minimum_nanos:
        parts.append(f"at least ${format_usd(price.minimum_nanos)} for each request")
    return ", ".join(parts) or "free"


def _parts(price: Price) -> Iterator[str]:
    for part in price.components:
        unit = part.unit.replace("_", " ")
        amount = f"{part.per:,} {unit}s" if part.per != 1 else unit
        when = ", ".join(f"{name} {value}" for name, value in part.when.items())
        yield f"${format_usd(part.amount_nanos)} per {amount}" + (f" ({when})" if when else "")


def _view(price: Price) -> dict[str, Any]:
    return {
        "price": [
            {
                "unit": part.unit,
                "amount": format_usd(part.amount_nanos),
                "per": part.per,
                "when": dict(part.when) or None,
            }
            for part in price.components
        ],
        "minimum": format_usd(price.minimum_nanos) if price.minimum_nanos else None,
    }

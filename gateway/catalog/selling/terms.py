"""All prices and discounts that were, are or will be in force, as a gateway knows them.

They are read once. After that, the journal ``price_changes`` names what has changed since a
version, and only that is read. It is pruned, so a gateway that has fallen behind reads everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, NamedTuple, TypeAlias

from sqlalchemy import Connection, delete, select

from gateway.catalog.selling.batch_prices import PriceSchedule, PriceStart
from gateway.ledger.discounts import Discounts, read_discounts
from gateway.ledger.prices import LIST, not_cancelled, read_version
from gateway.tables.core import price_periods
from gateway.tables.prices import price_changes

CHANGES_MAX: Final = 300
"""Maximum number of changed places that are read one by one; of more, everything is read."""
VERSIONS_KEPT: Final = 10_000
"""Versions of which the journal is kept: gateways are rarely behind by more than one."""

Place: TypeAlias = tuple[str, int]
"""A model, and the account whose price it is."""


@dataclass(frozen=True, slots=True)
class Terms:
    version: int
    schedule: PriceSchedule
    discounts: Discounts
    models: tuple[str, ...]
    """Those with a price."""


NO_TERMS: Final = Terms(0, {}, {}, ())


class OwnPrices(NamedTuple):
    """Of a model: the number of accounts with a price of their own, now or soon, and the next
    start of any price."""

    accounts: int
    next_at: datetime | None


class TermsReading(NamedTuple):
    terms: Terms
    changed: PriceSchedule
    """The part of the schedule whose prices or discounts can be new."""


def read_terms(connection: Connection, known: Terms) -> TermsReading:
    """Read what has changed since the known terms, or everything."""
    # First: anything committed after this has a later version, and is read with it.
    version = read_version(connection)
    places = _read_changes(connection, known.version)
    if places is None:
        schedule = _read_schedule(connection)
        models = tuple(dict.fromkeys(model for model, _ in schedule))
        return TermsReading(Terms(version, schedule, read_discounts(connection), models), schedule)
    if not places:
        return TermsReading(replace(known, version=version), {})
    return _apply_changes(connection, replace(known, version=version), places)


def own_prices(schedule: PriceSchedule, now: datetime) -> dict[str, OwnPrices]:
    """Count the price overrides of each model."""
    found: dict[str, OwnPrices] = {}
    for (model, account_id), starts in schedule.items():
        ahead = [each for each in starts if each.starts_at > now]
        begun = starts[: len(starts) - len(ahead)]
        counts = account_id != LIST and any(
            each.price_id is not None for each in (*begun[-1:], *ahead)
        )
        known = found.get(model, OwnPrices(0, None))
        next_at = min(
            (at for at in (known.next_at, *(e.starts_at for e in ahead[:1])) if at), default=None
        )
        found[model] = OwnPrices(known.accounts + counts, next_at)
    return found


def delete_old_changes(connection: Connection, *, limit: int) -> int:
    """Delete the oldest rows of the journal that no gateway needs, about ``limit``; return their
    number, at most the limit."""
    table = price_changes.c
    needed = read_version(connection) - VERSIONS_KEPT
    old = select(table.version).where(table.version < needed)
    rows = connection.execute(old.order_by(table.version).limit(limit)).all()
    if rows:
        connection.execute(delete(price_changes).where(table.version <= rows[-1].version))
    return len(rows)


def _read_changes(connection: Connection, version: int) -> set[Place] | None:
    """Return the places that have changed since a version; None if they are unknown or many."""
    if version == NO_TERMS.version:
        return None
    table = price_changes.c
    query = select(table.version, table.model, table.account_id).where(table.version >= version)
    rows = connection.execute(query.order_by(table.version).limit(CHANGES_MAX + 1)).all()
    # Old rows are deleted first, so a row of the known version proves that all later ones exist.
    if not rows or rows[0].version != version or len(rows) > CHANGES_MAX:
        return None
    return {(row.model, row.account_id) for row in rows if row.version > version}


def _apply_changes(connection: Connection, known: Terms, places: Collection[Place]) -> TermsReading:
    models = {model for model, _ in places}
    found = _read_schedule(connection, places)
    schedule: dict[Place, Sequence[PriceStart]] = {**known.schedule, **found}
    for place in places:
        if place not in found:  # each of its prices was cancelled
            schedule.pop(place, None)
    discounts = read_discounts(connection, models)
    discounted = {m for m in models if discounts.get(m) != known.discounts.get(m)}
    changed: PriceSchedule = found
    if discounted:
        changed = {
            place: starts
            for place, starts in schedule.items()
            if place in found or place[0] in discounted
        }
    new = models.difference(known.models).intersection(model for model, _ in found)
    terms = replace(
        known,
        schedule=schedule,
        discounts={**known.discounts, **discounts},
        models=(*known.models, *sorted(new)),
    )
    return TermsReading(terms, changed)


def _read_schedule(
    connection: Connection, places: Collection[Place] | None = None
) -> dict[Place, list[PriceStart]]:
    table = price_periods.c
    query = select(table.model, table.account_id, table.effective_from, table.price_id)
    if places is not None:
        # Not by pairs, for which SQLite uses no index; there can be rows of other places.
        query = query.where(
            table.model.in_(sorted({model for model, _ in places})),
            table.account_id.in_(sorted({account_id for _, account_id in places})),
        )
    found: defaultdict[Place, list[PriceStart]] = defaultdict(list)
    rows = connection.execute(query.where(not_cancelled()).order_by(table.effective_from))
    for model, account_id, starts_at, price_id in rows:
        if places is None or (model, account_id) in places:
            found[model, account_id].append(PriceStart(starts_at, price_id))
    return dict(found)

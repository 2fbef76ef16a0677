"""Reprices past usage with another price list. Reads receipts, writes nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import ColumnElement, Connection, func, select

from gateway.archive.marks import Archive, refuse_archived, removed_archives
from gateway.billing.charged import (
    COLUMNS,
    NOTED,
    ChargedRequest,
    NoteProgress,
    archived_charged,
    noted,
    read_charged,
    stored_charged,
)
from gateway.checks.moments import microseconds_of
from gateway.ledger.discounts import class_price, read_discounts
from gateway.pricing import Price, UnpricedUsage, charge
from gateway.tables.core import receipts
from gateway.tables.settlement_time import settled_within
from workers.contract.blobs import Blobs
from workers.contract.jobs import Usage

NEWEST: Final = 500
"""Requests among which examples are looked for."""


@dataclass(slots=True)
class RepricedUsage:
    """One model's charged requests: what they cost, and what they would have cost.

    Requests that the other list does not price are counted separately, in neither amount.
    """

    model: str
    requests: int = 0
    charged_nanos: int = 0
    repriced_nanos: int = 0
    unpriced_requests: int = 0
    unpriced_nanos: int = 0

    @property
    def difference_nanos(self) -> int:
        return self.repriced_nanos - self.charged_nanos


@dataclass(frozen=True, slots=True)
class _Choice:
    """The requests to reprice; None is not filtered."""

    starts_at: datetime
    ends_at: datetime
    account_id: int | None
    model: str | None
    without_accounts: Collection[int]


def whatif(
    connection: Connection,
    prices: Mapping[str, Price],
    *,
    starts_at: datetime,
    ends_at: datetime,
    account_id: int | None = None,
    model: str | None = None,
    without_accounts: Collection[int] = (),
    blobs: Blobs | None = None,
    progress: NoteProgress | None = None,
) -> list[RepricedUsage]:
    """Reprice the charged requests of a span, by model; refunds are ignored.

    ``without_accounts``: those that a list price does not concern, because they have their own.
    Requests of batches get the discount that was in force at their acceptance. Archived requests
    are read from ``blobs``; without it, raise ``Gone`` if there are any. Raise ``Unavailable``
    if a file cannot be read.
    """
    chosen = _Choice(starts_at, ends_at, account_id, model, without_accounts)
    archives = removed_archives(connection, (starts_at, ends_at))
    if blobs is None:
        refuse_archived([archive.month for archive in archives], "another price")
    conditions = settled_within(connection, starts_at, ends_at)
    query = stored_charged(archives, *conditions, *_concerned(account_id, model, without_accounts))
    stored = connection.execute(query, execution_options={"yield_per": NOTED}).mappings()
    requests: Iterator[ChargedRequest] = map(read_charged, stored)
    if blobs is not None and archives:
        requests = itertools.chain(requests, _archived(blobs, archives, chosen))
    if progress is not None:
        counted = select(func.count()).select_from(query.subquery())
        requests = noted(requests, connection.execute(counted).scalar_one(), progress)
    discounts = read_discounts(connection)
    found: defaultdict[str, RepricedUsage] = defaultdict(lambda: RepricedUsage(""))
    for each in requests:
        sums = found[each.model]
        sums.model = each.model
        price = prices.get(each.model)
        if price is not None:
            price = class_price(price, each.service_class, discounts, each.model, each.accepted_at)
        would = _would_cost(price, each.usage)
        if would is None:
            sums.unpriced_requests += 1
            sums.unpriced_nanos += each.charge_nanos
            continue
        sums.requests += 1
        sums.charged_nanos += each.charge_nanos
        sums.repriced_nanos += would
    return [found[model] for model in sorted(found)]


def total_of(found: Iterable[RepricedUsage]) -> RepricedUsage:
    """Sum the models of a what-if."""
    whole = RepricedUsage("total")
    for each in found:
        whole.requests += each.requests
        whole.charged_nanos += each.charged_nanos
        whole.repriced_nanos += each.repriced_nanos
        whole.unpriced_requests += each.unpriced_requests
        whole.unpriced_nanos += each.unpriced_nanos
    return whole


def example_requests(
    connection: Connection,
    model: str,
    *,
    account_id: int | None = None,
    without_accounts: Collection[int] = (),
) -> list[ChargedRequest]:
    """Return a cheap, a usual and a dear one of a model's newest requests: the first tenth, the
    middle and the last tenth of ``NEWEST``; fewer if there are fewer."""
    standard = receipts.c.service_class == "standard"
    concerned = _concerned(account_id, model, without_accounts)
    query = stored_charged((), standard, *concerned)
    query = query.order_by(receipts.c.request_id.desc()).limit(NEWEST)
    rows = map(read_charged, connection.execute(query).mappings())
    found: Sequence[ChargedRequest] = sorted(rows, key=lambda each: each.charge_nanos)
    places = dict.fromkeys(len(found) * tenths // 10 for tenths in (1, 5, 9))
    return [found[place] for place in places if place < len(found)]


def _concerned(
    account_id: int | None, model: str | None, without_accounts: Collection[int]
) -> list[ColumnElement[bool]]:
    """Return the conditions for the receipts that a price concerns."""
    conditions = []
    if account_id is not None:
        conditions.append(receipts.c.account_id == account_id)
    if model is not None:
        conditions.append(receipts.c.model == model)
    if without_accounts:
        conditions.append(receipts.c.account_id.not_in(without_accounts))
    return conditions


def _archived(
    blobs: Blobs, archives: Iterable[Archive], chosen: _Choice
) -> Iterator[ChargedRequest]:
    """Yield the archived requests that were charged in a span."""
    # Imported late because importing pyarrow takes long.
    from gateway.archive.files import read_groups

    starts_at, ends_at = chosen.starts_at, chosen.ends_at
    equal: dict[str, str | int | None] = {"account_id": chosen.account_id, "model": chosen.model}
    settled = (microseconds_of(starts_at), microseconds_of(ends_at))
    columns = (*COLUMNS, "outcome", "settled_at")
    for archive in archives:
        assert archive.manifest is not None
        for file in archive.manifest.of("receipts"):
            for page in read_groups(blobs, file, "settled_at", [settled], columns):
                for each in archived_charged(page, "settled_at", starts_at, ends_at, **equal):
                    if each.account_id not in chosen.without_accounts:
                        yield each


def _would_cost(price: Price | None, usage: Usage) -> int | None:
    if price is None:
        return None
    try:
        return charge(price, usage).total_nanos
    except (UnpricedUsage, ValueError):
        return None

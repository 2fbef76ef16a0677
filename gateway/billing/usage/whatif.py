"""Reprices past usage with another price list. Reads receipts, writes nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from gateway.archive.marks import Archive, refuse_archived, removed_archives
from gateway.billing.charged import (
    COLUMNS,
    ChargedRequest,
    archived_charged,
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


def whatif(
    connection: Connection,
    prices: Mapping[str, Price],
    *,
    starts_at: datetime,
    ends_at: datetime,
    account_id: int | None = None,
    blobs: Blobs | None = None,
) -> list[RepricedUsage]:
    """Reprice the charged requests of a span, by model; refunds are ignored.

    Requests of batches get the discount that was in force at their acceptance. Archived requests
    are read from ``blobs``; without it, raise ``Gone`` if there are any. Raise ``Unavailable``
    if a file cannot be read.
    """
    archives = removed_archives(connection, (starts_at, ends_at))
    if blobs is None:
        refuse_archived([archive.month for archive in archives], "another price")
    conditions = settled_within(connection, starts_at, ends_at)
    if account_id is not None:
        conditions.append(receipts.c.account_id == account_id)
    query = stored_charged(archives, *conditions)
    stored = connection.execute(query, execution_options={"yield_per": 1000}).mappings()
    requests: Iterator[ChargedRequest] = map(read_charged, stored)
    if blobs is not None and archives:
        archived = _archived(blobs, archives, starts_at, ends_at, account_id)
        requests = itertools.chain(requests, archived)
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


def _archived(
    blobs: Blobs,
    archives: Iterable[Archive],
    starts_at: datetime,
    ends_at: datetime,
    account_id: int | None,
) -> Iterator[ChargedRequest]:
    """Yield the archived requests that were charged in a span."""
    # Imported late because importing pyarrow takes long.
    from gateway.archive.files import read_groups

    settled = (microseconds_of(starts_at), microseconds_of(ends_at))
    columns = (*COLUMNS, "outcome", "settled_at")
    for archive in archives:
        assert archive.manifest is not None
        for file in archive.manifest.of("receipts"):
            for page in read_groups(blobs, file, "settled_at", [settled], columns):
                yield from archived_charged(
                    page, "settled_at", starts_at, ends_at, account_id=account_id
                )


def _would_cost(price: Price | None, usage: Usage) -> int | None:
    if price is None:
        return None
    try:
        return charge(price, usage).total_nanos
    except (UnpricedUsage, ValueError):
        return None

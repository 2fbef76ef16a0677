"""Ledger entries of an account: each transfer, and the requests that a charge covers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, literal_column, select

from gateway.archive.marks import REMOVED, Archive, list_archives
from gateway.checks.moments import MICROSECOND
from gateway.tables.archives import archived_charges
from gateway.tables.core import receipts, refunds, transfers
from gateway.tables.settlement_time import booked_at, recent_transfers, settled_within

REQUESTS_MAX = 1000
"""Maximum number of requests listed for one charge; a batch of charges has at most 128."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One transfer; money received is positive. ``requests``: number of receipts of a charge.

    Archived charges that follow each other are one entry, with the id of the last of them.
    """

    id: int
    kind: str
    amount_nanos: int
    balance_nanos: int
    actor: str
    reason: str
    booked_at: datetime
    requests: int
    request_id: str | None
    """The request that a refund or correction is for; None for other kinds."""
    key: str = ""
    """What can be booked only once; of operators' credit, its kind and reference."""


@dataclass(frozen=True, slots=True)
class ChargedEntry:
    """One request's share of a charge."""

    request_id: str
    model: str
    cost_nanos: int


def entries(
    connection: Connection,
    account_id: int,
    *,
    limit: int,
    below: int | None = None,
    kind: str | None = None,
) -> list[LedgerEntry]:
    """List transfers by descending id, starting below an id."""
    conditions = [] if below is None else [transfers.c.id < below]
    if kind is not None:
        conditions.append(transfers.c.kind == kind)
        if kind != "charge":
            # Literally the condition of the partial index, so that the planner uses it.
            conditions.append(transfers.c.kind != literal_column("'charge'"))
    rows: list[tuple[Any, bool]] = []
    # Of rare kinds a month or a year hardly ever has enough.
    spans = recent_transfers(connection, below) if kind in (None, "charge") else [([], None)]
    for span, complete_from in spans:
        rows = []
        for side in (transfers.c.from_account, transfers.c.to_account):
            query = _entries().where(side == account_id, *conditions, *span)
            found_rows = connection.execute(query.order_by(transfers.c.id.desc()).limit(limit))
            rows += [(row, side is transfers.c.to_account) for row in found_rows]
        rows = sorted(rows, key=lambda each: each[0].id, reverse=True)[:limit]
        if complete_from and len(rows) == limit and rows[-1][0].booked_at >= complete_from:
            break
    counts = _count_requests(connection, [row for row, _ in rows])
    found = [_entry(row, inward, counts[row.id]) for row, inward in rows]
    if kind in (None, "charge"):
        found += _archived(connection, account_id, limit=limit, below=below)
    found.sort(key=lambda entry: entry.id, reverse=True)
    return found[:limit]


@dataclass(frozen=True, slots=True)
class ArchivedEntry:
    """An entry whose requests are in archives: a run of charges, or a charge by its own id.

    Charges with ids in ``returned`` are entries of their own again.
    """

    id: int
    account_id: int
    archives: Sequence[Archive]
    entry: LedgerEntry | None = None
    first_version: int = 0
    last_version: int = 0
    returned: frozenset[int] = frozenset()


def find_entry(
    connection: Connection, account_id: int, id: int
) -> tuple[LedgerEntry, list[ChargedEntry]] | ArchivedEntry:
    """Find a transfer and, of a charge, its requests; or where archives have them.

    Raise ``LookupError`` if it is unknown.
    """
    moment = booked_at(connection, id)
    for side in (transfers.c.from_account, transfers.c.to_account) if moment else ():
        # By its moment as well, so that only one partition is read.
        query = _entries().where(transfers.c.id == id, transfers.c.booked_at == moment)
        row = connection.execute(query.where(side == account_id)).first()
        if row is not None:
            rows = connection.execute(
                select(receipts.c.request_id, receipts.c.model, receipts.c.charge_nanos)
                .where(
                    receipts.c.transfer_id == id,
                    *settled_within(connection, row.booked_at, row.booked_at + MICROSECOND),
                )
                .order_by(receipts.c.request_id)
                .limit(REQUESTS_MAX)
            )
            requests = _count_requests(connection, [row])[id]
            return _entry(row, side is transfers.c.to_account, requests), [
                ChargedEntry(*each) for each in rows
            ]
    found = [each for each in list_archives(connection) if _has_charge(each, id)]
    if not found:
        raise LookupError(f"unknown entry {id}")
    carried = archived_charges.c
    row = connection.execute(
        select(archived_charges).where(carried.account_id == account_id, carried.transfer_id == id)
    ).first()
    if row is None:
        return ArchivedEntry(id, account_id, found)
    returned = select(transfers.c.id).where(
        transfers.c.from_account == account_id,
        transfers.c.account_version >= row.first_version,
        transfers.c.account_version <= row.last_version,
    )
    return ArchivedEntry(
        id,
        account_id,
        [each for each in found if each.month == row.month],
        _run(row),
        row.first_version,
        row.last_version,
        frozenset(connection.execute(returned).scalars()),
    )


def _has_charge(archive: Archive, id: int) -> bool:
    """Whether the files of an archive can have a charge that is not in the database."""
    if archive.manifest is None or archive.state not in REMOVED:
        return False
    return any(int(file.first) <= id <= int(file.last) for file in archive.manifest.of("transfers"))


def charge_of(connection: Connection, account_id: int, request_id: str) -> LedgerEntry | None:
    """Find the transfer that charged a request; None if it is free, or archived."""
    settled = select(receipts.c.transfer_id, receipts.c.settled_at)
    receipt = connection.execute(settled.where(receipts.c.request_id == request_id)).first()
    if receipt is None or receipt.transfer_id is None:
        return None
    # A charge is booked when its receipts are settled.
    row = connection.execute(
        _entries().where(
            transfers.c.id == receipt.transfer_id,
            transfers.c.booked_at == receipt.settled_at,
            transfers.c.from_account == account_id,
        )
    ).first()
    if row is None:
        return None
    return _entry(row, False, _count_requests(connection, [row])[row.id])


def _archived(
    connection: Connection, account_id: int, *, limit: int, below: int | None
) -> list[LedgerEntry]:
    carried = archived_charges.c
    query = select(archived_charges).where(
        carried.account_id == account_id,
        carried.amount_nanos > carried.returned_nanos,
    )
    if below is not None:
        query = query.where(carried.transfer_id < below)
    rows = connection.execute(query.order_by(carried.transfer_id.desc()).limit(limit))
    return [_run(row) for row in rows]


def _run(row: Any) -> LedgerEntry:
    return LedgerEntry(
        id=row.transfer_id,
        kind="charge",
        amount_nanos=row.returned_nanos - row.amount_nanos,
        balance_nanos=row.posted_after,
        actor="archive",
        reason=f"archived charges of {row.month}",
        booked_at=row.booked_at,
        requests=row.requests,
        request_id=None,
    )


def _entries() -> Any:
    return select(
        transfers.c.id,
        transfers.c.kind,
        transfers.c.amount_nanos,
        transfers.c.posted_after,
        transfers.c.actor,
        transfers.c.reason,
        transfers.c.booked_at,
        transfers.c.key,
        refunds.c.request_id,
    ).outerjoin(refunds, refunds.c.transfer_id == transfers.c.id)


def _count_requests(connection: Connection, rows: Sequence[Any]) -> Counter[int]:
    """Count the receipts of charges; they are settled when their charge is booked."""
    booked = {row.id: row.booked_at for row in rows if row.kind == "charge"}
    if not booked:
        return Counter()
    first, last = min(booked.values()), max(booked.values())
    query = (
        select(receipts.c.transfer_id, func.count())
        .where(
            receipts.c.transfer_id.in_(booked),
            *settled_within(connection, first, last + MICROSECOND),
        )
        .group_by(receipts.c.transfer_id)
    )
    return Counter({row[0]: row[1] for row in connection.execute(query)})


def _entry(row: Any, inward: bool, requests: int) -> LedgerEntry:
    return LedgerEntry(
        id=row.id,
        kind=row.kind,
        amount_nanos=row.amount_nanos if inward else -row.amount_nanos,
        balance_nanos=row.posted_after,
        actor=row.actor,
        reason=row.reason,
        booked_at=row.booked_at,
        requests=requests,
        request_id=row.request_id,
        key=row.key,
    )

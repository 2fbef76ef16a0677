"""R2, R4, R11: the transfers of one account, in the order of its versions.

Each transfer changed the balance by its amount, and each charge is the sum of its receipts.
Archived charges are one entry; those among them that are transfers again are a part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, select, union_all

from gateway.checks.moments import MICROSECOND
from gateway.ids import first_request_id
from gateway.ledger.periods import month_of
from gateway.ledger.proof.carry import Carry, LedgerPosition
from gateway.ledger.proof.findings import Finding, differ
from gateway.pricing import format_usd
from gateway.sql.database import exact_sum
from gateway.sql.partitions import is_partitioned
from gateway.tables.archives import archived_charges, archives
from gateway.tables.core import receipts, transfers
from gateway.tables.settlement_time import LAG, LEAD

SPLIT_FROM: Final = 200
"""Number of transfers from which queries for each month are faster than one for all of them: for
1,000 in 25 months, 16 ms at most and 145 ms. Below, planning takes longer than looking up."""


class _Move(NamedTuple):
    """A transfer, or an archived run of charges with its last version (``until``)."""

    version: int
    is_transfer: bool
    id: int
    amount: int
    after: int
    booked_at: datetime
    until: int = 0
    returned: int = 0


class Chain:
    """Proves the transfers of one account, page by page.

    ``closed_until`` is the end of the last closed month: ``position`` is carried from there on.
    """

    def __init__(self, account_id: int, carry: Carry, *, closed_until: datetime | None) -> None:
        self._account_id = account_id
        self._closed_until = closed_until
        self._booked_since = carry.booked_since
        self._read = carry.position.transfer_id
        self._entries_read = self._version = carry.position.version
        self._after = self.total_nanos = carry.position.posted_nanos
        """``total_nanos``: sum of all transfers so far."""
        self._until = self._returned = 0
        self.position = carry.position
        self.booked_since = closed_until
        self._is_beyond = False
        self.is_complete = False

    def read_page(self, connection: Connection, limit: int) -> Iterator[Finding]:
        """Prove the next transfers; ``is_complete`` tells whether they were the last."""
        rows = connection.execute(self._page(limit)).all()
        self.is_complete = len(rows) < limit
        if rows:
            self._read = rows[-1].id
        moves = [self._move(row) for row in rows]
        moves += self._entries(connection, None if self.is_complete else max(moves).version)
        for move in sorted(moves):
            yield from self._follow(move)
        charges = [row for row in rows if row.kind == "charge"]
        if charges:
            yield from _charges_are_sums_of_receipts(connection, charges)
        if self.is_complete and self._returned:
            yield self._returned_differ()
            self._returned = 0

    def _page(self, limit: int) -> Select[Any]:
        """Select the next transfers from and to the account. Their ids are in the order of its
        versions, because both are assigned under its lock."""
        sides = []
        for side in (transfers.c.from_account, transfers.c.to_account):
            query = select(transfers).where(side == self._account_id, transfers.c.id > self._read)
            if self._booked_since is not None:
                query = query.where(transfers.c.booked_at >= self._booked_since)
            sides.append(select(query.order_by(transfers.c.id).limit(limit).subquery()))
        both = union_all(*sides).subquery()
        return select(both).order_by(both.c.id).limit(limit)

    def _move(self, row: Row[Any]) -> _Move:
        inward = row.to_account == self._account_id
        amount = row.amount_nanos if inward else -row.amount_nanos
        return _Move(row.account_version, True, row.id, amount, row.posted_after, row.booked_at)

    def _entries(self, connection: Connection, version: int | None) -> list[_Move]:
        """Read the archived charges up to a version, or the remaining ones."""
        carried = archived_charges.c
        query = select(archived_charges).where(
            carried.account_id == self._account_id, carried.first_version > self._entries_read
        )
        if version is not None:
            query = query.where(carried.first_version <= version)
        found = [
            _Move(
                row.first_version, False, row.transfer_id, -row.amount_nanos, row.posted_after,
                row.booked_at, row.last_version, row.returned_nanos,
            )
            for row in connection.execute(query.order_by(carried.first_version))
        ]  # fmt: skip
        if found:
            self._entries_read = found[-1].version
        return found

    def _follow(self, move: _Move) -> Iterator[Finding]:
        if self._returned and move.version > self._until:
            yield self._returned_differ()
            self._returned = 0
        if move.is_transfer and move.version <= self._until:
            self._returned += move.amount
        else:
            if move.version <= self._version:
                yield Finding("R11", f"transfer {move.id}", f"repeats the version {move.version}")
            due = self._after + move.amount
            if move.after != due:
                yield differ("R11", f"transfer {move.id}", "left", move.after, due)
            self._version, self._after = move.until or move.version, move.after
            if not move.is_transfer:
                self._until, self._returned = move.until, move.returned
        self.total_nanos += move.amount + move.returned
        self._carry(move)

    def _carry(self, move: _Move) -> None:
        if self._closed_until is None or self.booked_since is None:
            return
        if move.booked_at >= self._closed_until:
            self._is_beyond = True
        elif self._is_beyond:
            # Booked by a gateway whose clock was behind, after one whose clock was not.
            self.booked_since = min(self.booked_since, move.booked_at)
        else:
            self.position = LedgerPosition(
                max(self.position.transfer_id, move.id),
                max(self.position.version, move.until or move.version),
                self.total_nanos,
            )

    def _returned_differ(self) -> Finding:
        nanos = self._returned
        return Finding(
            "R11",
            f"account {self._account_id}",
            f"the archived charges up to version {self._until} are in the ledger again with "
            f"{format_usd(abs(nanos))} {'less' if nanos > 0 else 'more'} than is recorded",
        )


def by_month(
    connection: Connection, booked: Mapping[int, datetime]
) -> Iterator[Mapping[int, datetime]]:
    """Split many transfers by the month of their booking, for queries by their ids, because
    PostgreSQL looks for each id in the partitions of all months of a query."""
    if len(booked) < SPLIT_FROM or not is_partitioned(connection):
        yield booked
        return
    months: defaultdict[str, dict[int, datetime]] = defaultdict(dict)
    for id, moment in booked.items():
        months[month_of(moment)][id] = moment
    yield from months.values()


def _charges_are_sums_of_receipts(
    connection: Connection, charges: Sequence[Row[Any]]
) -> Iterator[Finding]:
    """R4: each charge is the sum of its receipts."""
    billed: dict[int, int] = {}
    for booked in by_month(connection, {row.id: row.booked_at for row in charges}):
        first, last = min(booked.values()), max(booked.values())
        # Almost all receipts have ids of the time before their charge.
        usual = receipts.c.request_id.between(
            first_request_id(first - LAG), first_request_id(last + MICROSECOND + LEAD)
        )
        billed |= _billed(connection, list(booked), usual)
    wrong = [row for row in charges if row.amount_nanos != billed.get(row.id, 0)]
    if not wrong:
        return
    billed = _billed(connection, [row.id for row in wrong])
    # Restoring inserts the charges of a month before their receipts.
    query = select(archives.c.month).where(archives.c.state == "restoring")
    restoring = set(connection.execute(query).scalars())
    for row in wrong:
        due = billed.get(row.id, 0)
        if row.amount_nanos != due and month_of(row.booked_at) not in restoring:
            yield differ("R4", f"transfer {row.id}", "charged", row.amount_nanos, due)


def _billed(
    connection: Connection, ids: Sequence[int], *conditions: ColumnElement[bool]
) -> dict[int, int]:
    query = (
        select(receipts.c.transfer_id, exact_sum(receipts.c.charge_nanos))
        .where(receipts.c.transfer_id.in_(ids), *conditions)
        .group_by(receipts.c.transfer_id)
    )
    return {row[0]: row[1] for row in connection.execute(query)}

"""Reads what was booked for one account, page by page, up to the horizon.

R4, R7, R14 are checked row by row. Sums by key, budget window and hour are collected for the
comparison with what is stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, Select, and_, or_, select

from gateway.checks.moments import MICROSECOND
from gateway.ledger.proof.carry import Carry, Spending
from gateway.ledger.proof.chain import Chain, by_month
from gateway.ledger.proof.findings import Finding, differ
from gateway.ledger.proof.repricing import COLUMNS, PriceHistory
from gateway.ledger.proof.snapshots import Snapshots
from gateway.sql.database import exact_sum
from gateway.tables.core import receipts, refunds, transfers
from gateway.tables.settlement_time import settled_within

FINDINGS_MAX: Final = 1000
"""Findings of one account; the rest is not listed."""


class Walk:
    """What is proven of one account, from its carried sums on.

    ``closed_until`` is the end of the last closed month: sums up to there are kept apart in
    ``closed``, because the next proof starts from them.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        prices: PriceHistory,
        account_id: int,
        carry: Carry,
        *,
        closed_until: datetime | None,
    ) -> None:
        self.account_id = account_id
        self.carry = carry
        self.chain = Chain(account_id, carry, closed_until=closed_until)
        self.closed = Spending()
        self.later = Spending()
        self.hours: defaultdict[datetime, list[int]] = defaultdict(lambda: [0, 0, 0])
        """Requests, charges and refunds by the hour of their booking."""
        self.findings: list[Finding] = []
        self._snapshots = snapshots
        self._prices = prices
        self._closed_until = closed_until
        self._receipt: tuple[datetime, str] | None = None
        self._refund: tuple[datetime, str, int] | None = None

    def advance(self, horizon: datetime) -> None:
        """Read the rows that were booked up to a moment, after those that were read before."""
        self._read(lambda connection: self._receipts(connection, horizon))
        self._read(lambda connection: self._refunds(connection, horizon))
        self._read(self._transfers)

    def add(self, findings: Iterator[Finding]) -> None:
        for finding in findings:
            if len(self.findings) < FINDINGS_MAX:
                self.findings.append(finding)

    def _read(self, page: Callable[[Connection], bool]) -> None:
        more = True
        while more:
            with self._snapshots.open() as connection:
                more = page(connection)

    def _transfers(self, connection: Connection) -> bool:
        self.add(self.chain.read_page(connection, self._snapshots.page))
        return not self.chain.is_complete

    def _receipts(self, connection: Connection, horizon: datetime) -> bool:
        rows = connection.execute(self._receipt_page(connection, horizon)).mappings().all()
        for row in rows:
            charged, booked_at = row["charge_nanos"], row["settled_at"]
            self._spending(booked_at).add(row["key_id"], row["windows"], charged)
            hour = self.hours[_hour(booked_at)]
            hour[0] += 1
            hour[1] += charged
        if rows:
            self._receipt = rows[-1]["settled_at"], rows[-1]["request_id"]
            self.add(self._prices.prove(connection, rows))
            booked = {row["transfer_id"]: row["settled_at"] for row in rows if row["transfer_id"]}
            self.add(_transfers_exist("receipts", booked, _amounts(connection, booked)))
        return len(rows) == self._snapshots.page

    def _receipt_page(self, connection: Connection, horizon: datetime) -> Select[Any]:
        id, settled_at = receipts.c.request_id, receipts.c.settled_at
        query = select(*COLUMNS).where(receipts.c.account_id == self.account_id)
        since = self.carry.since
        if since is not None:
            query = query.where(*settled_within(connection, since, horizon + MICROSECOND))
        else:
            query = query.where(settled_at <= horizon)
        if self._receipt is not None:
            moment, last = self._receipt
            query = query.where(
                settled_at >= moment,
                or_(settled_at > moment, and_(settled_at == moment, id > last)),
            )
        return query.order_by(settled_at, id).limit(self._snapshots.page)

    def _refunds(self, connection: Connection, horizon: datetime) -> bool:
        rows = connection.execute(self._refund_page(horizon)).mappings().all()
        if not rows:
            return False
        last = rows[-1]
        self._refund = last["booked_at"], last["request_id"], last["seq"]
        # Not by a join, which can read all partitions.
        id = receipts.c.request_id
        query = select(id, receipts.c.key_id, receipts.c.windows, receipts.c.charge_nanos)
        of_rows = query.where(id.in_({row["request_id"] for row in rows}))
        charged = {each["request_id"]: each for each in connection.execute(of_rows).mappings()}
        for row in rows:
            self.hours[_hour(row["booked_at"])][2] += row["amount_nanos"]
            if (receipt := charged.get(row["request_id"])) is not None:
                spending = self._spending(row["booked_at"])
                spending.add(receipt["key_id"], receipt["windows"], -row["amount_nanos"])
        self.add(_refunds_are_part_of_charges(connection, rows, charged))
        return len(rows) == self._snapshots.page

    def _refund_page(self, horizon: datetime) -> Select[Any]:
        booked_at, id, seq = refunds.c.booked_at, refunds.c.request_id, refunds.c.seq
        query = select(refunds).where(refunds.c.account_id == self.account_id, booked_at <= horizon)
        if self.carry.since is not None:
            query = query.where(booked_at >= self.carry.since)
        if self._refund is not None:
            moment, last, number = self._refund
            later = or_(id > last, and_(id == last, seq > number))
            query = query.where(
                booked_at >= moment, or_(booked_at > moment, and_(booked_at == moment, later))
            )
        return query.order_by(booked_at, id, seq).limit(self._snapshots.page)

    def _spending(self, booked_at: datetime) -> Spending:
        is_closed = self._closed_until is not None and booked_at < self._closed_until
        return self.closed if is_closed else self.later


def _hour(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)


def _transfers_exist(
    table: str, booked: Collection[int], amounts: Collection[int]
) -> Iterator[Finding]:
    """R14: the transfers of rows exist."""
    for id in sorted(set(booked) - set(amounts)):
        yield Finding("R14", f"{table} {id}", "refers to no row of transfers")


def _amounts(connection: Connection, booked: Mapping[int, datetime]) -> dict[int, int]:
    """Read the amounts of transfers; ``booked``: transfer → when it should be booked."""
    found: dict[int, int] = {}
    query = select(transfers.c.id, transfers.c.amount_nanos)
    for some in by_month(connection, booked) if booked else ():
        usual = transfers.c.booked_at.between(min(some.values()), max(some.values()))
        found.update(connection.execute(query.where(transfers.c.id.in_(some), usual)).all())
    if lost := booked.keys() - found.keys():
        found.update(connection.execute(query.where(transfers.c.id.in_(lost))).all())
    return found


def _refunds_are_part_of_charges(
    connection: Connection, rows: Sequence[RowMapping], charged: Mapping[str, RowMapping]
) -> Iterator[Finding]:
    """R4: each refund moved its amount, and no request was refunded more than its charge."""
    booked = {row["transfer_id"]: row["booked_at"] for row in rows}
    amounts = _amounts(connection, booked)
    yield from _transfers_exist("refunds", booked, amounts)
    ids = {row["request_id"] for row in rows}
    given = select(refunds.c.request_id, exact_sum(refunds.c.amount_nanos))
    given = given.where(refunds.c.request_id.in_(ids)).group_by(refunds.c.request_id)
    returned = {row[0]: row[1] for row in connection.execute(given)}
    for row in rows:
        id, amount = row["request_id"], row["amount_nanos"]
        if amounts.get(row["transfer_id"], amount) != amount:
            yield differ("R4", id, "refunded", amounts[row["transfer_id"]], amount)
        receipt = charged.get(id)
        if receipt is None:
            yield Finding("R14", f"refunds {id}", "refers to no row of receipts")
        elif returned[id] > receipt["charge_nanos"]:
            back = returned[id]
            yield differ("R4", id, "refunded more than its charge:", back, receipt["charge_nanos"])

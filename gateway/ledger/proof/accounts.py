"""Proves all accounts: R2, R3, R4, R7, R8, R9, R10, R11 and the references of their rows.

Accounts are proven in groups. Of each account its rows are walked; then what is stored of the group
is compared on one snapshot. An account with a finding is proven again at the end, because the
finding can be a race with an archive that is written or restored meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, TypeAlias

from sqlalchemy import Connection, exists, func, or_, select

from gateway.ledger.periods import is_month, month_of, span_of, utc_now
from gateway.ledger.proof.carry import Carry, forget_carry, read_carries, write_carry
from gateway.ledger.proof.findings import Finding
from gateway.ledger.proof.groups import REMOVED, account_groups, carried_alike, group_of
from gateway.ledger.proof.repricing import PriceHistory
from gateway.ledger.proof.snapshots import FOREVER, SKEW, Snapshots
from gateway.ledger.proof.standing import Standing
from gateway.ledger.proof.walk import Walk
from gateway.pricing import format_usd
from gateway.sql.database import exact_sum
from gateway.tables.archives import archives
from gateway.tables.core import periods, receipts, refunds, transfers
from gateway.tables.proofs import proven_accounts
from gateway.tables.settlement_time import settled_within
from gateway.tables.usage import usage_hourly, usage_hours

AGAIN: Final = 2
"""Times that an account with a finding is proven again."""
RENEWALS: Final = 3
"""Times that a group is read up to a newer horizon, so that few rows are left for its snapshot."""
HOURS: Final = timedelta(days=7)
"""Span whose hourly sums are read on one snapshot."""

Keep: TypeAlias = Callable[[Callable[[Connection], None]], object]
"""Runs a function in a short writing transaction."""


@dataclass
class Proof:
    """A run: what it reads, and how it stores the sums from which the next run starts.

    Without ``keep`` nothing is stored. ``whole``: read everything, from the beginning.
    """

    snapshots: Snapshots
    whole: bool = True
    keep: Keep | None = None
    prices: PriceHistory = field(default_factory=PriceHistory)


def prove_accounts(proof: Proof) -> Iterator[Finding]:
    """Prove all customer accounts. Yield what differs."""
    closed = None if proof.keep is None else _last_closed(proof)
    doubtful: list[int] = []
    for ids in account_groups(proof.snapshots):
        for id, findings in _prove_group(proof, ids, closed).items():
            if proof.snapshots.alone:
                yield from findings
            elif findings:
                doubtful.append(id)
    while doubtful:
        with proof.snapshots.open() as connection:
            ids = group_of(connection, doubtful[0])
        doubtful = [id for id in doubtful[1:] if id not in ids]
        for id, findings in _again(proof, ids, closed).items():
            if findings and proof.whole and proof.keep is not None:
                # A closed month can differ, which the next proof would not read.
                proof.keep(functools.partial(forget_carry, account_id=id))
            yield from findings


def _again(proof: Proof, ids: Sequence[int], closed: str | None) -> Mapping[int, list[Finding]]:
    found: Mapping[int, list[Finding]] = {}
    for _ in range(AGAIN):
        found = _prove_group(proof, ids, closed)
        if not any(found.values()):
            break
    return found


def _prove_group(
    proof: Proof, ids: Sequence[int], closed: str | None
) -> Mapping[int, list[Finding]]:
    snapshots = proof.snapshots
    horizon = snapshots.horizon()
    with snapshots.open() as connection:
        carries: Mapping[int, Carry] = {}
        if not proof.whole:
            carries = carried_alike(connection, ids, read_carries(connection, ids))
        idle = _idle(connection, carries)
    closed_until = None if closed is None else span_of(closed).ends_at
    walks = {
        id: Walk(
            snapshots, proof.prices, id, carries.get(id, Carry()), closed_until=closed_until
        )
        for id in ids
    }  # fmt: skip
    for id in ids:
        if id not in idle:
            walks[id].advance(horizon)
    for _ in range(RENEWALS):
        newer = snapshots.horizon()
        if newer == horizon:
            break
        horizon = newer
        for walk in walks.values():
            walk.advance(horizon)
    for id in ids:
        if id not in idle:
            walks[id].add(_hours_are_receipts(proof, walks[id], horizon))
    with snapshots.open() as connection:
        Standing(connection, walks, horizon, snapshots.page).prove()
    if proof.keep is not None and closed is not None:
        proven = [
            walk
            for walk in walks.values()
            if not walk.findings and (proof.whole or walk.carry.month < closed)
        ]
        if proven:
            proof.keep(functools.partial(_carry, proven=proven, month=closed))
    return {id: walk.findings for id, walk in walks.items()}


def _carry(connection: Connection, proven: Sequence[Walk], month: str) -> None:
    for walk in proven:
        since = walk.chain.booked_since
        carry = Carry(month, walk.chain.position, since)
        closed = walk.closed
        write_carry(
            connection,
            walk.account_id,
            carry,
            keys=closed.keys,
            windows=closed.windows,
            anew=not walk.carry.month,
        )


def _last_closed(proof: Proof) -> str | None:
    """Return the last month before which, and in which, nothing is booked any more."""
    with proof.snapshots.open() as connection:
        rows = connection.execute(select(periods.c.month, periods.c.state)).all()
    named = [row for row in rows if is_month(row.month)]
    still_open = min((row.month for row in named if row.state != "closed"), default="9999-12")
    ended = [row.month for row in named if span_of(row.month).ends_at < utc_now() - SKEW]
    return max((month for month in ended if month < still_open), default=None)


def _idle(connection: Connection, carries: Mapping[int, Carry]) -> set[int]:
    """Return the accounts for which nothing was booked since their carried sums."""
    found: set[int] = set()
    for month in {carry.month for carry in carries.values()}:
        since = span_of(month).ends_at
        id = proven_accounts.c.account_id
        busy = or_(
            exists().where(receipts.c.account_id == id, *settled_within(connection, since)),
            exists().where(refunds.c.account_id == id, refunds.c.booked_at >= since),
            *(
                exists().where(
                    side == id,
                    transfers.c.id > proven_accounts.c.transfer_id,
                    transfers.c.booked_at >= proven_accounts.c.booked_since,
                )
                for side in (transfers.c.from_account, transfers.c.to_account)
            ),
        )
        mine = [id for id, carry in carries.items() if carry.month == month]
        found.update(connection.execute(select(id).where(id.in_(mine), ~busy)).scalars())
    return found


def _hours_are_receipts(proof: Proof, walk: Walk, horizon: datetime) -> Iterator[Finding]:
    """R10: the hourly sums of an account are those of its receipts and refunds, from its first to
    its last one; the seals of the hours cover all others.

    Hours of archived months, whose receipts are in files, have the refunds only.
    """
    if not walk.hours:
        return
    with proof.snapshots.open() as connection:
        built = select(func.min(usage_hours.c.hour), func.max(usage_hours.c.hour))
        first, last = connection.execute(built).one()
        removed = select(archives.c.month).where(archives.c.state.in_(REMOVED))
        archived = set(connection.execute(removed).scalars())
    if first is None:
        return
    start = max(first, min(walk.hours))
    end = min(last, max(walk.hours)) + timedelta(hours=1)
    if horizon < FOREVER:
        end = min(end, horizon.replace(minute=0, second=0, microsecond=0))
    stored = _stored_hours(proof, walk.account_id, start, end)
    for hour in sorted({*stored, *(hour for hour in walk.hours if start <= hour < end)}):
        due, sums = walk.hours.get(hour, [0, 0, 0]), stored.get(hour, (0, 0, 0))
        if month_of(hour) in archived:
            due = [*sums[:2], due[2]]
        if list(sums) != due:
            yield Finding(
                "R10",
                f"account {walk.account_id} hour {hour.isoformat(timespec='minutes')}",
                f"is summed up as {sums[0]} requests, {format_usd(sums[1])} charged and "
                f"{format_usd(sums[2])} refunded, but {due[0]}, {format_usd(due[1])} and "
                f"{format_usd(due[2])} were booked",
            )


def _stored_hours(
    proof: Proof, account_id: int, start: datetime, end: datetime
) -> dict[datetime, tuple[int, int, int]]:
    found: dict[datetime, tuple[int, int, int]] = {}
    table = usage_hourly.c
    sums = (exact_sum(table[name]) for name in ("requests", "charge_nanos", "refund_nanos"))
    query = select(table.hour, *sums).where(table.account_id == account_id).group_by(table.hour)
    while start < end:
        until = min(start + HOURS, end)
        with proof.snapshots.open() as connection:
            rows = connection.execute(query.where(table.hour >= start, table.hour < until))
            found.update({row[0]: (row[1], row[2], row[3]) for row in rows})
        start = until
    return found

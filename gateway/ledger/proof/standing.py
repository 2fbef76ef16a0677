"""R2, R3, R4, R8, R9: what is stored of accounts, their keys and budget windows is what their rows
add up to. All of it is read on one snapshot, with the sums of the rows after the horizon."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    String,
    cast,
    func,
    or_,
    select,
)

from gateway.checks.moments import EPOCH, MICROSECOND
from gateway.ledger.concurrency import COUNTED
from gateway.ledger.proof.carry import (
    Spending,
    WindowKey,
    read_spent_keys,
    read_spent_windows,
)
from gateway.ledger.proof.findings import Finding, differ
from gateway.ledger.proof.snapshots import FOREVER
from gateway.ledger.proof.walk import Walk
from gateway.sql.database import exact_sum
from gateway.tables.archives import archived_spending, archived_windows
from gateway.tables.core import (
    accounts,
    budget_windows,
    budgets,
    holds,
    keys,
    lots,
    receipts,
    refunds,
)
from gateway.tables.organisations import organisation_accounts
from gateway.tables.retention import retention
from gateway.tables.settlement_time import refunded_within, settled_within

RECENT: Final = timedelta(days=32)
"""Windows that began earlier than this before the end of the proven months are compared only if a
request or a refund counted in them since, because they have ended."""


class _Open:
    """The open requests of one account: what they hold, and their number."""

    def __init__(self) -> None:
        self.spending = Spending()
        self.held_nanos = 0
        self.counts: defaultdict[int, int] = defaultdict(int)


class Standing:
    """What is stored of some accounts, all of whose rows up to ``horizon`` have been walked."""

    def __init__(
        self, connection: Connection, walks: Mapping[int, Walk], horizon: datetime, page: int
    ) -> None:
        self._connection = connection
        self._walks = walks
        self._page = page
        self._ids = list(walks)
        self._later = self._read_later(horizon)
        self._open = self._read_open()

    def prove(self) -> None:
        """Compare each account, and add what differs to the findings of its walk."""
        mine = self._rows(select(accounts).where(accounts.c.id.in_(self._ids)), "id")
        own_keys = self._rows(
            select(keys).where(keys.c.account_id.in_(self._ids)).order_by(keys.c.id), "account_id"
        )
        remaining = (
            select(lots.c.account_id, exact_sum(lots.c.remaining_nanos))
            .where(lots.c.account_id.in_(self._ids), lots.c.remaining_nanos > 0)
            .group_by(lots.c.account_id)
        )
        left = {row[0]: row[1] for row in self._connection.execute(remaining)}
        carried = read_spent_keys(self._connection, [
            id for id, walk in self._walks.items() if walk.carry.month
        ])  # fmt: skip
        archived = self._archived_keys([row["id"] for each in own_keys.values() for row in each])
        for id, walk in self._walks.items():
            (account,) = mine[id]
            walk.add(self._prove_account(account, walk, left.get(id, 0)))
            walk.add(self._prove_keys(own_keys.get(id, []), walk, carried, archived))
        self._prove_windows()

    def _prove_account(self, account: RowMapping, walk: Walk, left: int) -> Iterator[Finding]:
        subject, posted = f"account {walk.account_id}", account["posted_nanos"]
        while posted != walk.chain.total_nanos:
            # Booked since the last page.
            yield from walk.chain.read_page(self._connection, self._page)
            if walk.chain.is_complete:
                break
        if posted != walk.chain.total_nanos:
            yield differ("R2", subject, "posted", posted, walk.chain.total_nanos)
        if left != max(posted, 0):
            yield differ("R8", subject, "lots hold", left, max(posted, 0))
        mine = self._open[walk.account_id]
        yield from _prove_held(subject, account, mine.held_nanos, sum(mine.counts.values()))

    def _prove_keys(
        self,
        rows: Sequence[RowMapping],
        walk: Walk,
        carried: Mapping[int, int],
        archived: Mapping[int, Mapping[str, int]],
    ) -> Iterator[Finding]:
        mine, later = self._open[walk.account_id], self._later[walk.account_id]
        for row in rows:
            id, subject = row["id"], f"key {row['id']}"
            yield from _prove_held(subject, row, mine.spending.keys.get(id, 0), mine.counts[id])
            walk.closed.keys[id] += carried.get(id, 0) if walk.carry.month else 0
            walk.closed.keys[id] += sum(
                nanos for month, nanos in archived.get(id, {}).items() if month > walk.carry.month
            )
            due = walk.closed.keys[id] + walk.later.keys[id] + later.keys[id]
            if row["spent_nanos"] != due:
                yield differ("R4", subject, "spent", row["spent_nanos"], due)
        known = {row["id"] for row in rows}
        for spending in (walk.closed, walk.later, later, mine.spending):
            for id in sorted(spending.keys.keys() - known):
                message = f"has requests of account {walk.account_id}, whose key it is not"
                yield Finding("R4", f"key {id}", message)
                known.add(id)

    def _prove_windows(self) -> None:
        """R9: a budget window's held and spent amounts are those of its requests. Those of an
        organisation's budget are of all of its accounts, which are in one group."""
        held: defaultdict[WindowKey, int] = defaultdict(int)
        spent: defaultdict[WindowKey, int] = defaultdict(int)
        archived = self._archived_windows()
        moved = {id: self._moved(walk) for id, walk in self._walks.items()}
        movers = {place: self._walks[id] for id, places in moved.items() for place in places}
        shared = self._shared_budgets()
        of_all = {place for place in {*movers, *archived} if place[0] in shared}
        since_us = self._since_us()
        for id, walk in self._walks.items():
            if walk.carry.month:
                carried = read_spent_windows(
                    self._connection, id, since_us=since_us, others=moved[id] | of_all
                )
                for place, nanos in carried.items():
                    walk.closed.windows[place] += nanos
            for place, nanos in self._open[id].spending.windows.items():
                held[place] += nanos
            for each in (walk.closed, walk.later, self._later[id]):
                for place, nanos in each.windows.items():
                    spent[place] += nanos
        rows = self._windows_of({*movers, *archived}, since_us)
        first = next(iter(self._walks.values()))
        deleted = self._windows_deleted_to()
        for place in sorted({*rows, *held, *spent}):
            if place not in rows and 0 < place[1] <= deleted and not held[place]:
                continue
            walk = movers.get(place, first)
            walk.add(_prove_window(place, rows.get(place), held[place], spent[place]))

    def _moved(self, walk: Walk) -> set[WindowKey]:
        """Return the windows in which requests or refunds of an account counted."""
        id = walk.account_id
        counted = (self._open[id].spending, self._later[id], walk.closed, walk.later)
        return {place for each in counted for place in each.windows}

    def _shared_budgets(self) -> set[int]:
        query = select(budgets.c.id).where(self._is_ours(), budgets.c.account_id.is_(None))
        return set(self._connection.execute(query).scalars())

    def _since_us(self) -> int:
        """Return the start of the earliest window that is compared although nothing moved in it."""
        since = [walk.carry.since for walk in self._walks.values()]
        known = [moment for moment in since if moment is not None]
        if len(known) < len(since):
            return 0
        return (min(known) - RECENT - EPOCH) // MICROSECOND

    def _windows_deleted_to(self) -> int:
        """Return the start of the last window that its retention has deleted; 0 without any."""
        query = select(retention.c.position).where(retention.c.kind == "budget_windows")
        return int(self._connection.execute(query).scalar() or 0)

    def _windows_of(self, others: set[WindowKey], since_us: int) -> dict[WindowKey, RowMapping]:
        starts = budget_windows.c.starts_us
        recent = or_(starts >= since_us, starts == 0)
        query = select(budget_windows).join(budgets, budgets.c.id == budget_windows.c.budget_id)
        query = query.where(self._is_ours())
        found = self._connection.execute(query.where(recent)).mappings()
        rows = {(row["budget_id"], row["starts_us"]): row for row in found}
        for budget_id, start in others - rows.keys():
            one = query.where(budget_windows.c.budget_id == budget_id, starts == start)
            for row in self._connection.execute(one).mappings():
                rows[budget_id, start] = row
        return rows

    def _is_ours(self) -> ColumnElement[bool]:
        """SQL condition: the ``budgets`` row is of an account of the group or its organisation."""
        members = select(organisation_accounts.c.organisation_id).where(
            organisation_accounts.c.account_id.in_(self._ids)
        )
        return or_(budgets.c.account_id.in_(self._ids), budgets.c.organisation_id.in_(members))

    def _archived_keys(self, ids: Sequence[int]) -> dict[int, dict[str, int]]:
        table = archived_spending.c
        found: defaultdict[int, dict[str, int]] = defaultdict(dict)
        for first in range(0, len(ids), self._page):
            some = ids[first : first + self._page]
            query = select(archived_spending).where(table.key_id.in_(some))
            for row in self._connection.execute(query):
                found[row.key_id][row.month] = row.charge_nanos
        return found

    def _archived_windows(self) -> dict[WindowKey, int]:
        """Add the archived charges that no account of the group has carried, and return them.

        All accounts of an organisation have carried the same archived months.
        """
        table = archived_windows.c
        query = (
            select(table.month, table.budget_id, table.starts_us, table.charge_nanos)
            .add_columns(budgets.c.account_id)
            .join(budgets, budgets.c.id == table.budget_id)
            .where(self._is_ours())
        )
        latest = max(walk.carry.month for walk in self._walks.values())
        first = next(iter(self._walks))
        found: defaultdict[WindowKey, int] = defaultdict(int)
        for month, budget_id, starts_us, nanos, owner in self._connection.execute(query):
            carried = latest if owner is None else self._walks[owner].carry.month
            if month > carried:
                found[budget_id, starts_us] += nanos
                # The first account carries what is archived of an organisation.
                closed = self._walks[first if owner is None else owner].closed
                closed.windows[budget_id, starts_us] += nanos
        return found

    def _read_open(self) -> defaultdict[int, _Open]:
        """Sum the open holds, which cannot be read in pages: each can end at any time."""
        windows = cast(holds.c.windows, String)
        query = (
            select(
                holds.c.account_id, holds.c.key_id, holds.c.service_class, windows.label("windows"),
                func.count().label("requests"), exact_sum(holds.c.hold_nanos).label("nanos"),
            )
            .where(holds.c.account_id.in_(self._ids))
            .group_by(holds.c.account_id, holds.c.key_id, holds.c.service_class, windows)
        )  # fmt: skip
        found: defaultdict[int, _Open] = defaultdict(_Open)
        for row in self._connection.execute(query):
            mine = found[row.account_id]
            mine.spending.add(row.key_id, _decoded(row.windows), row.nanos)
            mine.held_nanos += row.nanos
            if row.service_class == COUNTED:
                mine.counts[row.key_id] += row.requests
        return found

    def _read_later(self, horizon: datetime) -> defaultdict[int, Spending]:
        """Sum what was booked after the horizon."""
        found: defaultdict[int, Spending] = defaultdict(Spending)
        if horizon == FOREVER:
            return found
        settled = settled_within(self._connection, horizon + MICROSECOND)
        windows = cast(receipts.c.windows, String)
        places = (receipts.c.account_id, receipts.c.key_id, windows)
        charged = (
            select(*places, exact_sum(receipts.c.charge_nanos))
            .where(receipts.c.account_id.in_(self._ids), *settled)
            .group_by(*places)
        )
        booked = (refunds.c.account_id.in_(self._ids), refunds.c.booked_at > horizon)
        returned = (
            select(*places, -exact_sum(refunds.c.amount_nanos))
            .join(refunds, refunds.c.request_id == receipts.c.request_id)
            .where(*booked, *refunded_within(self._connection, *booked))
            .group_by(*places)
        )
        for query in (charged, returned):
            for account_id, key_id, stored, nanos in self._connection.execute(query):
                found[account_id].add(key_id, _decoded(stored), nanos)
        return found

    def _rows(self, query: Select[Any], owner: str) -> dict[int, list[RowMapping]]:
        found: defaultdict[int, list[RowMapping]] = defaultdict(list)
        for row in self._connection.execute(query).mappings():
            found[row[owner]].append(row)
        return found


def _prove_held(subject: str, row: RowMapping, held: int, count: int) -> Iterator[Finding]:
    """R3: the held amount is the sum of the open holds, and the count is their number."""
    if row["held_nanos"] != held:
        yield differ("R3", subject, "held", row["held_nanos"], held)
    if row["open_requests"] != count:
        yield Finding(
            "R3", subject, f"counts {row['open_requests']} open requests, but it should be {count}"
        )


def _prove_window(
    place: WindowKey, row: RowMapping | None, held: int, spent: int
) -> Iterator[Finding]:
    subject = f"budget {place[0]} window {place[1]}"
    if row is None:
        yield Finding("R9", subject, "is missing but has requests")
        return
    for what, stored, due in (
        ("held", row["held_nanos"], held),
        ("spent", row["spent_nanos"], spent),
    ):
        if stored != due:
            yield differ("R9", subject, what, stored, due)


def _decoded(text: str | None) -> list[list[int]] | None:
    return None if text is None else msgspec.json.decode(text, type=list[list[int]] | None)

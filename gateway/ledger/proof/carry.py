"""The sums with which an account's closed months were proven, and from which a proof starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Table, or_, select

from gateway.ledger.periods import span_of
from gateway.sql.database import upsert
from gateway.tables.proofs import proven_accounts, proven_keys, proven_windows

WindowKey = tuple[int, int]
"""A window of a budget: (budget id, start in µs since 1970)."""


class LedgerPosition(NamedTuple):
    """A place in an account's ledger: its last transfer, and the balance after it."""

    transfer_id: int = 0
    version: int = 0
    posted_nanos: int = 0


START: Final = LedgerPosition()


@dataclass
class Spending:
    """Charges less refunds, by key and by budget window."""

    keys: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    windows: defaultdict[WindowKey, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, key_id: int, windows: Iterable[Sequence[int]] | None, nanos: int) -> None:
        self.keys[key_id] += nanos
        for budget_id, starts_us in windows or ():
            self.windows[budget_id, starts_us] += nanos


@dataclass(frozen=True, slots=True)
class Carry:
    """What was proven of an account up to the end of ``month``; without one, nothing."""

    month: str = ""
    position: LedgerPosition = START
    booked_since: datetime | None = None

    @property
    def since(self) -> datetime | None:
        """The end of the month: rows that were booked later are to be proven."""
        return span_of(self.month).ends_at if self.month else None


def read_carries(connection: Connection, ids: Sequence[int]) -> dict[int, Carry]:
    rows = connection.execute(
        select(proven_accounts).where(proven_accounts.c.account_id.in_(ids))
    ).mappings()
    return {
        row["account_id"]: Carry(
            row["month"],
            LedgerPosition(row["transfer_id"], row["version"], row["posted_nanos"]),
            row["booked_since"],
        )
        for row in rows
    }


def read_spent_keys(connection: Connection, ids: Sequence[int]) -> dict[int, int]:
    """Return the carried spending of all keys of accounts."""
    table = proven_keys.c
    query = select(table.key_id, table.spent_nanos).where(table.account_id.in_(ids))
    return {row.key_id: row.spent_nanos for row in connection.execute(query)}


def read_spent_windows(
    connection: Connection, account_id: int, *, since_us: int, others: Iterable[WindowKey]
) -> dict[WindowKey, int]:
    """Return the carried spending of windows: those without an end, those that began since a
    moment, and some others."""
    table = proven_windows.c
    mine = select(table.budget_id, table.starts_us, table.spent_nanos)
    recent = mine.where(
        table.account_id == account_id, or_(table.starts_us >= since_us, table.starts_us == 0)
    )
    found = {(row[0], row[1]): row[2] for row in connection.execute(recent)}
    for place in others:
        if 0 < place[1] < since_us:
            one = mine.where(
                table.account_id == account_id,
                table.budget_id == place[0],
                table.starts_us == place[1],
            )
            found.update({(row[0], row[1]): row[2] for row in connection.execute(one)})
    return found


def write_carry(
    connection: Connection,
    account_id: int,
    carry: Carry,
    *,
    keys: Mapping[int, int],
    windows: Mapping[WindowKey, int],
    anew: bool,
) -> None:
    """Replace the carried sums of an account. Other keys and windows keep theirs, unless the
    account was proven ``anew``, from its beginning."""
    if anew:
        forget_carry(connection, account_id)
    position = carry.position._asdict()
    values = {"month": carry.month, "booked_since": carry.booked_since, **position}
    _put(connection, proven_accounts, [{"account_id": account_id, **values}])
    _put(
        connection,
        proven_keys,
        [
            {"key_id": id, "account_id": account_id, "spent_nanos": nanos}
            for id, nanos in sorted(keys.items())
        ],
    )
    _put(
        connection,
        proven_windows,
        [
            {"budget_id": id, "starts_us": start, "account_id": account_id, "spent_nanos": nanos}
            for (id, start), nanos in sorted(windows.items())
        ],
    )


def forget_carry(connection: Connection, account_id: int) -> None:
    """Let the next proof of an account start from its beginning."""
    for table in (proven_windows, proven_keys, proven_accounts):
        connection.execute(table.delete().where(table.c.account_id == account_id))


def _put(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    keys = [column.name for column in table.primary_key]
    statement = upsert(connection, table)
    changed = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    connection.execute(
        statement.on_conflict_do_update(index_elements=keys, set_=changed), list(rows)
    )

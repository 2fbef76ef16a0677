"""The writer of the ledger: the holds, extensions and settlements of one instant, written together.

Entries that arrive while a transaction is committed form the next one. A transaction is durable
before its answers are returned, unless it consists of holds that need not be: a client that waits
for a whole answer is told nothing before its settlement, which is committed after the hold in the
same log and makes both durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection

from gateway.group_commit import GroupCommit
from gateway.ledger.balances import lock_balances
from gateway.ledger.concurrency import Defaults
from gateway.ledger.expenses import NO_RATES, ExpenseRates
from gateway.ledger.extend import ExtendAnswer, Extension, grow
from gateway.ledger.holds import HoldAnswer, HoldRequest, accept
from gateway.ledger.periods import booking_time
from gateway.ledger.prices import PriceCache
from gateway.ledger.settle import Closing, Settlement, close
from gateway.sql.database import Database

Entry: TypeAlias = HoldRequest | Extension | Settlement
Answer: TypeAlias = HoldAnswer | ExtendAnswer | Closing | None

GATHER_S: Final = 0.001
"""A transaction costs as much as twenty entries, so a batch waits this long for company."""


class LedgerWriter:
    """Writes entries in batches, one batch at a time. Methods raise the error of an entry's write,
    or ``Unavailable`` if too many entries wait."""

    def __init__(
        self,
        database: Database,
        *,
        prices: PriceCache,
        retention: timedelta,
        concurrent: Defaults,
        rates: Callable[[], ExpenseRates] = lambda: NO_RATES,
    ) -> None:
        async def write(batch: Sequence[Entry]) -> list[Answer]:
            return await database.write(
                lambda connection: book(
                    connection,
                    batch,
                    prices=prices,
                    retention=retention,
                    concurrent=concurrent,
                    rates=rates(),
                ),
                durable=must_be_durable(batch),
            )

        self._begins: GroupCommit[Entry, Any] = GroupCommit(write, gather_s=GATHER_S)
        # Settlements wait for the row of their month, which PostgreSQL locks while hours are summed
        # up or a month is closed. Holds must not wait behind them. SQLite has one writer anyway.
        one = database.engine.dialect.name == "sqlite"
        self._ends: GroupCommit[Entry, Any] = (
            self._begins if one else GroupCommit(write, gather_s=GATHER_S)
        )

    @property
    def committed(self) -> tuple[int, int]:
        """Number of batches that were written so far, and of the entries in them."""
        groups = {self._begins, self._ends}
        return sum(each.batches for each in groups), sum(each.items for each in groups)

    def hold(self, request: HoldRequest) -> asyncio.Future[HoldAnswer]:
        """Decide a request, and hold for it if it is accepted."""
        return self._begins.submit(request)

    def extend(self, extension: Extension) -> asyncio.Future[ExtendAnswer]:
        """Extend the hold of a request that runs."""
        return self._begins.submit(extension)

    def settle(self, settlement: Settlement) -> asyncio.Future[Closing | None]:
        """Close a request; None if it was closed before."""
        return self._ends.submit(settlement)


def must_be_durable(batch: Sequence[Entry]) -> bool:
    """Whether a batch has an entry whose answer must survive a power failure."""
    return not all(isinstance(entry, HoldRequest) and not entry.durable for entry in batch)


def book(
    connection: Connection,
    batch: Sequence[Entry],
    *,
    prices: PriceCache,
    retention: timedelta,
    concurrent: Defaults,
    rates: ExpenseRates = NO_RATES,
) -> list[Answer]:
    """Book entries of all kinds; return their answers in order.

    Settlements come first, so that what they release can be held again. All accounts are locked
    together, and written once.
    """
    ends = [entry for entry in batch if isinstance(entry, Settlement)]
    extensions = [entry for entry in batch if isinstance(entry, Extension)]
    begins = [entry for entry in batch if isinstance(entry, HoldRequest)]
    now = booking_time(connection) if ends else None
    balances = lock_balances(
        connection,
        new=[request.request_id for request in begins],
        keys={request.key_id for request in begins},
        open=[entry.request_id for entry in batch if not isinstance(entry, HoldRequest)],
    )
    answers: dict[type[Entry], Any] = {}
    if now is not None:
        answers[Settlement] = close(
            connection,
            balances,
            ends,
            now=now,
            prices=prices,
            retention=retention,
            rates=rates,
        )
    if extensions:
        answers[Extension] = grow(connection, balances, extensions)
    if begins:
        answers[HoldRequest] = accept(connection, balances, begins, concurrent=concurrent)
    balances.write(connection)
    found = {kind: iter(each) for kind, each in answers.items()}
    return [next(found[type(entry)]) for entry in batch]

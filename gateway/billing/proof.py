"""The proof of the books: the ledger's rules, and those for hours and closed months."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Final

from sqlalchemy import Connection

from gateway.billing.sealed_months import prove_months
from gateway.ledger.proof.accounts import Proof
from gateway.ledger.proof.findings import Finding
from gateway.ledger.proof.snapshots import PAGE, of_database, on_one
from gateway.ledger.reconcile import prove_ledger
from gateway.sql.database import Database

FINDINGS_MAX: Final = 1000
"""A proof that has found so many ends there."""


def check_books(connection: Connection, *, now: datetime) -> list[Finding]:
    """Check all rules on one snapshot, from the beginning; an empty list proves that the books
    agree."""
    return list(_prove(Proof(on_one(connection)), now))


def prove_books(database: Database, *, whole: bool = False, page: int = PAGE) -> list[Finding]:
    """Check all rules in pages, each on a separate snapshot, and store what the next proof starts
    from. Blocks for minutes.

    Read what was booked since the closed months that are proven, and the seals of those; if
    ``whole``, read everything from the beginning.
    """

    def keep(function: Callable[[Connection], None]) -> None:
        with database.transaction() as connection:
            function(connection)

    proof = Proof(of_database(database, page=page), whole=whole, keep=keep)
    return list(islice(_prove(proof, datetime.now(UTC)), FINDINGS_MAX))


def _prove(proof: Proof, now: datetime) -> Iterator[Finding]:
    yield from prove_ledger(proof, now=now)
    yield from prove_months(proof)

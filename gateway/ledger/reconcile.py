"""Reconciliation of the ledger: proves that the books agree, or lists what differs.

Rules R1 to R9, R11 and R14, and R10 for each account. The proof reads in pages, on short snapshots.
It runs nightly; run it after any incident as well. The tests run it after every crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from sqlalchemy import Connection, func, select

from gateway.ledger.periods import span_of
from gateway.ledger.proof.accounts import Proof, prove_accounts
from gateway.ledger.proof.findings import Finding as Finding
from gateway.ledger.proof.references import open_or_closed, references_exist, sums_to_zero
from gateway.ledger.proof.snapshots import on_one
from gateway.tables.proofs import proven_accounts


def reconcile(connection: Connection, *, now: datetime) -> list[Finding]:
    """Check all rules from the beginning, on one snapshot; an empty list proves that the books
    agree."""
    return list(prove_ledger(Proof(on_one(connection)), now=now))


def prove_ledger(proof: Proof, *, now: datetime) -> Iterator[Finding]:
    """Check all rules: everything, or what was booked since the months that are proven."""
    since = None if proof.whole else _proven_until(proof)
    yield from open_or_closed(proof.snapshots, now=now)
    yield from sums_to_zero(proof.snapshots, since=since)
    yield from references_exist(proof.snapshots, since=since)
    yield from prove_accounts(proof)


def _proven_until(proof: Proof) -> datetime | None:
    """Return the end of the months that are proven for all accounts; None without any."""
    with proof.snapshots.open() as connection:
        month = connection.execute(select(func.min(proven_accounts.c.month))).scalar()
    return None if month is None else span_of(month).ends_at

"""Runs of the proof of the books, and their stored results.

It runs nightly on one gateway, by ``tollgate reconcile``, and when an administrator calls the API:
one run at a time, under a lease. Findings are stored, counted and displayed; nothing is corrected
automatically.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from sqlalchemy import Connection, func, insert, select

from gateway.audit_log import Author, record
from gateway.billing.proof import check_books as check_books
from gateway.billing.proof import prove_books
from gateway.billing.proof_process import prove_in_child
from gateway.errors import Conflict
from gateway.leases import Lease
from gateway.ledger.proof.findings import Finding
from gateway.notices.books import problems_found
from gateway.notices.store import publish
from gateway.payments.payments import compare_payments
from gateway.payments.provider import PaymentProvider, ProviderFailed
from gateway.sql.database import Database
from gateway.sql.outages import OUTAGE
from gateway.tables.core import receipts
from gateway.tables.proofs import reconciliations

PAYMENTS_WITHIN: Final = timedelta(days=35)
KEPT: Final = 400
"""Number of stored results: more than a year of nightly runs."""
LEASE_S: Final = 60.0
"""How long another run is refused after one was killed."""
WAIT_S: Final = 3.0
"""How long a run waits for one that is about to end."""
SMALL: Final = 10_000
"""Receipts whose proof takes less processor time than the start of a process."""

Prove: TypeAlias = Callable[[Database, bool], Awaitable[list[Finding]]]
"""Proves the books of a database; the second argument tells whether from the beginning."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """One run of all rules; without findings, the books agree."""

    started_at: datetime
    finished_at: datetime
    findings: tuple[Finding, ...]


async def prove_here(database: Database, whole: bool) -> list[Finding]:
    """Prove the books in a thread of this process."""
    return await asyncio.to_thread(prove_books, database, whole=whole)


async def prove_apart(database: Database, whole: bool) -> list[Finding]:
    """Prove the books in a child process, unless there is little to prove."""
    some = select(receipts.c.request_id).limit(SMALL + 1).subquery()
    count = await database.slow(
        lambda connection: connection.execute(select(func.count()).select_from(some)).scalar_one()
    )
    if count <= SMALL:
        return await prove_here(database, whole)
    return await prove_in_child(database, whole=whole)


async def run_reconciliation(
    database: Database,
    provider: PaymentProvider | None = None,
    *,
    author: Author | None = None,
    whole: bool = False,
    prove: Prove = prove_apart,
) -> Reconciliation:
    """Check all rules, including R12 if there is a payment provider, and store the result.

    With an author, it is recorded as an act. Raise ``Conflict`` if another run has not ended.
    """
    async with _alone(database):
        started_at = datetime.now(UTC)
        findings = await prove(database, whole)
        if provider is not None:
            findings += await payments_agree(database, provider, now=started_at)
        found = Reconciliation(started_at, datetime.now(UTC), tuple(findings))
        await database.write(lambda connection: _keep(connection, found, author, whole))
        return found


@contextlib.asynccontextmanager
async def _alone(database: Database) -> AsyncIterator[None]:
    lease = Lease(database, "reconciliation", held_s=LEASE_S)
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + WAIT_S
    while not await lease.acquire():
        if loop.time() > give_up_at:
            raise Conflict(
                "reconciliation_running",
                "Another reconciliation is running, or one was killed less than "
                f"{LEASE_S:.0f} s ago. Its result will be that of the last reconciliation.",
            )
        await asyncio.sleep(0.1)
    renewing = asyncio.create_task(_renew(lease), name="reconciliation lease")
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        await lease.release()


async def _renew(lease: Lease) -> None:
    while True:
        await asyncio.sleep(LEASE_S / 6)
        try:
            await lease.renew_if_needed()
        except OUTAGE as error:
            # Two runs at the same time do no harm.
            log.warning("the lease of the reconciliation is not renewed: %s", type(error).__name__)


def _keep(
    connection: Connection, found: Reconciliation, author: Author | None, whole: bool
) -> None:
    connection.execute(
        insert(reconciliations).values(
            started_at=found.started_at,
            finished_at=found.finished_at,
            findings=[asdict(finding) for finding in found.findings],
        )
    )
    last = connection.execute(select(func.max(reconciliations.c.id))).scalar_one()
    connection.execute(reconciliations.delete().where(reconciliations.c.id <= last - KEPT))
    if found.findings:
        publish(connection, [problems_found(found.findings, found.finished_at)])
    if author is not None:
        after = {"findings": len(found.findings), "all": whole}
        record(connection, author, "ledger.reconcile", "ledger", after=after)


async def payments_agree(
    database: Database, provider: PaymentProvider, *, now: datetime
) -> list[Finding]:
    """R12: compare the provider's payments of the last weeks with what was booked."""
    try:
        paid = await provider.paid_since(now - PAYMENTS_WITHIN)
    except ProviderFailed as error:
        return [Finding("R12", provider.name, f"payments could not be listed: {error}")]
    return await database.slow(
        lambda connection: compare_payments(connection, paid, provider=provider.name)
    )


def last_reconciliation(connection: Connection) -> Reconciliation | None:
    """Read the latest stored result, of any gateway."""
    row = connection.execute(
        select(reconciliations).order_by(reconciliations.c.id.desc()).limit(1)
    ).first()
    if row is None:
        return None
    findings = tuple(Finding(**finding) for finding in row.findings)
    return Reconciliation(row.started_at, row.finished_at, findings)

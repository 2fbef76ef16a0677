"""Finds single receipts in archives: to display one, and to bring one back for its refund."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select

from gateway.archive.bring_back import Rows, as_read
from gateway.archive.files import (
    ArchiveDamaged,
    matching,
    read_file,
    rows_with,
)
from gateway.archive.manifest import Manifest, Name
from gateway.archive.marks import Archive, archives_with
from gateway.ledger.closed import ClosedRequest, read_closed
from gateway.ledger.steps import StepLine, read_step
from gateway.sql.database import Database
from gateway.tables.core import receipts
from gateway.tables.workflows import receipt_steps
from workers.contract.blobs import Blobs


async def find_archived(
    blobs: Blobs, archives: Sequence[Archive], request_id: str
) -> tuple[ClosedRequest, Sequence[StepLine]] | None:
    """Read a closed request and its steps, by the row groups that can have them."""
    for archive in archives:
        manifest = archive.manifest
        assert manifest is not None
        found = await asyncio.to_thread(rows_with, blobs, manifest, "receipts", request_id)
        for row in found:
            # A workflow without a price is charged for its steps; other requests have none.
            steps = await asyncio.to_thread(rows_with, blobs, manifest, "receipt_steps", request_id)
            read: Any = {**as_read(row, receipts), "body": None}
            return read_closed(read), tuple(
                read_step(as_read(step, receipt_steps)) for step in steps
            )
    return None


async def find_removed(database: Database, blobs: Blobs, request_id: str) -> Rows | None:
    """Return the rows to bring back before a charge can be refunded: the receipt, its transfer, and
    what belongs to the same transfer. None if the receipt is not archived.

    The files are read whole and compared with their digests, because money depends on them.
    """

    def look(connection: Any) -> list[Archive]:
        known = select(receipts.c.request_id).where(receipts.c.request_id == request_id)
        if connection.execute(known).first() is not None:
            return []
        return archives_with(connection, request_id)

    for archive in await database.read(look):
        found = await rows_of(blobs, archive, [request_id])
        if found.receipts:
            return found
    return None


async def rows_of(blobs: Blobs, archive: Archive, request_ids: Sequence[str]) -> Rows:
    """Return the receipts of requests and what belongs to their charges; empty if it has none.

    The files are read whole and compared with their digests.
    """
    manifest = archive.manifest
    assert manifest is not None
    own = await _matching(blobs, manifest, "receipts", "request_id", request_ids)
    ids = sorted({row["transfer_id"] for row in own if row["transfer_id"] is not None})
    if not ids:
        return Rows(archive.month, receipts=own)
    charged = await _matching(blobs, manifest, "receipts", "transfer_id", ids)
    charges = await _matching(blobs, manifest, "transfers", "id", ids)
    sums: Counter[int] = Counter()
    for row in charged:
        sums[row["transfer_id"]] += row["charge_nanos"]
    if sums != {row["id"]: row["amount_nanos"] for row in charges}:
        raise ArchiveDamaged(f"the charges {ids} are not the sums of their archived receipts")
    closed = [*charged, *(row for row in own if row["transfer_id"] is None)]
    steps = await _matching(
        blobs, manifest, "receipt_steps", "request_id", [row["request_id"] for row in closed]
    )
    return Rows(archive.month, charges, closed, steps)


async def _matching(
    blobs: Blobs, manifest: Manifest, name: Name, column: str, values: Sequence[Any]
) -> list[dict[str, Any]]:
    """Read the rows whose column has one of the values, from the files that can have them."""
    rows: list[dict[str, Any]] = []
    for file in manifest.of(name):
        first, last = file.first, file.last
        if column == "transfer_id":
            first, last = file.first_charge or 0, file.last_charge or 0
        if not any(first <= value <= last for value in values):
            continue
        for group in await read_file(blobs, file):
            rows += await asyncio.to_thread(matching, group, column, values)
    return rows

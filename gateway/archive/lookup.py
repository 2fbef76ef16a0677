"""Finds single receipts in archives: to display one, and to bring one back for its refund."""

from __future__ import annotations

import asyncio
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
        manifest = archive.manifest
        assert manifest is not None
        own = await _matching(blobs, manifest, "receipts", "request_id", [request_id])
        if not own:
            continue
        charge = own[0]["transfer_id"]
        if charge is None:
            return Rows(archive.month, receipts=own)
        of_charge = await _matching(blobs, manifest, "receipts", "transfer_id", [charge])
        ids = [row["request_id"] for row in of_charge]
        charges = await _matching(blobs, manifest, "transfers", "id", [charge])
        if not charges or charges[0]["amount_nanos"] != sum(
            row["charge_nanos"] for row in of_charge
        ):
            raise ArchiveDamaged(f"the charge {charge} is not the sum of its archived receipts")
        return Rows(
            archive.month,
            charges,
            of_charge,
            await _matching(blobs, manifest, "receipt_steps", "request_id", ids),
        )
    return None


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

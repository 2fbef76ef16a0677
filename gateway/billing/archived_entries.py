"""Reads the requests of archived ledger entries, by the row groups that can have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gateway.archive.bring_back import as_read
from gateway.archive.files import matching, read_groups
from gateway.archive.manifest import Manifest
from gateway.billing.entries import REQUESTS_MAX, ArchivedEntry, ChargedEntry, LedgerEntry
from gateway.tables.core import transfers
from workers.contract.blobs import Blobs


def read_archived_entry(
    blobs: Blobs, found: ArchivedEntry
) -> tuple[LedgerEntry, list[ChargedEntry]]:
    """Return an archived entry and its requests, of a run of charges those of the first ones.

    Blocks; raise ``LookupError`` if no archive has it, ``Unavailable`` if a file cannot be read.
    """
    for archive in found.archives:
        assert archive.manifest is not None
        charges = _charges(blobs, archive.manifest, found)
        if charges:
            requests = _requests(blobs, archive.manifest, [row["id"] for row in charges])
            return found.entry or _entry(charges[0], len(requests)), requests[:REQUESTS_MAX]
    raise LookupError(f"unknown entry {found.id}")


def _charges(blobs: Blobs, manifest: Manifest, found: ArchivedEntry) -> list[dict[str, Any]]:
    """Return the charge, or the first charges of a run."""
    single = found.entry is None
    ids = (found.id, found.id) if single else (0, found.id)
    rows: list[dict[str, Any]] = []
    for file in manifest.of("transfers"):
        if int(file.last) < ids[0] or ids[1] < int(file.first):
            continue
        for page in read_groups(blobs, file, "id", [ids]):
            wanted = pc.and_(
                pc.equal(page["kind"], "charge"), pc.equal(page["from_account"], found.account_id)
            )
            if single:
                wanted = pc.and_(wanted, pc.equal(page["id"], found.id))
            else:
                version = page["account_version"]
                wanted = pc.and_(wanted, pc.greater_equal(version, found.first_version))
                wanted = pc.and_(wanted, pc.less_equal(version, found.last_version))
            own = page.filter(wanted).to_pylist()
            rows += [row for row in own if row["id"] not in found.returned]
            if len(rows) >= REQUESTS_MAX:
                return rows[:REQUESTS_MAX]
    return rows


def _requests(blobs: Blobs, manifest: Manifest, ids: Sequence[int]) -> list[ChargedEntry]:
    columns = ("request_id", "model", "charge_nanos", "transfer_id")
    ranges = [(id, id) for id in ids]
    pages: Iterable[pa.Table] = (
        page
        for file in manifest.of("receipts")
        if any((file.first_charge or 0) <= id <= (file.last_charge or 0) for id in ids)
        for page in read_groups(blobs, file, "transfer_id", ranges, columns)
    )
    rows = [row for page in pages for row in matching(page, "transfer_id", ids)]
    return [ChargedEntry(row["request_id"], row["model"], row["charge_nanos"]) for row in rows]


def _entry(row: dict[str, Any], requests: int) -> LedgerEntry:
    read = as_read(row, transfers)
    return LedgerEntry(
        id=read["id"],
        kind=read["kind"],
        amount_nanos=-read["amount_nanos"],
        balance_nanos=read["posted_after"],
        actor=read["actor"],
        reason=read["reason"],
        booked_at=read["booked_at"],
        requests=requests,
        request_id=None,
        key=read["key"],
    )

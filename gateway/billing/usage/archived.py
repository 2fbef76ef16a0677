"""Adds the receipts of archived months to a usage report, file by file."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import Final

from sqlalchemy import Column, Connection, select

from gateway.billing.usage.report import UsageSums, group_of
from gateway.checks.moments import EPOCH
from gateway.sql.database import Database
from gateway.tables.core import accounts, keys
from workers.contract.blobs import Blobs

_NAMED: Final[dict[str, tuple[Column[int], Column[str]]]] = {
    "account": (accounts.c.id, accounts.c.name),
    "key": (keys.c.id, keys.c.prefix),
}
"""Labels that are looked up by an id."""


async def add_archived(
    report: UsageSums, database: Database, blobs: Blobs, *, account_id: int | None = None
) -> None:
    """Add the archived parts of a report; no connection is held while files are read.

    Raise ``Unavailable`` if a file cannot be read, ``TooManyRequests`` if too many long reports of
    the account wait.
    """
    if not report.archived:
        return
    # Imported late: it takes a while, and a gateway should start quickly.
    from gateway.billing.usage.file_sums import file_sums

    width = timedelta(seconds=report.bucket_s)
    names: dict[str, dict[int, str]] = {name: {} for name in report.by if name in _NAMED}
    async with database.long_reports(account_id):
        for part in report.archived:
            assert part.archive.manifest is not None
            for file in part.archive.manifest.of("receipts"):
                rows = await asyncio.to_thread(file_sums, blobs, file, part, report)
                for name, known in names.items():
                    new = {row[name] for row in rows} - known.keys()
                    known.update(await database.read(partial(_look_up, name=name, ids=new)))
                    for row in rows:
                        row[name] = known[row[name]]
                report.add((EPOCH + row["at"] * width, group_of(row, report.by)) for row in rows)


def _look_up(connection: Connection, *, name: str, ids: set[int]) -> dict[int, str]:
    id, text = _NAMED[name]
    return dict(connection.execute(select(id, text).where(id.in_(ids))).all())

"""Which batches read and wrote a file, in SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, or_, select

from gateway.tables.batches import batches

USERS_MAX: Final = 500
"""Batches that are named for one page of files."""


def batches_of_files(
    connection: Connection, account_id: int, file_ids: Sequence[str]
) -> dict[str, list[tuple[str, bool]]]:
    """Return the batches that read or wrote some files, and whether they have ended, by file."""
    table = batches.c
    parts = (table.input_file_id, table.output_file_id, table.error_file_id)
    found: dict[str, list[tuple[str, bool]]] = {id: [] for id in file_ids}
    query = (
        select(table.id, table.ended_at, *parts)
        .where(table.account_id == account_id, or_(*(part.in_(file_ids) for part in parts)))
        .order_by(table.id.desc())
        .limit(USERS_MAX)
    )
    for row in connection.execute(query) if file_ids else ():
        for id in {row.input_file_id, row.output_file_id, row.error_file_id} & found.keys():
            found[id].append((row.id, row.ended_at is not None))
    return found

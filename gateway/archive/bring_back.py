"""Puts rows of an archive back into the database, exactly as they were.

What carried a row in the sums is reduced in the transaction that inserts the row. Rows that are
already there are left alone, so each step can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import JSON, Connection, column, insert, select, update
from sqlalchemy import table as named_table

from gateway.archive.marks import find_archive
from gateway.archive.remove import add_spending, count_removed
from gateway.checks.moments import moment_of
from gateway.sql.database import UtcDateTime
from gateway.tables.archives import archived_charges
from gateway.tables.core import receipts, transfers
from gateway.tables.workflows import receipt_steps

Stored = Mapping[str, Any]
"""A row as it is in a file."""

_PART: Final = 1000
"""Rows that are looked for by one query."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one archive that belong together."""

    month: str
    transfers: Sequence[Stored] = ()
    receipts: Sequence[Stored] = ()
    receipt_steps: Sequence[Stored] = ()


def bring_back(connection: Connection, rows: Rows) -> None:
    """Insert rows that were removed. Without effect if the month is no longer archived."""
    if find_archive(connection, rows.month, lock=True) is None:
        return
    charges = _missing(connection, transfers, "id", rows.transfers)
    charges = [row for row in charges if row["kind"] == "charge"]
    closed = _missing(connection, receipts, "request_id", rows.receipts)
    inserted = {row["request_id"] for row in closed}
    steps = [row for row in rows.receipt_steps if row["request_id"] in inserted]
    for table, found in ((transfers, charges), (receipts, closed), (receipt_steps, steps)):
        if found:
            connection.execute(_insert(table), [_values(table, row) for row in found])
    for row in charges:
        carried = archived_charges.c
        connection.execute(
            update(archived_charges)
            .where(
                carried.account_id == row["from_account"],
                carried.first_version <= row["account_version"],
                carried.last_version >= row["account_version"],
            )
            .values(returned_nanos=carried.returned_nanos + row["amount_nanos"])
        )
    windows = [{**row, "windows": _decoded(row["windows"])} for row in closed]
    add_spending(connection, rows.month, windows, sign=-1)
    count_removed(
        connection,
        rows.month,
        receipts=-len(closed),
        transfers=-len(charges),
        nanos=-sum(row["amount_nanos"] for row in charges),
    )


def as_read(row: Stored, table: Any) -> dict[str, Any]:
    """Return a row, or some of its columns, as SQLAlchemy would: with moments and decoded JSON."""
    read = dict(row)
    for each in table.c:
        if each.name not in row:
            continue
        if isinstance(each.type, JSON):
            read[each.name] = _decoded(row[each.name])
        elif each.name.endswith("_at"):
            read[each.name] = _moment(row[each.name])
    return read


def _missing(
    connection: Connection, table: Any, key: str, rows: Sequence[Stored]
) -> Sequence[Stored]:
    known: set[Any] = set()
    for start in range(0, len(rows), _PART):
        ids = [row[key] for row in rows[start : start + _PART]]
        known.update(
            connection.execute(select(table.c[key]).where(table.c[key].in_(ids))).scalars()
        )
    return [row for row in rows if row[key] not in known]


def _insert(table: Any) -> Any:
    """Return an INSERT that sends JSON as the text that it was; its column has no type here."""
    columns = (
        column(each.name, UtcDateTime()) if each.name.endswith("_at") else column(each.name)
        for each in table.c
    )
    return insert(named_table(table.name, *columns))


def _values(table: Any, row: Stored) -> dict[str, Any]:
    return {
        each.name: _moment(row[each.name]) if each.name.endswith("_at") else row[each.name]
        for each in table.c
    }


def _decoded(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)


def _moment(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else moment_of(microseconds)

"""Rows of a page as a file. Cells that a spreadsheet would compute are quoted. Pure."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from gateway.pricing import format_usd

AS: Final = "as"
CSV: Final = "csv"
"""Parameter of a page's address, and its value, by which its table is answered as a file."""

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Starts of cells that spreadsheets compute; full-width ones in some languages."""
_NUMBER: Final = re.compile(r"-\d+(\.\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class TableFile:
    """The table of a page as a file: the attributes of its rows that are columns, in order.

    ``names`` replaces numbers of accounts by their names. A file that ``is_cut`` says so in its
    last line.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[object]
    names: Mapping[int, str] | None = None
    is_cut: bool = False


def table_file(table: TableFile) -> bytes:
    """Return a table as CSV: amounts as decimals, moments in UTC, lists and maps as JSON."""
    return csv_lines(_lines(table))


def _lines(table: TableFile) -> Iterator[Sequence[object]]:
    names = table.names
    yield [
        "account" if names is not None and each == "account_id" else each.removesuffix("_nanos")
        for each in table.columns
    ]
    for row in table.rows:
        found = [_plain(name, _read(row, name)) for name in table.columns]
        if names is not None:
            found = [
                names.get(value, value)
                if name == "account_id" and isinstance(value, int)
                else value
                for name, value in zip(table.columns, found, strict=True)
            ]
        yield found
    if table.is_cut:
        yield [f"the rest is missing: a file has {len(table.rows)} rows; choose fewer by filters"]


def _read(row: object, name: str) -> object:
    """Return an attribute or a key of a row; a dot leads into it."""
    value: object = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part)
    return value


def _plain(name: str, value: object) -> object:
    if value is None:
        return None
    if name.endswith("_nanos") and isinstance(value, int):
        return format_usd(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, str | int | float):
        return value
    return msgspec.json.encode(value, enc_hook=str).decode()


def csv_lines(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([[_cell(value) for value in row] for row in rows])
    return text.getvalue().encode()


def attachment(name: str) -> dict[str, str]:
    """Return the header by which a browser stores an answer under a name."""
    return {"Content-Disposition": f'attachment; filename="{name}"'}


def _cell(value: object) -> object:
    if isinstance(value, str):
        # The writer does not quote a carriage return, at which readers begin a row.
        value = value.replace("\r\n", "\n").replace("\r", "\n")
    computed = isinstance(value, str) and value.lstrip(" ").startswith(_FORMULA)
    if computed and not _NUMBER.fullmatch(str(value)):
        return f"'{value}"
    return "" if value is None else value

"""Why lines of a batch failed, by code: read from its results while it runs, then from its file."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
from sqlalchemy import Connection

from gateway.batches.store import Batch, results_after
from gateway.errors import NotFound
from gateway.files.store import File, Files, find_file

READ_MAX: Final = 2_000
"""Lines that are read at most; the counts are then those of the first ones."""
BYTES_MAX: Final = 8 * 1024 * 1024


@dataclass(slots=True)
class LineErrors:
    """Lines that failed with one code: their number, and the first with its message."""

    code: str
    lines: int
    first: int
    message: str


class _Error(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _Body(msgspec.Struct):
    error: _Error | None = None


class _Response(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw(b"{}")


class _Line(msgspec.Struct):
    id: str = ""
    response: _Response | None = None
    error: _Error | None = None


def errors_in_sql(connection: Connection, batch: Batch) -> list[LineErrors]:
    """Count the errors of a batch that has not ended."""
    rows = results_after(connection, batch.id, 0, succeeded=False, limit=READ_MAX)
    return _counted(text for _, text in rows)


async def errors_in_file(files: Files, file: File) -> list[LineErrors]:
    """Count the errors in the error file of a batch that has ended. Raise ``BlobError``."""
    text = b"".join([chunk async for chunk in _beginning(files, file)])
    lines = text.split(b"\n")
    # The last one may be cut.
    whole = lines if len(text) == file.blob.bytes else lines[:-1]
    return _counted(itertools.islice(whole, READ_MAX))


def error_file(connection: Connection, batch: Batch) -> File | None:
    """Return the error file of a batch; None if it has none, or not any more."""
    if batch.ended_at is None or batch.error_file_id is None:
        return None
    try:
        return find_file(connection, batch.account_id, batch.error_file_id)
    except NotFound:
        return None


async def _beginning(files: Files, file: File) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in files.content(file):
        yield chunk
        size += len(chunk)
        if size >= BYTES_MAX:
            return


def _counted(lines: Iterator[bytes]) -> list[LineErrors]:
    """Return the errors of some lines by code, the most frequent first."""
    found: dict[str, LineErrors] = {}
    for text in lines:
        if not text.strip():
            continue
        number, error = _error_of(text)
        code = error.code or "unknown"
        known = found.setdefault(code, LineErrors(code, 0, number, error.message))
        known.lines += 1
    return sorted(found.values(), key=lambda each: -each.lines)


def _error_of(text: bytes) -> tuple[int, _Error]:
    """Return the number of a line and its error, in the answer that the live endpoint gives."""
    try:
        line = msgspec.json.decode(text, type=_Line)
        number = int(line.id.rpartition("_")[2])
        error = line.error
        if error is None and line.response is not None:
            error = msgspec.json.decode(line.response.body, type=_Body).error
    except ValueError:
        return 0, _Error()
    return number, error or _Error()

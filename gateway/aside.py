"""Stored rows that cannot be processed: set aside with the reason, so that they block no others.

A loop that cannot decode, settle or run a row writes a note here and continues with the next row.
The row itself stays where it is. Notes are displayed to the operator, who can retry or release the
row. A note is deleted once its subject has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias, get_args

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    func,
    or_,
    select,
)

from gateway.sql.database import Database, upsert
from gateway.tables.batches import batches
from gateway.tables.core import holds
from gateway.tables.set_aside import set_aside

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["request", "outcome", "batch", "price", "result"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
"""``request``: an open request whose job or steps cannot be read. ``outcome``: one that could not
be booked. ``batch``: a batch whose run fails repeatedly. ``price``: a price row that cannot be
read, so that its model is not for sale. ``result``: one that an upstream charges, but that could
not be read; it is kept with its content."""
NOTED_S: Final = 30.0
"""Minimum interval between two updates of the note on one row."""
NOTED_MAX: Final = 10_000
KEPT: Final = timedelta(days=30)
"""Retention of notes on outcomes and results, which are not deleted for any other reason."""


@dataclass(frozen=True, slots=True)
class Note:
    """A note on a row: its kind and name, the reason, and how often it was met."""

    kind: Kind
    name: str
    reason: str
    times: int
    first_at: datetime
    last_at: datetime


_NOTE: Final = [set_aside.c[name] for name in Note.__dataclass_fields__]


class Aside:
    """Sets rows aside for the loops of one gateway."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._noted: dict[tuple[Kind, str], float] = {}

    async def note(self, kind: Kind, name: str, error: BaseException | str) -> None:
        """Set a row aside, or update the note on it; logged the first time."""
        now = time.monotonic()
        if now - self._noted.get((kind, name), -NOTED_S) < NOTED_S:
            return
        if (kind, name) not in self._noted:
            traceback = error if isinstance(error, BaseException) else None
            log.error("set aside: %s %s: %s", kind, name, describe(error), exc_info=traceback)
        if len(self._noted) >= NOTED_MAX:
            self._noted.clear()
        self._noted[kind, name] = now
        await self.count(kind, name, error)

    async def count(self, kind: Kind, name: str, error: BaseException | str) -> int:
        """Set a row aside; return how often it has been set aside so far."""
        reason = describe(error)
        return await self._database.write(
            lambda connection: add_note(connection, kind, name, reason)
        )

    async def keep(self, name: str, reason: str, content: str) -> int:
        """Keep a result that could not be read; return how often it has been kept so far."""
        return await self._database.write(
            lambda connection: add_note(connection, "result", name, reason, content)
        )

    async def forget(self, kind: Kind, name: str) -> None:
        """Delete the note on a row that was processed after all."""
        if self._noted.pop((kind, name), None) is not None:
            await self._database.write(lambda connection: delete_note(connection, kind, name))


def describe(error: BaseException | str) -> str:
    """Describe an error in one line, without the data."""
    if isinstance(error, str):
        return error[:500]
    # SQLAlchemy's text has the statement and its parameters; the driver's own is enough.
    cause = getattr(error, "orig", None) or error
    return f"{type(cause).__name__}: {cause}".split("\n", 1)[0].replace("\0", "")[:500]


def add_note(
    connection: Connection, kind: Kind, name: str, reason: str, content: str | None = None
) -> int:
    """Create or update a note; return how often the row has been set aside."""
    now = datetime.now(UTC)
    made = upsert(connection, set_aside).values(
        kind=kind,
        name=name[:255],
        reason=reason[:500],
        times=1,
        first_at=now,
        last_at=now,
        content=content,
    )
    times = made.on_conflict_do_update(
        index_elements=["kind", "name"],
        set_={"reason": reason, "times": set_aside.c.times + 1, "last_at": now},
    ).returning(set_aside.c.times)
    return int(connection.execute(times).scalar_one())


def delete_note(connection: Connection, kind: Kind, name: str) -> bool:
    """Delete a note; return whether it existed."""
    gone = delete(set_aside).where(set_aside.c.kind == kind, set_aside.c.name == name)
    return bool(connection.execute(gone).rowcount)


def list_notes(connection: Connection, *, limit: int) -> list[Note]:
    """List notes, newest first."""
    query = select(*_NOTE).order_by(set_aside.c.last_at.desc()).limit(limit)
    return [Note(**row) for row in connection.execute(query).mappings()]


def find_note(connection: Connection, kind: Kind, name: str) -> Note | None:
    query = select(*_NOTE).where(set_aside.c.kind == kind, set_aside.c.name == name)
    row = connection.execute(query).mappings().first()
    return None if row is None else Note(**row)


def read_content(connection: Connection, kind: Kind, name: str) -> str | None:
    """Return what is kept of a result."""
    query = select(set_aside.c.content).where(set_aside.c.kind == kind, set_aside.c.name == name)
    content: str | None = connection.execute(query).scalar()
    return content


def count_notes(connection: Connection) -> dict[str, int]:
    """Count notes by kind."""
    query = select(set_aside.c.kind, func.count()).group_by(set_aside.c.kind)
    return {row[0]: row[1] for row in connection.execute(query)}


def delete_obsolete_notes(connection: Connection, now: datetime) -> None:
    """Delete notes on requests and batches that have ended, and old notes on outcomes."""
    open_hold = select(holds.c.request_id).where(holds.c.request_id == set_aside.c.name)
    running = select(batches.c.id).where(
        batches.c.id == set_aside.c.name, batches.c.ended_at.is_(None)
    )
    over: Sequence[tuple[Kind, ColumnElement[bool]]] = (
        ("request", ~open_hold.exists()),
        ("batch", ~running.exists()),
        ("outcome", set_aside.c.last_at < now - KEPT),
        ("result", set_aside.c.last_at < now - KEPT),
    )
    connection.execute(
        delete(set_aside).where(
            or_(*(and_(set_aside.c.kind == kind, ended) for kind, ended in over))
        )
    )

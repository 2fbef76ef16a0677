"""Leases in SQL, for work that one gateway at a time does, such as the sweep.

The row's ``due_at`` is the end of the lease. The holder renews it; another gateway takes over once
it has expired. If the holder is paused, two gateways can do the work concurrently; that must be
harmless.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, or_, select, update

from gateway.sql.database import Database, upsert
from gateway.tables.core import chores


class Lease:
    """One gateway's side of a lease."""

    def __init__(self, database: Database, name: str, *, held_s: float) -> None:
        self._database = database
        self._name = name
        self._held = timedelta(seconds=held_s)
        self._until: datetime | None = None

    async def acquire(self) -> bool:
        """Acquire or renew the lease; False while another gateway holds it."""
        if self._until is None:
            # Gateways that do not hold the lease only read.
            until = await self._database.read(self._read)
            if until is not None and until > datetime.now(UTC):
                return False
        self._until = await self._database.write(self._move)
        return self._until is not None

    async def renew_if_needed(self) -> bool:
        """Renew the lease if half of it is over; False if it was lost."""
        left = self._until - datetime.now(UTC) if self._until is not None else None
        return left is not None and (left > self._held / 2 or await self.acquire())

    async def release(self) -> None:
        """End the lease, so that another gateway can acquire it immediately."""
        if self._until is not None:
            await self._database.write(self._end)
            self._until = None

    def _read(self, connection: Connection) -> datetime | None:
        query = select(chores.c.due_at).where(chores.c.name == self._name)
        return connection.execute(query).scalar()

    def _move(self, connection: Connection) -> datetime | None:
        now = datetime.now(UTC)
        made = upsert(connection, chores).values(name=self._name, due_at=now)
        connection.execute(made.on_conflict_do_nothing())
        until = now + self._held
        moved = connection.execute(
            update(chores)
            .where(
                chores.c.name == self._name,
                or_(chores.c.due_at <= now, chores.c.due_at == self._until),
            )
            .values(due_at=until)
        )
        return until if moved.rowcount else None

    def _end(self, connection: Connection) -> None:
        connection.execute(
            update(chores)
            .where(chores.c.name == self._name, chores.c.due_at == self._until)
            .values(due_at=datetime.now(UTC))
        )

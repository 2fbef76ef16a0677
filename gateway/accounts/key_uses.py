"""The last use of keys: noted in memory, written to SQL in the background.

No request waits for it, and no row is written more than about once a minute, whatever the number of
gateways, so its precision is a minute. What was noted last is lost with its process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, bindparam, select

from gateway.sql.database import Database, upsert
from gateway.sql.outages import SQL_OUTAGE
from gateway.supervision import Beat, no_beat
from gateway.tables.usage import key_uses

log = logging.getLogger(__name__)

INTERVAL_S: Final = 60.0
"""Minimum time between two notes on one key."""
FRESH: Final = timedelta(seconds=50)
"""Age below which a stored use is not replaced: another gateway has just written it. Less than the
interval, because clocks differ."""
FLUSH_S: Final = 5.0
BATCH: Final = 500
"""Keys written in one transaction: a few milliseconds of SQLite's only writer."""
NOTED_MAX: Final = 200_000


class KeyUses:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._noted: dict[int, float] = {}
        self._waiting: dict[int, datetime] = {}

    def note(self, key_id: int, now: float) -> None:
        """Note that a key was used at a moment of the monotonic clock."""
        if now - self._noted.get(key_id, -INTERVAL_S) >= INTERVAL_S:
            if len(self._noted) >= NOTED_MAX:
                self._noted.clear()
            self._noted[key_id] = now
            self._waiting[key_id] = datetime.now(UTC)

    async def run(self, beat: Beat = no_beat) -> None:
        """Write what was noted, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except SQL_OUTAGE as error:
                log.warning("could not write the last use of keys: %s", type(error).__name__)
            beat()

    async def flush(self) -> None:
        """Write what was noted, in short transactions. What cannot be written is kept."""
        while self._waiting:
            some = dict(sorted(self._waiting.items())[:BATCH])
            await self._database.slow_write(functools.partial(store_uses, uses=some))
            for key_id, moment in some.items():
                if self._waiting.get(key_id) == moment:
                    del self._waiting[key_id]


def store_uses(connection: Connection, uses: Mapping[int, datetime]) -> None:
    """Store the last use of keys, unless one is known that is not older than ``FRESH``."""
    made = upsert(connection, key_uses)
    later = made.on_conflict_do_update(
        index_elements=[key_uses.c.key_id],
        set_={"used_at": made.excluded.used_at},
        where=key_uses.c.used_at < bindparam("fresh_at", type_=key_uses.c.used_at.type),
    )
    rows = [
        {"key_id": id, "used_at": moment, "fresh_at": moment - FRESH}
        for id, moment in sorted(uses.items())
    ]
    connection.execute(later, rows)


def last_uses(connection: Connection, key_ids: Collection[int]) -> dict[int, datetime]:
    """Return when keys were last used; those that never were are absent."""
    query = select(key_uses).where(key_uses.c.key_id.in_(sorted(key_ids)))
    return {row.key_id: row.used_at for row in connection.execute(query)}

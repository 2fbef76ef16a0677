"""Refused administrative attempts: counted in memory, written to the audit log in the background.

Only attempts with a valid key are counted, because only these have an author. No answer waits for
the log, and a key has at most one event a minute, so a flood cannot fill it. What was counted last
is lost with its process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sqlalchemy import Connection

from gateway.accounts.keys import KeyInfo
from gateway.audit_log import Author, record
from gateway.sql.database import Database
from gateway.sql.outages import SQL_OUTAGE
from gateway.supervision import Beat, no_beat

log = logging.getLogger(__name__)

INTERVAL_S: Final = 60.0
"""Minimum time between two events of a key."""
FLUSH_S: Final = 1.0
CALLS_MAX: Final = 20
"""Maximum number of different calls that an event names; the others are counted only."""
KEYS_MAX: Final = 10_000
BATCH: Final = 100


@dataclass(slots=True)
class _Attempts:
    key: KeyInfo
    number: int = 0
    calls: Counter[str] = field(default_factory=Counter)


class RefusedAttempts:
    """Attempts of keys at what their scopes or roles do not allow, on routes of administrators."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[int, _Attempts] = {}
        self._written: dict[int, float] = {}

    def note(self, key: KeyInfo, call: str) -> None:
        """Count an attempt; ``call`` is its method and the template of its path."""
        attempts = self._waiting.get(key.id)
        if attempts is None:
            if len(self._waiting) >= KEYS_MAX:
                return
            attempts = self._waiting[key.id] = _Attempts(key)
        attempts.number += 1
        if call in attempts.calls or len(attempts.calls) < CALLS_MAX:
            attempts.calls[call] += 1

    async def run(self, beat: Beat = no_beat) -> None:
        """Write what was counted, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush(time.monotonic())
            except SQL_OUTAGE as error:
                log.warning("could not record refused attempts: %s", type(error).__name__)
            beat()

    async def flush(self, now: float) -> None:
        """Write the attempts of keys without an event in the last minute. What cannot be written
        is kept."""
        for id in [id for id, at in self._written.items() if now - at >= INTERVAL_S]:
            del self._written[id]
        due = [id for id in self._waiting if id not in self._written]
        for start in range(0, len(due), BATCH):
            some = {id: self._waiting.pop(id) for id in due[start : start + BATCH]}
            try:
                await self._database.slow_write(partial(_record, some=list(some.values())))
            except BaseException:
                for id, attempts in some.items():
                    if (later := self._waiting.get(id)) is not None:
                        attempts.number += later.number
                        attempts.calls += later.calls
                    self._waiting[id] = attempts
                raise
            self._written.update(dict.fromkeys(some, now))


def _record(connection: Connection, some: Sequence[_Attempts]) -> None:
    for each in some:
        key = each.key
        record(
            connection,
            Author(key.prefix, "http", key_id=key.id),
            "access.refuse",
            f"key {key.prefix}",
            account_id=key.account_id,
            after={"attempts": each.number, "calls": dict(sorted(each.calls.items()))},
        )

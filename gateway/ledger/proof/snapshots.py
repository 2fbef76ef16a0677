"""The snapshots on which a proof reads its pages, and the horizon up to which they are complete.

Bookings go on during a proof. A row that was booked before the horizon is visible on every later
snapshot, so a page that ends before the horizon misses nothing. Later rows are summed up on the
snapshot that also has what they are compared with.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, select
from sqlalchemy.exc import OperationalError

from gateway.ledger.periods import month_of, open_period, utc_now
from gateway.sql.database import Database
from gateway.tables.core import periods

PAGE: Final = 1000
"""Rows of one snapshot."""
SKEW: Final = timedelta(seconds=30)
"""Time by which the clocks of gateways can differ."""
RENEWED_S: Final = 60.0
"""Age at which a horizon is replaced by a newer one."""
FOREVER: Final = datetime(9000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Opens read-only snapshots, one for each page."""

    open: Callable[[], AbstractContextManager[Connection]]
    horizon: Callable[[], datetime]
    page: int = PAGE

    @property
    def alone(self) -> bool:
        """Whether all pages are read on one snapshot, on which nothing changes meanwhile."""
        return self.horizon is _forever


def on_one(connection: Connection) -> Snapshots:
    """Read all pages in one open transaction."""
    return Snapshots(lambda: contextlib.nullcontext(connection), _forever)


def of_database(database: Database, *, page: int = PAGE) -> Snapshots:
    """Read each page in a separate transaction."""
    return Snapshots(database.snapshot, _Horizon(database), page)


def _forever() -> datetime:
    return FOREVER


class _Horizon:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._moment: datetime | None = None
        self._taken = 0.0

    def __call__(self) -> datetime:
        if self._moment is None or time.monotonic() - self._taken > RENEWED_S:
            try:
                self._moment = self._take()
            except OperationalError:
                # Bookings did not let go of the lock in time. An older horizon is as true.
                if self._moment is None:
                    raise
            self._taken = time.monotonic()
        return self._moment

    def _take(self) -> datetime:
        """Wait for open bookings into open months; later ones have a later time."""
        moment = utc_now() - SKEW
        with self._database.transaction() as connection:
            open_period(connection, month_of(moment))
            months = select(periods.c.month).where(periods.c.state == "open")
            connection.execute(months.order_by(periods.c.month).with_for_update()).all()
        return moment

"""What counts as an outage of the database or of the queue server, for every place that waits.

An outage is refused, silent, out of connections, read-only, full, locked for too long or past its
time limit: the same call can succeed later, so loops try again and clients get 503. Errors of the
data (``IntegrityError``, ``DataError``, ``ProgrammingError``) are not outages, because the same
call would fail again.
"""

from __future__ import annotations

from typing import Final

from redis.exceptions import RedisError
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

SQL_OUTAGE: Final = (OperationalError, InterfaceError, InternalError, PoolTimeout)
"""The database cannot serve. ``InternalError`` is PostgreSQL's class for a read-only server, and
``PoolTimeout`` is no ``DBAPIError``: no connection became free in time."""

QUEUE_OUTAGE: Final = (RedisError, OSError)
"""The queue server cannot serve; ``TimeoutError`` is an ``OSError``."""

OUTAGE: Final = (*SQL_OUTAGE, *QUEUE_OUTAGE)
"""Either of the two, for code that uses both."""


def outage_name(error: BaseException) -> str:
    """Name an outage for the log: the driver's own error where there is one."""
    return type(getattr(error, "orig", None) or error).__name__

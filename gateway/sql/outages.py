"""The exceptions that count as an outage of the database or of the queue server.

In an outage the server refuses connections, is silent, out of connections, read-only or full, a
lock takes too long, or a time limit is exceeded. The same call can succeed later, so loops try
again and clients get 503. Errors of the data (``IntegrityError``, ``DataError``,
``ProgrammingError``) are not outages, because the same call would fail again.
"""

from __future__ import annotations

from typing import Final

from redis.exceptions import RedisError
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

SQL_OUTAGE: Final = (OperationalError, InterfaceError, InternalError, PoolTimeout)
"""The database cannot serve. ``InternalError`` is PostgreSQL's class for a read-only server, and
``PoolTimeout`` (no connection became free in time) is not a ``DBAPIError``."""

QUEUE_OUTAGE: Final = (RedisError, OSError)
"""The queue server cannot serve; ``TimeoutError`` is an ``OSError``."""

OUTAGE: Final = (*SQL_OUTAGE, *QUEUE_OUTAGE)
"""Either of the two, for code that uses both."""


def outage_name(error: BaseException) -> str:
    """Return the class name of an outage for the log, preferably that of the driver's error."""
    return type(getattr(error, "orig", None) or error).__name__

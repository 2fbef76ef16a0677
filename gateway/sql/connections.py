"""Connections for writing, which are kept between transactions.

A pool would check a connection in and out and ping it for each transaction, and its rotation would
empty SQLite's page caches. Here the connection that was used last is used next, so transactions
that follow one another share it. After an error it is returned to the pool, which resets it. Knows
no tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

T = TypeVar("T")


class WriteConnections:
    """Runs transactions of an engine's lane; safe in as many threads as the engine's pool has
    connections."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._idle: list[Connection] = []

    def transact(self, function: Callable[[Connection], T], *, durable: bool) -> T:
        """Run a function in one transaction, which is committed when this returns.

        A transaction that is not ``durable`` survives a crash of this process, but not a power
        failure, and not a crash of PostgreSQL, unless a durable one was committed after it.
        """
        connection = self._begun(durable)
        try:
            result = function(connection)
            connection.commit()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return result

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            self._idle.pop().close()

    def _begun(self, durable: bool) -> Connection:
        # BEGIN finds out whether the server closed the connection meanwhile. Nothing is lost by
        # that, so the transaction begins again on a new connection.
        with contextlib.suppress(IndexError):
            try:
                return _begin(self._idle.pop(), durable)
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
        return _begin(self._engine.connect(), durable)


def _begin(connection: Connection, durable: bool) -> Connection:
    try:
        connection.info["durable"] = durable
        connection.begin()
    except BaseException:
        connection.close()
        raise
    return connection

"""Two empty databases side by side: SQLite files or, with ``BENCH_POSTGRES``, on a server.

``BENCH_POSTGRES`` is the URL of a PostgreSQL server, where they are made, and dropped in the end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.engine import make_url


@dataclass(frozen=True, slots=True)
class TwoDatabases:
    """The kind of two databases, their URLs, and a directory for files beside them."""

    name: str
    urls: tuple[str, str]
    directory: Path


@contextmanager
def two_databases(first: str, second: str) -> Iterator[TwoDatabases]:
    """Make two databases that are named after what they are for."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        if postgres := os.environ.get("BENCH_POSTGRES"):
            names = [f"tollgate_bench_{os.getpid()}_{which}" for which in (first, second)]
            with _on_server(postgres, names) as urls:
                yield TwoDatabases("PostgreSQL", urls, path)
        else:
            one, other = (f"sqlite:///{path / which}.db" for which in (first, second))
            yield TwoDatabases("SQLite", (one, other), path)


@contextmanager
def server(url: str) -> Iterator[Connection]:
    """Connect to a PostgreSQL server without a transaction around statements."""
    own = make_url(url).set(drivername="postgresql+psycopg")
    engine = create_engine(own, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@contextmanager
def _on_server(url: str, names: list[str]) -> Iterator[tuple[str, str]]:
    try:
        with server(url) as connection:
            for name in names:
                connection.execute(text(f"CREATE DATABASE {name}"))
        own = make_url(url).set(drivername="postgresql+psycopg")
        one, other = (
            own.set(database=name).render_as_string(hide_password=False) for name in names
        )
        yield one, other
    finally:
        with server(url) as connection:
            for name in names:
                connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))

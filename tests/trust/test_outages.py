"""Every way in which SQL or the queue is unreachable is an outage; invalid data is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from gateway.sql.database import Database, open_engine
from gateway.sql.outages import OUTAGE, SQL_OUTAGE
from tests.databases import own_postgres


@contextlib.contextmanager
def _raises_outage() -> Iterator[None]:
    with pytest.raises(SQL_OUTAGE):
        yield


def test_refused_connection_is_an_outage() -> None:
    engine = open_engine("postgresql://nobody@127.0.0.1:1/none")

    with _raises_outage(), engine.connect():
        pass


def test_empty_pool_is_an_outage(database_url: str) -> None:
    engine = open_engine(database_url, pool_size=1)
    engine.pool._timeout = 0.05  # type: ignore[attr-defined]  # ten seconds otherwise

    with engine.connect(), _raises_outage(), engine.connect():
        pass

    engine.dispose()


def test_read_only_statement_timeout_and_lock_timeout_are_outages() -> None:
    with own_postgres() as (_, url):
        engine = open_engine(url)
        for setting, statement in (
            ("default_transaction_read_only=on", "INSERT INTO accounts (name) VALUES ('x')"),
            ("statement_timeout='10ms'", "SELECT pg_sleep(5)"),
        ):
            with engine.connect() as connection:
                connection.execute(text(f"SET SESSION {setting}"))
                connection.commit()
                with _raises_outage():
                    connection.execute(text(statement))
                connection.invalidate()
        with engine.connect() as holder, engine.connect() as waiter:
            holder.execute(text("LOCK TABLE accounts"))
            waiter.execute(text("SET LOCAL lock_timeout = '10ms'"))
            with _raises_outage():
                waiter.execute(text("LOCK TABLE accounts"))
        engine.dispose()


def test_read_only_and_full_sqlite_are_outages(tmp_path: object) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/ledger.db")
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE t (x TEXT)"))
        connection.commit()

    with engine.connect() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar_one()
        connection.execute(text(f"PRAGMA max_page_count = {pages}"))
        with _raises_outage():
            connection.execute(text("INSERT INTO t VALUES (:x)"), {"x": "x" * 100_000})
        connection.invalidate()
    with engine.connect() as connection:
        connection.execute(text("PRAGMA query_only = ON"))
        with _raises_outage():
            connection.execute(text("INSERT INTO t VALUES ('x')"))

    engine.dispose()


def test_wrong_data_is_no_outage(database: Database) -> None:
    wrong = (
        "INSERT INTO accounts (id) VALUES (NULL)",
        "INSERT INTO receipts (request_id) VALUES ('x')",
    )
    for statement in wrong:
        with pytest.raises(DBAPIError) as raised, database.engine.begin() as connection:
            connection.execute(text(statement))
        assert isinstance(raised.value, sqlalchemy.exc.IntegrityError)
        assert not isinstance(raised.value, OUTAGE)

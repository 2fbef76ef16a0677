from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select

from gateway.accounts.accounts import create_account
from gateway.accounts.key_uses import KeyUses
from gateway.accounts.keys import KeyFilter, KeyInfo, authenticate, create_key, list_keys
from gateway.accounts.limits import Limit, list_limits, remove_limit, set_limit
from gateway.api.http.access import Access
from gateway.ledger.holds import hold
from gateway.sql.database import Database
from gateway.tables.core import accounts
from tests.ledger.books import HOLD, PEPPER, open_books


def make_key(
    connection: Connection, name: str = "acme", *, per_minute: int | None = None
) -> tuple[str, KeyInfo]:
    account = create_account(connection, name)
    return create_key(connection, account.id, pepper=PEPPER, requests_per_minute=per_minute)


def bounded(connection: Connection, account_id: int) -> bool:
    query = select(accounts.c.bounded).where(accounts.c.id == account_id)
    return bool(connection.execute(query).scalar_one())


def test_a_key_is_read_with_every_limit_that_can_cover_it(database: Database) -> None:
    with database.transaction() as connection:
        secret, key = make_key(connection, per_minute=5)
        _, other = create_key(connection, key.account_id, pepper=PEPPER)
        _, stranger = make_key(connection, "stranger")
        mine = [
            Limit(key.account_id, requests_per_minute=100),
            Limit(key.account_id, None, "echo", tokens_per_minute=1000),
            Limit(key.account_id, key.id, "echo", requests_per_minute=3),
        ]
        for limit in mine:
            set_limit(connection, limit)
        set_limit(connection, Limit(key.account_id, other.id, "echo", requests_per_minute=9))
        set_limit(connection, Limit(stranger.account_id, requests_per_minute=9))

        found = authenticate(connection, secret, PEPPER)

    own = Limit(key.account_id, key.id, requests_per_minute=5)
    assert set(found.limits) == {own, *mine}


def test_rate_limits_of_a_whole_key_are_stored_in_its_row(database: Database) -> None:
    with database.transaction() as connection:
        secret, key = make_key(connection, per_minute=5)
        limit = Limit(
            key.account_id, key.id, requests_per_minute=8, tokens_per_minute=90, concurrent_max=2
        )
        set_limit(connection, limit)

        [row] = list_keys(connection, KeyFilter(key.account_id))
        assert (row.requests_per_minute, row.tokens_per_minute) == (8, 90)
        assert list_limits(connection) == [limit]
        per_minute = [
            found.requests_per_minute for found in authenticate(connection, secret, PEPPER).limits
        ]
        assert sorted(per_minute, key=str) == [8, None]

        assert remove_limit(connection, key.account_id, key_id=key.id) == limit
        assert list_limits(connection) == []
        assert list_keys(connection, KeyFilter(key.account_id))[0].requests_per_minute is None


def test_setting_a_limit_again_replaces_all_of_it(database: Database) -> None:
    with database.transaction() as connection:
        _, key = make_key(connection)
        set_limit(connection, Limit(key.account_id, None, "echo", 5, 6, 7))

        set_limit(connection, Limit(key.account_id, None, "echo", tokens_per_minute=9))

        assert list_limits(connection, key.account_id) == [
            Limit(key.account_id, None, "echo", tokens_per_minute=9)
        ]


def test_only_concurrency_limits_mark_an_account_as_bounded(database: Database) -> None:
    with database.transaction() as connection:
        _, key = make_key(connection)
        set_limit(connection, Limit(key.account_id, requests_per_minute=5))
        assert not bounded(connection, key.account_id)

        set_limit(connection, Limit(key.account_id, key.id, concurrent_max=5))
        assert bounded(connection, key.account_id)

        remove_limit(connection, key.account_id, key_id=key.id)
        assert not bounded(connection, key.account_id)


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """Record the statements that the database executes."""
    asked: list[str] = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        asked.append(statement)

    event.listen(Engine, "before_cursor_execute", note)  # of every lane
    yield asked
    event.remove(Engine, "before_cursor_execute", note)


async def test_limits_cost_a_request_no_statement(
    database: Database, statements: list[str]
) -> None:
    books = open_books(database, credit=100 * HOLD)
    with database.transaction() as connection:
        secret, key = create_key(connection, books.account.id, pepper=PEPPER)
        hold(connection, [books.order()])
        statements.clear()
        hold(connection, [books.order()])
        without = list(statements)
        set_limit(connection, Limit(books.account.id, requests_per_minute=5))
        set_limit(connection, Limit(books.account.id, key.id, "echo", tokens_per_minute=5))
        statements.clear()
        hold(connection, [books.order()])
        assert statements == without

    access = Access(database, pepper=PEPPER, uses=KeyUses(database))
    statements.clear()
    found = await access.key(secret, remembered=True)
    assert len(found.limits) == 2
    assert len([each for each in statements if each.startswith("SELECT")]) == 1
    statements.clear()
    assert await access.key(secret, remembered=True) is found
    assert statements == []


def test_invalid_limits_are_refused(database: Database) -> None:
    with database.transaction() as connection:
        _, key = make_key(connection)
        _, stranger = make_key(connection, "stranger")
        with pytest.raises(ValueError, match="a limit needs"):
            set_limit(connection, Limit(key.account_id))
        with pytest.raises(ValueError, match="limit is 0"):
            set_limit(connection, Limit(key.account_id, requests_per_minute=0))
        with pytest.raises(ValueError, match="limit is 2147483648"):
            set_limit(connection, Limit(key.account_id, tokens_per_minute=2**31))
        with pytest.raises(LookupError, match="unknown account 99"):
            set_limit(connection, Limit(99, requests_per_minute=1))
        with pytest.raises(LookupError, match=f"has no key {stranger.id}"):
            set_limit(connection, Limit(key.account_id, stranger.id, requests_per_minute=1))
        missing = f"no such limit: account {key.account_id}, model echo"
        with pytest.raises(LookupError, match=missing):
            remove_limit(connection, key.account_id, model="echo")

from __future__ import annotations

import pytest
from sqlalchemy import Connection, select

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import KeyInfo, authenticate, create_key, list_keys
from gateway.accounts.limits import Limit, list_limits, remove_limit, set_limit
from gateway.database import Database
from gateway.tables import accounts

PEPPER = b"a pepper for tests, long enough"


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


def test_what_a_whole_key_may_do_per_minute_stands_in_its_own_row(database: Database) -> None:
    with database.transaction() as connection:
        secret, key = make_key(connection, per_minute=5)
        limit = Limit(
            key.account_id, key.id, requests_per_minute=8, tokens_per_minute=90, concurrent_max=2
        )
        set_limit(connection, limit)

        [row] = list_keys(connection, key.account_id)
        assert (row.requests_per_minute, row.tokens_per_minute) == (8, 90)
        assert list_limits(connection) == [limit]
        per_minute = [
            found.requests_per_minute for found in authenticate(connection, secret, PEPPER).limits
        ]
        assert sorted(per_minute, key=str) == [8, None]

        assert remove_limit(connection, key.account_id, key_id=key.id) == limit
        assert list_limits(connection) == []
        assert list_keys(connection, key.account_id)[0].requests_per_minute is None


def test_setting_a_limit_again_replaces_all_of_it(database: Database) -> None:
    with database.transaction() as connection:
        _, key = make_key(connection)
        set_limit(connection, Limit(key.account_id, None, "echo", 5, 6, 7))

        set_limit(connection, Limit(key.account_id, None, "echo", tokens_per_minute=9))

        assert list_limits(connection, key.account_id) == [
            Limit(key.account_id, None, "echo", tokens_per_minute=9)
        ]


def test_only_bounds_on_concurrent_requests_mark_an_account(database: Database) -> None:
    with database.transaction() as connection:
        _, key = make_key(connection)
        set_limit(connection, Limit(key.account_id, requests_per_minute=5))
        assert not bounded(connection, key.account_id)

        set_limit(connection, Limit(key.account_id, key.id, concurrent_max=5))
        assert bounded(connection, key.account_id)

        remove_limit(connection, key.account_id, key_id=key.id)
        assert not bounded(connection, key.account_id)


def test_limits_that_make_no_sense_are_refused_by_name(database: Database) -> None:
    with database.transaction() as connection:
        _, key = make_key(connection)
        _, stranger = make_key(connection, "stranger")
        with pytest.raises(ValueError, match="a limit needs"):
            set_limit(connection, Limit(key.account_id))
        with pytest.raises(ValueError, match="a limit is 0"):
            set_limit(connection, Limit(key.account_id, requests_per_minute=0))
        with pytest.raises(ValueError, match="a limit is 2147483648"):
            set_limit(connection, Limit(key.account_id, tokens_per_minute=2**31))
        with pytest.raises(LookupError, match="there is no account 99"):
            set_limit(connection, Limit(99, requests_per_minute=1))
        with pytest.raises(LookupError, match=f"has no key {stranger.id}"):
            set_limit(connection, Limit(key.account_id, stranger.id, requests_per_minute=1))
        with pytest.raises(LookupError, match=f"no limit of account {key.account_id} for echo"):
            remove_limit(connection, key.account_id, model="echo")

"""Undelivered cancelled work is free, and an operator can limit it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import httpx
import pytest

from gateway.accounts.accounts import create_account
from gateway.accounts.cancelled import CancelledTime
from gateway.accounts.limits import Limit, list_limits, remove_limit, set_limit
from gateway.errors import TooManyRequests
from gateway.sql.database import Database
from tests.databases import Databases
from tests.stack import Stack, chat, running, wait_for
from workers.contract.redis import connect

WORDS = " ".join(f"w{number}" for number in range(100))


async def test_time_is_refused_from_the_limit_on_until_it_has_left_the_hour(valkey: str) -> None:
    redis = connect(valkey)
    cancelled = CancelledTime(redis, namespace=f"t{uuid.uuid4().hex[:8]}", default_s=10)
    await cancelled.check(1, ())
    await cancelled.count({1: 4_000_000})
    await cancelled.check(1, ())
    await cancelled.count({1: 7_000_000})

    with pytest.raises(TooManyRequests) as refused:
        await cancelled.check(1, ())

    assert refused.value.code == "cancelled_time_exceeded"
    assert "cancelled 11 s" in refused.value.message
    assert 3500 < (refused.value.retry_after_s or 0) <= 3600
    await cancelled.check(2, ())  # another account
    await cancelled.check(1, [Limit(1, cancelled_seconds_per_hour=60)])
    await redis.aclose()


async def test_limit_of_an_account_goes_before_the_setting(valkey: str) -> None:
    redis = connect(valkey)
    cancelled = CancelledTime(redis, namespace=f"t{uuid.uuid4().hex[:8]}", default_s=None)
    await cancelled.count({1: 2_000_000})
    await cancelled.check(1, ())

    with pytest.raises(TooManyRequests):
        await cancelled.check(1, [Limit(1, cancelled_seconds_per_hour=1)])

    await redis.aclose()


def test_cancelled_time_is_limited_per_account_only(database: Database) -> None:
    with database.transaction() as connection:
        account_id = create_account(connection, "acme").id
        set_limit(connection, Limit(account_id, cancelled_seconds_per_hour=900))
        (found,) = list_limits(connection, account_id)
        assert found.cancelled_seconds_per_hour == 900
        with pytest.raises(ValueError, match="limited per account"):
            set_limit(connection, Limit(account_id, model="echo", cancelled_seconds_per_hour=9))
        assert remove_limit(connection, account_id).cancelled_seconds_per_hour == 900
        assert list_limits(connection, account_id) == []


@pytest.fixture
def stack(tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("cancelled")
    url = Databases("sqlite", directory, postgres).make()
    with running(directory / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}") as made:
        yield made


def test_account_that_cancels_too_much_is_refused_until_later(stack: Stack) -> None:
    caller = stack.caller()
    database = Database(stack.database_url)
    with database.transaction() as connection:
        set_limit(connection, Limit(caller.account_id, cancelled_seconds_per_hour=1))
    database.engine.dispose()

    for number in range(2):
        # Another text each time: the same one again would be taken for a retry.
        body = chat("slow", f"{number} {WORDS}")
        with pytest.raises(httpx.ReadTimeout):
            caller.http.post("/v1/chat/completions", json=body, timeout=2.5)
    wait_for(lambda: stack.held(caller) == 0, "the holds to go")
    time.sleep(0.2)
    refused = caller.http.post("/v1/chat/completions", json=chat("echo", "hello"))

    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "cancelled_time_exceeded"
    assert int(refused.headers["retry-after"]) > 60
    listed = caller.http.get("/v1/requests?status=cancelled").json()["data"]
    assert [one["cost"] for one in listed] == ["0", "0"]
    assert stack.findings() == []

"""Waiting, watching and listing query SQL and the queue rarely, for many requests at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import Engine, event

from gateway.dispatch.health import QueueHealth
from gateway.errors import NotFound
from gateway.ids import new_request_id
from gateway.ledger.holds import hold
from gateway.requests.lookup import Lookup, RequestFilter
from gateway.requests.reconnect import Reconnects
from gateway.sql.database import Database
from tests.ledger.books import done, open_books
from tests.servers import queue_server
from workers.contract.blobs import Blobs
from workers.contract.jobs import RequestId
from workers.contract.queue import Queue, QueueEntry
from workers.contract.redis import connect

MODEL = "m"


@pytest.fixture
def own_queue() -> Iterator[str]:
    with queue_server("valkey") as url:
        yield url


@pytest.fixture
async def redis(own_queue: str) -> AsyncIterator[Redis]:
    client = connect(own_queue)
    yield client
    await client.aclose()


async def reads(redis: Redis) -> int:
    """How often the server has read from a connection: a pipeline is read in one go."""
    return int((await redis.info("stats"))["total_reads_processed"])


async def queued(redis: Redis, namespace: str, *ids: str) -> Queue:
    queue = Queue(redis, MODEL, namespace=namespace)
    entries = [QueueEntry(id, "1", b"", cost=1.0) for id in ids]
    await queue.enqueue(entries, queue_max=10_000, account_max=10_000)
    return queue


async def test_the_watch_asks_for_many_models_in_a_few_round_trips(redis: Redis) -> None:
    watch = QueueHealth(redis, namespace="few")
    await watch.refresh()
    now = asyncio.get_running_loop().time()
    watch._asked.update({f"model-{number}": now for number in range(300)})

    before = await reads(redis)
    await watch.refresh()

    assert len(watch.loads) == 300
    assert await reads(redis) - before < 30


async def test_a_queue_server_that_is_full_counts_as_away(redis: Redis) -> None:
    watch = QueueHealth(redis, namespace="full")
    await redis.config_set("maxmemory", "1")

    with pytest.raises(RedisError):
        await watch.refresh()

    assert not watch.healthy


async def test_many_waiting_clients_are_looked_up_with_a_few_statements(
    database: Database, redis: Redis, tmp_path: Path
) -> None:
    books = open_books(database, credit=10_000_000)
    orders = [books.order() for _ in range(100)]
    with database.transaction() as connection:
        hold(connection, orders)
    books.settle(*(done(order.request_id) for order in orders[:40]))
    lookup = Lookup(database, redis, Blobs(f"file://{tmp_path}"), {}, namespace="few")
    statements: list[str] = []

    def count(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if "receipts" in statement:
            statements.append(statement)

    event.listen(Engine, "before_cursor_execute", count)
    try:
        found = await asyncio.gather(
            *(lookup.closed(books.account.id, order.request_id) for order in orders)
        )
        with pytest.raises(NotFound):
            await lookup.closed(books.account.id + 1, orders[0].request_id)
    finally:
        event.remove(Engine, "before_cursor_execute", count)

    assert [one is not None for one in found] == [True] * 40 + [False] * 60
    assert len(statements) <= 4


async def test_a_list_of_open_requests_asks_the_queue_once(
    database: Database, redis: Redis, tmp_path: Path
) -> None:
    books = open_books(database, credit=10_000_000)
    orders = [books.order() for _ in range(60)]
    with database.transaction() as connection:
        hold(connection, orders)
    namespace = f"t{secrets.token_hex(4)}"
    await queued(redis, namespace, *(order.request_id for order in orders))
    lookup = Lookup(database, redis, Blobs(f"file://{tmp_path}"), {}, namespace=namespace)
    await lookup.list(RequestFilter(books.account.id), limit=60, cursor=None)

    before = await reads(redis)
    page = await lookup.list(RequestFilter(books.account.id), limit=60, cursor=None)

    assert len(page.items) == 60
    assert await reads(redis) - before < 10


async def test_a_request_that_was_cancelled_in_the_queue_is_not_shown_as_running(
    database: Database, redis: Redis, tmp_path: Path
) -> None:
    books = open_books(database, credit=10_000_000)
    order = books.order()
    with database.transaction() as connection:
        hold(connection, [order])
    namespace = f"t{secrets.token_hex(4)}"
    queue = await queued(redis, namespace, order.request_id)

    await queue.cancel(order.request_id)
    found = await Lookup(
        database, redis, Blobs(f"file://{tmp_path}"), {}, namespace=namespace
    ).find(books.account.id, order.request_id)

    assert found.status == "queued"


async def test_a_lost_connection_that_could_not_be_announced_is_forgotten_in_time() -> None:
    nowhere = connect("unix:///nowhere/at/all")
    retries = Reconnects(nowhere, namespace="few", window_s=0.05)
    for number in range(50):
        retries.lose(f"order {number}", RequestId(new_request_id()))
        with pytest.raises(RedisError):
            await retries.announce(f"order {number}")

    await asyncio.sleep(0.1)
    retries.lose("another", RequestId(new_request_id()))
    retries.lose("last", RequestId("req_last"))

    assert await retries.earlier("order 7", says_so=False) is None
    assert await retries.earlier("last", says_so=False) == "req_last"
    for number in range(50):
        retries.lose(f"later {number}", RequestId(new_request_id()))
    assert len(retries._lost) < 60
    await nowhere.aclose()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition was not met within 10 s")


@pytest.fixture
async def gateways(redis: Redis) -> AsyncIterator[tuple[Reconnects, Reconnects]]:
    """The reconnects of two gateways that have read which clients disconnected so far."""
    both = (
        Reconnects(redis, namespace="few", window_s=60),
        Reconnects(redis, namespace="few", window_s=60),
    )
    listening = [asyncio.create_task(each.listen()) for each in both]
    for each in both:
        each.lose("before", RequestId("req_before"))
        await each.announce("before")
    await until(lambda: all(each._read_at > 0 for each in both))
    yield both
    for task in listening:
        task.cancel()
    await asyncio.wait(listening)


async def asked(redis: Redis) -> int:
    """Return how many fingerprints were looked up."""
    return int((await redis.info("commandstats")).get("cmdstat_getdel", {"calls": 0})["calls"])


async def test_a_request_that_repeats_none_asks_nothing(
    redis: Redis, gateways: tuple[Reconnects, Reconnects]
) -> None:
    for each in gateways:
        for number in range(50):
            assert await each.earlier(f"new {number}", says_so=False) is None

    assert await asked(redis) == 0


async def test_a_disconnected_request_is_found_by_another_gateway_and_once(
    redis: Redis, gateways: tuple[Reconnects, Reconnects]
) -> None:
    one, other = gateways
    one.lose("order", RequestId("req_1"))
    await one.announce("order")
    await until(lambda: "order" in other._announced)

    found = [await each.earlier("order", says_so=False) for each in (other, one, other)]

    assert found == ["req_1", None, None]


async def test_a_gateway_that_cannot_read_disconnects_looks_every_fingerprint_up(
    redis: Redis,
) -> None:
    one, other = (Reconnects(redis, namespace="few", window_s=60) for _ in range(2))
    one.lose("order", RequestId("req_1"))
    await one.announce("order")

    assert await other.earlier("order", says_so=False) == "req_1"


async def test_a_job_that_is_missing_among_many_is_found(redis: Redis) -> None:
    ids = [f"req_{number:032x}" for number in range(600)]
    queue = await queued(redis, "many", *ids)
    for id in (ids[3], ids[599]):
        await redis.delete(f"many:{{{MODEL}}}:job:{id}")

    before = await reads(redis)
    missing = await queue.missing(ids)

    assert missing == [ids[3], ids[599]]
    assert await reads(redis) - before < 30

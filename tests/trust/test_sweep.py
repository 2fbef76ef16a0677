"""The sweep: its cost follows the young holds, it recovers a wipe, and one gateway runs it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Container
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError
from sqlalchemy import insert, select, update

from gateway.accounts.cancelled import CancelledTime
from gateway.accounts.rates import Rates
from gateway.aside import Aside, list_notes
from gateway.catalog.store import LiveCatalog
from gateway.dispatch.enqueue import Dispatch
from gateway.dispatch.waiters import Waiters
from gateway.files.retention import MediaStore
from gateway.leases import Lease
from gateway.ledger.holds import delete_expired_outputs, delete_idempotency_keys, hold
from gateway.ledger.reconcile import reconcile
from gateway.requests import sweep as sweeping
from gateway.requests.cancellation import Cancellation
from gateway.requests.doubt import Doubts
from gateway.requests.lookup import Lookup
from gateway.requests.reconnect import Reconnects
from gateway.requests.settle import Settler
from gateway.requests.sweep import Sweeper
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.tables.core import holds, idempotency, outputs
from gateway.workflows.runner import WorkflowRunner
from tests.ledger.books import Books, done, open_books
from tests.stack import CATALOG
from workers.contract.blobs import Blobs
from workers.contract.jobs import Job, RequestId, encode
from workers.contract.queue import Queue
from workers.contract.redis import connect

MODEL = "m"


class Made:
    """The sweepers of some gateways on one database and one queue server."""

    def __init__(self, database: Database, redis: Redis, live: LiveCatalog, folder: Path) -> None:
        self.database, self.redis, self._live, self._folder = database, redis, live, folder
        self.namespace = f"t{secrets.token_hex(6)}"
        self.books: Books = open_books(database, credit=10_000_000)
        self.queue = Queue(redis, MODEL, namespace=self.namespace)

    def sweeper(self, in_doubt: Container[RequestId] = frozenset()) -> Sweeper:
        settings = Settings(namespace=self.namespace)
        dispatch = Dispatch(self.redis, "box", settings=settings)
        settler, flows, aside = self.settler(dispatch)
        return Sweeper(
            database=self.database,
            redis=self.redis,
            dispatch=dispatch,
            settler=settler,
            flows=flows,
            aside=aside,
            in_doubt=in_doubt,
            settings=settings,
        )

    def cancellation(self, redis: Redis) -> Cancellation:
        """The cancellation of a gateway that reaches the queue by a client of its own."""
        dispatch = Dispatch(redis, "box", settings=Settings(namespace=self.namespace))
        settler, _, _ = self.settler(dispatch)
        blobs = Blobs(f"file://{self._folder}")
        return Cancellation(
            dispatch=dispatch,
            settler=settler,
            lookup=Lookup(self.database, redis, blobs, self._live.prices, namespace=self.namespace),
            waiters=Waiters(),
            reconnects=Reconnects(redis, namespace=self.namespace, window_s=60),
            grace_s=1,
        )

    def settler(self, dispatch: Dispatch) -> tuple[Settler, WorkflowRunner, Aside]:
        waiters, aside = Waiters(), Aside(self.database)
        blobs = Blobs(f"file://{self._folder}")
        flows = WorkflowRunner(
            database=self.database,
            redis=self.redis,
            live=self._live,
            dispatch=dispatch,
            waiters=waiters,
            aside=aside,
            namespace=self.namespace,
            blobs=blobs,
            close=lambda settlement, reply: settler.close(settlement, reply),
        )
        settler = Settler(
            database=self.database,
            redis=self.redis,
            live=self._live,
            rates=Rates(self.redis, namespace=self.namespace),
            waiters=waiters,
            gateway="gw",
            namespace=self.namespace,
            ledger=self.books.writer(),
            flows=flows,
            media=MediaStore(self.database, blobs, retention=timedelta(hours=1)),
            cancelled=CancelledTime(self.redis, namespace=self.namespace, default_s=None),
            aside=aside,
            output_row_bytes_max=4096,
        )
        return settler, flows, aside

    def accept(self, count: int, *, age_s: float, deadline_s: float = 3600) -> list[RequestId]:
        """Hold for requests that were accepted some time ago."""
        made_at = datetime.now(UTC) - timedelta(seconds=age_s)
        ids = [
            RequestId(f"req_{int(made_at.timestamp() * 1000):012x}7{secrets.token_hex(10)[:19]}")
            for _ in range(count)
        ]
        orders = [
            self.books.order(
                request_id=id,
                job=encode(Job(id, str(self.books.account.id), MODEL, "text-generation", {})),
                accepted_at=made_at,
                deadline_at=made_at + timedelta(seconds=deadline_s),
            )
            for id in ids
        ]
        with self.database.transaction() as connection:
            hold(connection, orders)
        return ids

    async def lose(self, ids: list[RequestId]) -> None:
        for id in ids:
            await self.redis.delete(f"{self.namespace}:{{{MODEL}}}:job:{id}")

    async def wipe(self) -> None:
        async for key in self.redis.scan_iter(f"{self.namespace}:*"):
            await self.redis.delete(key)

    async def missing(self, ids: list[RequestId]) -> int:
        return len(await self.queue.missing(ids))


@pytest.fixture
async def made(database: Database, valkey: str, tmp_path: Path) -> AsyncIterator[Made]:
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    redis = connect(valkey)
    yield Made(database, redis, await LiveCatalog.open(catalog, database), tmp_path / "blobs")
    await redis.aclose()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "CHUNK", 10)
    monkeypatch.setattr(sweeping, "TURN", 20)
    monkeypatch.setattr(sweeping, "JOBS", 7)
    monkeypatch.setattr(sweeping, "OVERDUE", 5)


async def test_one_sweep_after_a_wipe_queues_everything_again(made: Made, small: None) -> None:
    ids = made.accept(45, age_s=1800) + made.accept(8, age_s=10)
    sweeper = made.sweeper()
    await sweeper.turn()
    assert await made.missing(ids) == 0

    await made.wipe()
    await sweeper.turn()

    assert await made.missing(ids) == 0


async def test_a_young_hold_that_is_lost_is_found_by_the_next_sweep(
    made: Made, small: None
) -> None:
    made.accept(45, age_s=1800)
    young = made.accept(3, age_s=10)
    sweeper = made.sweeper()
    await sweeper.turn()

    await made.lose(young)
    await sweeper.turn()

    assert await made.missing(young) == 0


async def test_an_old_hold_that_is_lost_alone_is_found_by_turns(made: Made, small: None) -> None:
    ids = sorted(made.accept(45, age_s=1800))
    sweeper = made.sweeper()
    await sweeper.turn()
    await made.lose(ids[-1:])

    await sweeper.turn()
    assert await made.missing(ids) == 1, "two chunks of ten are looked at in a turn"
    await sweeper.turn()
    await sweeper.turn()

    assert await made.missing(ids) == 0


async def test_interrupted_full_sweep_is_repeated(made: Made, small: None) -> None:
    ids = made.accept(15, age_s=1800)
    # As left by a gateway that was killed during a full sweep.
    await made.redis.set(f"{made.namespace}:sweep", b"whole")

    await made.sweeper().turn()

    assert await made.missing(ids) == 0
    assert await made.redis.get(f"{made.namespace}:sweep") == b""


async def test_one_gateway_at_a_time_sweeps(made: Made) -> None:
    first, second = made.sweeper(), made.sweeper()
    await first.turn()
    ids = made.accept(3, age_s=10)

    await second.turn()
    assert await made.missing(ids) == 3
    await first.turn()
    assert await made.missing(ids) == 0


async def test_lease_is_free_once_it_has_expired_or_was_released(database: Database) -> None:
    first = Lease(database, "sweep", held_s=60)
    second = Lease(database, "sweep", held_s=0)
    third = Lease(database, "sweep", held_s=60)

    assert await first.acquire()
    assert await first.acquire()
    assert not await second.acquire()
    await first.release()
    assert await second.acquire()
    assert await third.acquire()
    assert not await second.renew_if_needed()


async def test_overdue_requests_are_released_though_one_cannot_be_closed(
    made: Made, small: None
) -> None:
    bad = made.accept(6, age_s=900, deadline_s=1)
    good = made.accept(12, age_s=600, deadline_s=1)
    with made.database.transaction() as connection:
        poison = update(holds).where(holds.c.request_id.in_(bad)).values(windows=["x"])
        connection.execute(poison)

    await made.sweeper().turn()

    with made.database.transaction() as connection:
        left = set(connection.execute(select(holds.c.request_id)).scalars())
        noted = {note.name for note in list_notes(connection, limit=100)}
    assert left == noted == set(bad)
    assert not left & set(good)


async def test_overdue_requests_are_released_while_the_queue_is_away(made: Made) -> None:
    made.accept(3, age_s=900, deadline_s=1)
    sweeper = made.sweeper()
    nowhere = connect("unix:///nowhere/at/all")
    sweeper._redis = nowhere

    with pytest.raises(ConnectionError):
        await sweeper.turn()

    assert made.books.open_holds() == 0
    await nowhere.aclose()


async def test_expired_rows_are_deleted_in_bounded_batches(made: Made) -> None:
    ids = made.accept(5, age_s=60)
    made.books.settle(*(done(id) for id in ids))
    past = datetime.now(UTC) - timedelta(days=8)
    with made.database.transaction() as connection:
        connection.execute(
            insert(outputs), [{"request_id": id, "body": b"x", "expires_at": past} for id in ids]
        )
        connection.execute(
            insert(idempotency),
            [
                {
                    "account_id": made.books.account.id,
                    "key": f"k{number}",
                    "request_id": id,
                    "body_sha256": b"x" * 32,
                    "created_at": past,
                }
                for number, id in enumerate(ids)
            ],
        )
        now = datetime.now(UTC)

        deleted = [delete_expired_outputs(connection, now, limit=3) for _ in range(3)]
        forgotten = [delete_idempotency_keys(connection, now, limit=3) for _ in range(3)]

        assert deleted == forgotten == [3, 2, 0]
        assert reconcile(connection, now=now) == []


async def test_a_request_in_doubt_is_closed_for_nothing_while_the_queue_is_away(
    made: Made, tmp_path: Path
) -> None:
    (request_id,) = made.accept(1, age_s=30)
    unreachable = connect(f"unix://{tmp_path}/absent")
    doubts = Doubts(made.cancellation(unreachable).take_back)
    doubts.note(MODEL, request_id)

    running = asyncio.create_task(doubts.run())
    try:
        for _ in range(100):
            if not made.books.open_holds():
                break
            await asyncio.sleep(0.1)
    finally:
        running.cancel()
        await unreachable.aclose()

    await made.sweeper().turn()
    assert len(doubts) == 1, "its job is cancelled as soon as the queue is back"
    assert await made.missing([request_id]) == 1, "no sweeper runs it"
    assert not made.books.open_holds()
    assert made.books.balance().posted_nanos == 10_000_000


async def test_a_request_in_doubt_is_not_run_before_it_is_closed(made: Made) -> None:
    (request_id,) = made.accept(1, age_s=30)
    doubts = Doubts(made.cancellation(made.redis).take_back)
    doubts.note(MODEL, request_id)
    in_doubt = {request_id} if request_id in doubts else set()
    sweeper = made.sweeper(in_doubt)

    await sweeper.turn()
    assert await made.missing([request_id]) == 1

    in_doubt.clear()
    await sweeper.turn()
    assert await made.missing([request_id]) == 0

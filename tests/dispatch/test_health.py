"""The gateway's view of the queue server: nobody is refused because the view is not yet there."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway import metrics
from gateway.app import create_app
from gateway.catalog.loader import load_catalog
from gateway.dispatch import health
from gateway.dispatch.gauges import LoadGauges
from gateway.dispatch.health import QueueHealth
from gateway.errors import Unavailable
from gateway.settings import Settings
from tests.databases import migrated_file
from tests.servers import queue_server
from workers.contract.announcements import Announcement, ModelState, Workers
from workers.contract.queue import Completion, Queue, QueueEntry
from workers.contract.redis import connect

CATALOG = load_catalog(Path(__file__).parents[2] / "catalog.yaml").models
MODEL = next(entry for entry in CATALOG if entry.name == "pocket-chat")
NAMESPACE = f"test-{secrets.token_hex(6)}"


@pytest.fixture
def own_queue() -> Iterator[str]:
    with queue_server("valkey") as url:
        yield url


@pytest.fixture
async def redis(own_queue: str) -> AsyncIterator[Redis]:
    client = connect(own_queue)
    yield client
    await client.aclose()


async def check(watch: QueueHealth) -> None:
    await watch.check(MODEL, account="1", waits=True, wait_max_s=1.0)


async def test_a_worker_that_has_just_started_is_seen_before_a_request_is_refused(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = QueueHealth(redis, namespace=NAMESPACE)
    await watch.try_refresh()
    await Workers(redis, namespace=NAMESPACE).announce(Announcement("w", models=(MODEL.name,)))

    with pytest.raises(Unavailable, match="no worker serves it"):
        await check(watch)  # the last look was a moment ago

    monkeypatch.setattr(health, "START_REFRESH_S", 0.0)
    await check(watch)


async def test_requests_wait_for_a_model_that_loads(redis: Redis) -> None:
    watch = QueueHealth(redis, namespace=NAMESPACE)
    workers = Workers(redis, namespace=NAMESPACE)
    why = {MODEL.name: "it is still loading"}
    await workers.announce(Announcement("w", loading=(MODEL.name,), unavailable=why))

    await watch.try_refresh()
    await check(watch)

    await workers.announce(Announcement("w", loading=(MODEL.name,), unavailable=why, draining=True))
    await watch.try_refresh()
    with pytest.raises(Unavailable):
        await check(watch)


async def test_a_gateway_knows_the_queue_before_it_serves(own_queue: str, tmp_path: Path) -> None:
    url = migrated_file(tmp_path / "tollgate.db")
    app = create_app(Settings(home=tmp_path, database_url=url, redis_url=own_queue))

    async with app.lifespan():
        healthy = app.state.services.requests.health.healthy

    assert healthy


async def test_many_refusals_share_one_look(redis: Redis) -> None:
    watch = QueueHealth(redis, namespace=NAMESPACE)
    await watch.try_refresh()
    await asyncio.sleep(health.START_REFRESH_S)
    looks = 0
    refresh = watch.refresh

    async def counted() -> None:
        nonlocal looks
        looks += 1
        await refresh()

    watch.refresh = counted  # type: ignore[method-assign]
    answers = await asyncio.gather(*(check(watch) for _ in range(50)), return_exceptions=True)

    assert {type(answer) for answer in answers} == {Unavailable}
    assert looks == 1


async def test_gauges_tell_the_work_of_queues_and_what_is_in_memory(redis: Redis) -> None:
    namespace = f"test-{secrets.token_hex(6)}"
    watch, model = QueueHealth(redis, namespace=namespace), f"gauged-{secrets.token_hex(4)}"
    queue = Queue(redis, model, namespace=namespace)
    for number in range(3):
        entry = QueueEntry(f"req_{number}", account="1", payload=b"{}", cost=2.0)
        await queue.enqueue([entry], queue_max=10, account_max=10)
    (lease,) = await queue.lease("w", 1)
    watch._asked[model] = time.monotonic()
    state = ModelState(resident_bytes=7, loads=2)
    await Workers(redis, namespace=namespace).announce(Announcement("w", states={model: state}))
    gauges = LoadGauges(watch)

    await watch.refresh()
    gauges.observe()
    first = {name: _gauge(name, model) for name in ("queue_depth", "queue_work_seconds")}
    resident = _gauge("model_resident_bytes", model), _gauge("model_loads", model)
    await Workers(redis, namespace=namespace).withdraw("w")
    watch._asked.clear()  # nothing was asked of it for half a minute, but its jobs wait
    await queue.complete([Completion(lease.id, lease.token, "ok", b"{}")])
    await watch.refresh()
    gauges.observe()

    assert first == {"queue_depth": 2, "queue_work_seconds": 4.0}
    assert resident == (7, 2)
    assert _gauge("model_resident_bytes", model) == 0
    assert _gauge("queue_depth", model) == 2
    assert _gauge("queue_oldest_seconds", model) >= 0


def _gauge(name: str, model: str) -> float:
    value = metrics.REGISTRY.get_sample_value(f"tollgate_{name}", {"model": model})
    assert value is not None
    return value

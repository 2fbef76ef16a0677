"""Mailboxes, event logs, outcomes, announcements and notifications, on both servers."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tests.contract.making import entry, fill, finished, settle_all
from workers.contract.announcements import Announcement, Workers
from workers.contract.queue import Queue
from workers.contract.streams import (
    MAILBOX_FRAMES,
    EventLog,
    LogEntry,
    Mailbox,
    Outcomes,
    check_cursor,
    notifications,
    publish,
)


def logged(seq: int, data: bytes = b"", *, attempt: int = 1, id: str = "j1") -> LogEntry:
    return LogEntry(id=id, attempt=attempt, seq=seq, data=data or b"event %d" % seq)


# --- Mailboxes ------------------------------------------------------------------------------------


async def test_frames_arrive_in_order_and_once(client: Redis, namespace: str) -> None:
    mailbox = Mailbox(client, "gw1", namespace=namespace)
    await mailbox.open()

    for n in range(5):
        assert await Mailbox.post(client, "gw1", b"frame %d" % n, namespace=namespace)
    frames = [*await mailbox.read(count=2), *await mailbox.read(count=2), *await mailbox.read()]

    assert frames == [b"frame %d" % n for n in range(5)]
    assert await mailbox.read(block_ms=10) == []


async def test_a_reader_that_waits_is_woken(client: Redis, namespace: str) -> None:
    mailbox = Mailbox(client, "gw1", namespace=namespace)
    await mailbox.open()
    reading = asyncio.create_task(mailbox.read(block_ms=2000))
    await asyncio.sleep(0.02)

    await publish(client, {"gw1": b"news"}, namespace=namespace)

    assert await reading == [b"news"]


async def test_frames_to_a_dead_gateway_are_dropped(client: Redis, namespace: str) -> None:
    living, closed = (Mailbox(client, name, namespace=namespace) for name in ("living", "closed"))
    await living.open()
    await closed.open()
    await closed.close()

    gone = await publish(
        client, {"never": b"x", "living": b"y", "closed": b"z"}, namespace=namespace
    )

    assert gone == {"never", "closed"}
    assert await living.read() == [b"y"]
    assert len(await client.keys(f"{namespace}:*")) == 1


async def test_mailbox_keeps_a_limited_number_of_frames(client: Redis, namespace: str) -> None:
    mailbox = Mailbox(client, "gw1", namespace=namespace)
    await mailbox.open()
    for _ in range(MAILBOX_FRAMES // 100):
        await asyncio.gather(
            *(publish(client, {"gw1": b"x"}, namespace=namespace) for _ in range(150))
        )

    [key] = await client.keys(f"{namespace}:*")

    assert MAILBOX_FRAMES <= await client.xlen(key) <= MAILBOX_FRAMES + 200


async def test_mailbox_is_created_again_after_the_server_lost_it(
    client: Redis, namespace: str
) -> None:
    mailbox = Mailbox(client, "gw1", namespace=namespace, refresh_s=0.0)
    assert await mailbox.read(block_ms=1) == []
    await client.delete(*await client.keys(f"{namespace}:*"))

    lost = await publish(client, {"gw1": b"lost"}, namespace=namespace)
    assert await mailbox.read(block_ms=1) == []
    again = await publish(client, {"gw1": b"received"}, namespace=namespace)

    assert lost == {"gw1"}
    assert not again
    assert await mailbox.read() == [b"received"]


async def test_read_frames_are_trimmed_and_the_mailbox_is_kept_alive(
    client: Redis, namespace: str
) -> None:
    mailbox = Mailbox(client, "gw1", namespace=namespace, refresh_s=0.0)
    await mailbox.open()
    for _ in range(4):
        for _ in range(150):
            await publish(client, {"gw1": b"x"}, namespace=namespace)
        await mailbox.read()

    await mailbox.read(block_ms=1)

    [key] = await client.keys(f"{namespace}:*")
    assert await client.xlen(key) < 300
    assert 0 < await client.ttl(key) <= 60


# --- Event logs -----------------------------------------------------------------------------------


@pytest.fixture
def log(client: Redis, namespace: str) -> EventLog:
    return EventLog(client, namespace=namespace)


async def test_a_log_is_replayed_after_a_cursor(log: EventLog) -> None:
    entries = [logged(3), logged(7), logged(1, attempt=2), logged(4, attempt=2)]
    await log.append(*entries)
    await log.append(logged(1, id="another"))

    assert await log.replay("j1") == entries
    assert [e.cursor for e in await log.replay("j1", after="1-3")] == ["1-7", "2-1", "2-4"]
    assert [e.cursor for e in await log.replay("j1", after="1-5")] == ["1-7", "2-1", "2-4"]
    assert await log.replay("j1", after="2-4") == []
    assert await log.replay("never") == []


async def test_events_of_a_fenced_worker_are_not_logged(log: EventLog) -> None:
    await log.append(logged(5))
    await log.append(logged(1, b"of the successor", attempt=2))

    await log.append(logged(6), logged(2, attempt=2), logged(1, b"again", attempt=2))

    assert [e.cursor for e in await log.replay("j1")] == ["1-5", "2-1", "2-2"]


async def test_log_is_limited_and_expires(client: Redis, log: EventLog, namespace: str) -> None:
    for start in range(1, 6000, 500):
        await log.append(*(logged(n) for n in range(start, start + 500)))

    [key] = await client.keys(f"{namespace}:*")

    assert 4096 <= await client.xlen(key) <= 4296
    assert 0 < await client.ttl(key) <= 900


@pytest.mark.parametrize("cursor", ["", "1", "1-", "-1", "a-1", "1-1-1", "1-+", "1-٣", "9" * 40])
async def test_malformed_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(ValueError, match="1-42"):
        check_cursor(cursor)


# --- Outcomes -------------------------------------------------------------------------------------


@pytest.fixture
async def two(client: Redis, namespace: str) -> tuple[Queue, Queue]:
    """Two models with three finished jobs each."""
    queues = [Queue(client, model, namespace=namespace) for model in ("m1", "m2")]
    for queue in queues:
        await fill(queue, *(entry(f"{queue.model}-{n}") for n in range(3)))
        await queue.complete(finished(await queue.lease("w", 3)))
    return queues[0], queues[1]


NAMES = [f"{model}-{n}" for model in ("m1", "m2") for n in range(3)]


async def test_outcomes_of_several_models_are_divided_among_settlers(
    client: Redis, two: tuple[Queue, Queue], namespace: str
) -> None:
    settlers = [Outcomes(client, ["m1", "m2"], namespace=namespace) for _ in range(2)]

    first = await settlers[0].read("s0", count=2)
    second = await settlers[1].read("s1")
    third = await settlers[1].read("s1", block_ms=10)

    assert len(first) == 4
    assert sorted(d.request_id for d in first + second) == NAMES
    assert {(d.model, d.status, d.outcome) for d in first} == {
        ("m1", "ok", b"outcome"),
        ("m2", "ok", b"outcome"),
    }
    assert third == []


async def test_acknowledged_outcomes_leave_nothing_behind(
    client: Redis, two: tuple[Queue, Queue], namespace: str
) -> None:
    outcomes = Outcomes(client, ["m1", "m2"], namespace=namespace)

    assert len(await settle_all(outcomes)) == 6

    for model in ("m1", "m2"):
        key = f"{namespace}:{{{model}}}:done"
        assert await client.xlen(key) == 0
        assert (await client.xpending(key, "ledger"))["pending"] == 0
        assert await client.ttl(key) > 0


async def test_outcomes_of_a_dead_settler_go_to_another(
    client: Redis, two: tuple[Queue, Queue], namespace: str
) -> None:
    dead = Outcomes(client, ["m1", "m2"], namespace=namespace)
    taken = await dead.read("dead")
    await dead.acknowledge(taken[:2])
    await asyncio.sleep(0.01)

    heir = Outcomes(client, ["m1", "m2"], namespace=namespace, claim_ms=5)

    assert sorted(d.request_id for d in await settle_all(heir)) == sorted(
        d.request_id for d in taken[2:]
    )
    assert await heir.read("heir", block_ms=10) == []


async def test_groups_are_created_again_after_a_wipe(client: Redis, namespace: str) -> None:
    outcomes = Outcomes(client, ["m1", "m2"], namespace=namespace)
    assert await outcomes.read("s", block_ms=1) == []
    await client.delete(*await client.keys(f"{namespace}:*"))

    queue = Queue(client, "m2", namespace=namespace)
    await fill(queue, entry("j1"))
    await queue.complete(finished(await queue.lease("w", 1)))

    assert await outcomes.read("s", block_ms=1) == []
    assert [d.request_id for d in await outcomes.read("s")] == ["j1"]


async def test_dead_settlers_without_pending_outcomes_are_removed(
    client: Redis, two: tuple[Queue, Queue], namespace: str
) -> None:
    outcomes = Outcomes(client, ["m1", "m2"], namespace=namespace)
    taken = await outcomes.read("dead")
    await outcomes.acknowledge([d for d in taken if d.model == "m1"])
    await asyncio.sleep(0.005)

    early = [await queue.remove_settlers(60_000) for queue in two]
    late = [await queue.remove_settlers(2) for queue in two]

    assert (early, late) == ([0, 0], [1, 0])
    assert await Queue(client, "m3", namespace=namespace).remove_settlers(0) == 0


async def test_no_models_mean_no_outcomes(client: Redis, namespace: str) -> None:
    assert await Outcomes(client, [], namespace=namespace).read("s") == []


# --- Workers and notifications --------------------------------------------------------------------


async def test_live_workers_are_listed(client: Redis, namespace: str) -> None:
    workers = Workers(client, namespace=namespace)
    one = Announcement("one", models=("m1",), unavailable={"m2": "no memory"}, bytes_total=8)
    assert await workers.list() == ()

    await workers.announce(Announcement("two", models=("m1", "m2")))
    await workers.announce(one)
    listed = await workers.list()
    await workers.withdraw("two")

    assert [each.worker for each in listed] == ["one", "two"]
    assert await workers.list() == (one,)


async def test_worker_without_announcements_counts_as_dead(client: Redis, namespace: str) -> None:
    workers = Workers(client, namespace=namespace)
    await workers.announce(Announcement("dead"))
    await client.delete(f"{namespace}:{{workers}}:dead")
    await workers.announce(Announcement("living"))

    assert [each.worker for each in await workers.list()] == ["living"]
    assert await client.smembers(f"{namespace}:{{workers}}") == {b"living"}


async def test_worker_is_notified_of_cancellations_and_new_mailboxes(
    client: Redis, queue: Queue, namespace: str
) -> None:
    received = asyncio.Event()

    async def listen() -> None:
        async for _ in notifications(client, "w", namespace=namespace):
            received.set()

    task = asyncio.create_task(listen())
    while not (await client.pubsub_numsub(f"{namespace}:control:w"))[0][1]:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await fill(queue, entry("j1"))
    await queue.lease("w", 1)
    assert not received.is_set()

    for act in (queue.cancel("j1"), queue.set_reply("j1", "box")):
        received.clear()
        await act
        await asyncio.wait_for(received.wait(), 30)
    task.cancel()
    await asyncio.wait([task])

"""The life cycle of a job, operation by operation, on both servers."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest
from redis.asyncio import Redis

from tests.contract.making import entry, fill, finished, ids, settle_all
from workers.contract.queue import CRASHES_MAX, RETRIES_MAX, Completion, Queue, QueueEntry
from workers.contract.streams import Outcomes

IN_AN_HOUR_MS = int(time.time() * 1000) + 3_600_000


@pytest.fixture
def outcomes(client: Redis, queue: Queue, namespace: str) -> Outcomes:
    return Outcomes(client, [queue.model], namespace=namespace)


async def test_a_job_is_enqueued_leased_and_completed_once(queue: Queue) -> None:
    answers = await fill(queue, entry("j1", reply="box", cost=2.5))
    [lease] = await queue.lease("w", 4)
    results = await queue.complete(finished([lease]))
    again = await queue.complete(finished([lease]))

    assert [(a.status, a.depth, a.cost) for a in answers] == [("ok", 1, 2.5)]
    assert (lease.id, lease.attempt, lease.account, lease.reply) == ("j1", 1, "a", "box")
    assert lease.payload == b"payload of j1"
    assert lease.queued_us > 0
    assert (results, again) == (["done"], ["already"])
    assert await queue.lease("w", 4) == []


async def test_outcome_is_delivered_as_the_worker_sent_it(queue: Queue, outcomes: Outcomes) -> None:
    await fill(queue, entry("j1", reply="box"))
    [lease] = await queue.lease("w", 1)

    await queue.complete([Completion("j1", lease.token, "failed", b"\x00why\xff")])

    [delivery] = await settle_all(outcomes)
    assert (delivery.model, delivery.request_id) == (queue.model, "j1")
    assert (delivery.status, delivery.attempt, delivery.outcome) == ("failed", 1, b"\x00why\xff")
    assert (delivery.reason, delivery.reply) == ("", "box")


async def test_note_comes_with_the_next_lease_however_the_last_one_ended(
    queue: Queue, client: Redis, namespace: str, outcomes: Outcomes
) -> None:
    await fill(queue, entry("j1"))
    [first] = await queue.lease("w1", 1)
    assert await queue.keep_note("j1", first.token, "one") == "kept"
    await queue.release_worker("w1", crashed=False)
    [second] = await queue.lease("w2", 1)
    assert await queue.keep_note("j1", first.token, "late") == "fenced"
    await queue.release_worker("w2", crashed=True)
    [third] = await queue.lease("w3", 1, nonce="n")
    [repeated] = await queue.lease("w3", 1, nonce="n")
    assert await queue.keep_note("j1", third.token, "two") == "kept"
    await queue.complete([Completion("j1", third.token, "retry")])
    [fourth] = await queue.lease("w4", 1)
    await queue.complete(finished([fourth]))

    assert [one.note for one in (first, second, third, repeated, fourth)] == [
        *("", "one", "one", "one", "two")
    ]
    assert await queue.keep_note("j1", fourth.token, "over") == "fenced"
    delivered = await settle_all(outcomes)
    assert [(each.status, each.outcome) for each in delivered] == [
        ("note", b"one"),
        ("note", b"two"),
        ("ok", b"outcome"),
    ]


async def test_note_of_a_job_that_the_server_lost_reaches_the_gateways(
    queue: Queue, outcomes: Outcomes
) -> None:
    """The note does not prevent the job from being enqueued again."""
    assert await queue.keep_note("j1", "token", "one") == "unknown"

    assert [each.status for each in await fill(queue, entry("j1"))] == ["ok"]
    [note] = await settle_all(outcomes)
    assert (note.request_id, note.status, note.outcome) == ("j1", "note", b"one")


async def test_a_job_is_enqueued_once_per_id_even_after_its_end(queue: Queue) -> None:
    await fill(queue, entry("j1"))
    queued = await fill(queue, entry("j1"))
    leases = await queue.lease("w", 1)
    running = await fill(queue, entry("j1"))
    await queue.complete(finished(leases))
    ended = await fill(queue, entry("j1"))

    assert [a.status for a in queued + running + ended] == ["duplicate"] * 3
    assert (await queue.load()).live == 0


async def test_a_full_queue_and_a_full_account_are_refused_one_by_one(queue: Queue) -> None:
    batch = [entry("a1"), entry("a2"), entry("a3"), entry("b1", "b"), entry("c1", "c")]

    answers = await queue.enqueue(batch, queue_max=3, account_max=2)

    assert [(a.status, a.depth) for a in answers] == [
        ("ok", 1),
        ("ok", 2),
        ("account_full", 2),
        ("ok", 3),
        ("queue_full", 3),
    ]


async def test_hundreds_of_jobs_are_enqueued_and_completed_in_one_call(queue: Queue) -> None:
    batch = [entry(f"j{n}", f"account{n % 7}") for n in range(300)]

    answers = await fill(queue, *batch)
    leases = [*await queue.lease("w", 200), *await queue.lease("w", 200)]
    results = await queue.complete(finished(leases))

    assert [answer.depth for answer in answers] == list(range(1, 301))
    assert sorted(ids(leases)) == sorted(e.id for e in batch)
    assert results == ["done"] * 300


async def test_a_repeated_lease_gives_the_same_answer(queue: Queue) -> None:
    await fill(queue, entry("j1"), entry("j2"), entry("j3"))

    first = await queue.lease("w", 2, nonce="n1")
    again = await queue.lease("w", 2, nonce="n1")
    await queue.complete(finished(first[:1]))
    rest = await queue.lease("w", 2, nonce="n1")
    other = await queue.lease("w", 2, nonce="n2")

    assert [(lease.id, lease.token) for lease in again] == [(x.id, x.token) for x in first]
    assert (ids(rest), ids(other)) == (["j2"], ["j3"])


async def test_third_crash_dead_letters_a_job(queue: Queue, outcomes: Outcomes) -> None:
    await fill(queue, entry("poison"), entry("other", cost=0.1))

    released = []
    for crash in range(CRASHES_MAX):
        [lease] = await queue.lease(f"w{crash}", 1)
        assert (lease.id, lease.attempt) == ("poison", crash + 1)
        released.append(await queue.release_worker(f"w{crash}", crashed=True))

    assert released == [1, 1, 1]
    [delivery] = await settle_all(outcomes)
    assert (delivery.request_id, delivery.status, delivery.attempt) == ("poison", "dead", 3)
    assert (delivery.outcome, delivery.reason) == (b"", "worker lost")
    assert ids(await queue.lease("w", 2)) == ["other"]


async def test_drain_is_not_a_crash_and_keeps_the_place_in_the_queue(queue: Queue) -> None:
    await fill(queue, entry("j1"), entry("j2"))

    for _ in range(CRASHES_MAX + 2):
        assert ids(await queue.lease("w", 1)) == ["j1"]
        assert await queue.release_worker("w", crashed=False) == 1

    assert await queue.release_worker("w", crashed=False) == 0
    assert ids(await queue.lease("w", 2)) == ["j1", "j2"]


async def test_expired_lease_is_reclaimed_and_its_worker_fenced(queue: Queue) -> None:
    await fill(queue, entry("j1"))
    [stale] = await queue.lease("w1", 1, lease_ms=1)
    await asyncio.sleep(0.005)

    reclaimed = await queue.reclaim()
    early = await queue.complete(finished([stale]))
    [lease] = await queue.lease("w2", 1)
    late = await queue.complete(finished([stale]))
    beat = await queue.heartbeat([("j1", stale.token)])

    assert (reclaimed.expired, reclaimed.due, reclaimed.overdue) == (1, 0, 0)
    assert (early, late, beat.lost) == (["fenced"], ["fenced"], ("j1",))
    assert lease.attempt == 2
    assert await queue.complete(finished([lease])) == ["done"]


async def test_heartbeat_renews_a_lease(queue: Queue) -> None:
    await fill(queue, entry("j1"))
    [lease] = await queue.lease("w", 1, lease_ms=1)

    beat = await queue.heartbeat([("j1", lease.token)])
    await asyncio.sleep(0.005)

    assert (beat.lost, beat.cancelled, beat.replies) == ((), {}, {})
    assert (await queue.reclaim()).expired == 0


async def test_retry_is_requeued_when_it_is_due(queue: Queue) -> None:
    await fill(queue, entry("j1"))
    [lease] = await queue.lease("w", 1)

    result = await queue.complete([Completion("j1", lease.token, "retry", retry_ms=1)])
    again = await queue.complete([Completion("j1", lease.token, "retry", retry_ms=1)])
    delayed = await queue.state("j1")
    await asyncio.sleep(0.005)
    reclaimed = await queue.reclaim()

    assert (result, again) == (["retrying"], ["already"])
    assert delayed is not None
    assert delayed.state == "delayed"
    assert reclaimed.due == 1
    [lease] = await queue.lease("w", 1)
    assert lease.attempt == 2


async def test_last_retry_ends_with_the_failure_of_the_worker(
    queue: Queue, outcomes: Outcomes
) -> None:
    await fill(queue, entry("j1"))

    for _ in range(RETRIES_MAX):
        [lease] = await queue.lease("w", 1)
        assert await queue.complete([Completion("j1", lease.token, "retry", b"busy")]) == [
            "retrying"
        ]
    [lease] = await queue.lease("w", 1)
    assert await queue.complete([Completion("j1", lease.token, "retry", b"busy")]) == ["done"]

    [delivery] = await settle_all(outcomes)
    assert (delivery.status, delivery.outcome) == ("failed", b"busy")


async def test_retry_beyond_the_deadline_fails_immediately(
    queue: Queue, outcomes: Outcomes
) -> None:
    await fill(queue, entry("j1", deadline_ms=IN_AN_HOUR_MS))
    [lease] = await queue.lease("w", 1)

    await queue.complete([Completion("j1", lease.token, "retry", b"busy", retry_ms=7_200_000)])

    [delivery] = await settle_all(outcomes)
    assert (delivery.status, delivery.outcome) == ("failed", b"busy")


async def test_a_queued_job_past_its_deadline_is_never_started(
    queue: Queue, outcomes: Outcomes
) -> None:
    await fill(queue, entry("reclaimed", deadline_ms=1))
    assert (await queue.reclaim()).overdue == 1
    await fill(queue, entry("passed over", deadline_ms=1), entry("wanted"))

    assert ids(await queue.lease("w", 2)) == ["wanted"]

    deliveries = await settle_all(outcomes)
    assert [(d.request_id, d.status, d.reason) for d in deliveries] == [
        ("reclaimed", "expired", "deadline"),
        ("passed over", "expired", "deadline"),
    ]


async def test_a_running_job_past_its_deadline_is_asked_to_stop(
    queue: Queue, outcomes: Outcomes
) -> None:
    deadline_ms = int(time.time() * 1000) + 500
    await fill(queue, *(entry(name, deadline_ms=deadline_ms) for name in ("heard", "unheard")))
    heard, unheard = await queue.lease("w", 2)

    overdue = 0
    while not overdue:
        await asyncio.sleep(0.05)
        overdue += (await queue.reclaim()).overdue
    overdue += (await queue.reclaim()).overdue
    beat = await queue.heartbeat([("heard", heard.token), ("unheard", unheard.token)])
    await queue.complete([Completion("heard", heard.token, "cancelled", b"part of it")])
    await queue.release_worker("w", crashed=True)

    assert overdue == 2
    assert beat.cancelled == {"heard": "deadline", "unheard": "deadline"}
    deliveries = await settle_all(outcomes)
    assert [(d.request_id, d.status, d.outcome, d.reason) for d in deliveries] == [
        ("heard", "cancelled", b"part of it", "deadline"),
        ("unheard", "expired", b"", "deadline"),
    ]


async def test_queued_job_is_cancelled_immediately(queue: Queue, outcomes: Outcomes) -> None:
    await fill(queue, entry("queued"), entry("delayed", "b"))
    [lease] = await queue.lease("w", 1)
    await queue.complete([Completion(lease.id, lease.token, "retry", retry_ms=60_000)])

    answers = [await queue.cancel(id) for id in ("queued", "delayed", "queued", "never")]

    assert answers == ["cancelled", "cancelled", "ended", "unknown"]
    deliveries = await settle_all(outcomes)
    assert [(d.request_id, d.status, d.reason) for d in deliveries] == [
        ("queued", "cancelled", "client"),
        ("delayed", "cancelled", "client"),
    ]
    assert (await queue.load()).live == 0


async def test_job_cancelled_before_it_is_enqueued_is_barred(queue: Queue) -> None:
    assert [await queue.cancel("late"), await queue.cancel("late")] == ["unknown", "unknown"]

    [answer] = await fill(queue, entry("late"))

    assert answer.status == "duplicate"
    assert await queue.missing(["late", "other"]) == ["other"]
    assert await queue.state("late") is None
    assert await queue.lease("w", 1) == []


async def test_a_running_job_is_cancelled_through_its_worker(
    queue: Queue, outcomes: Outcomes
) -> None:
    await fill(queue, entry("j1"), entry("j2"))
    leases = await queue.lease("w", 2)

    answers = [await queue.cancel("j1", "operator"), await queue.cancel("j1", "client")]
    beat = await queue.heartbeat([(lease.id, lease.token) for lease in leases])
    await queue.release_worker("w", crashed=True)

    assert answers == ["cancelling", "cancelling"]
    assert beat.cancelled == {"j1": "operator"}
    [delivery] = await settle_all(outcomes)
    assert (delivery.request_id, delivery.status, delivery.reason) == (
        "j1",
        "cancelled",
        "operator",
    )
    assert ids(await queue.lease("w", 2)) == ["j2"]


async def test_work_finished_before_the_cancellation_arrived_counts(
    queue: Queue, outcomes: Outcomes
) -> None:
    await fill(queue, entry("j1"))
    leases = await queue.lease("w", 1)
    await queue.cancel("j1")

    assert await queue.complete(finished(leases)) == ["done"]

    [delivery] = await settle_all(outcomes)
    assert (delivery.status, delivery.outcome) == ("ok", b"outcome")


async def test_worker_learns_of_a_new_mailbox_until_the_job_ends(queue: Queue) -> None:
    await fill(queue, entry("j1", reply="old"))
    [lease] = await queue.lease("w", 1)
    leased = [("j1", lease.token)]

    before = await queue.heartbeat(leased)
    moved = await queue.set_reply("j1", "new")
    beats = [await queue.heartbeat(leased), await queue.heartbeat(leased)]
    await queue.release_worker("w", crashed=False)
    [lease] = await queue.lease("w", 1)
    changes = await queue.heartbeat([("j1", lease.token)])
    await queue.complete(finished([lease]))

    assert (before.replies, moved) == ({}, True)
    assert [beat.replies for beat in beats] == [{"j1": "new"}] * 2
    assert (lease.reply, changes.replies) == ("new", {})
    assert await queue.set_reply("j1", "newer") is False


async def test_state_contains_status_and_position_of_a_job(queue: Queue) -> None:
    await fill(queue, entry("a1"), entry("a2"), entry("a3"), entry("b1", "b"), entry("b2", "b"))
    [lease] = await queue.lease("w", 1)
    await queue.cancel("a1")

    running, waiting = await queue.state("a1"), await queue.state("a3")
    await queue.complete([Completion("a1", lease.token, "cancelled", b"")])
    ended = await queue.state("a1")

    assert await queue.state("never") is None
    assert running is not None
    assert (running.state, running.attempt, running.worker) == ("running", 1, "w")
    assert (running.position, running.cancel) == (0, "client")
    assert 0 < running.enqueued_ms <= running.started_ms
    assert waiting is not None
    assert (waiting.state, waiting.attempt, waiting.position) == ("queued", 0, 4)
    assert (waiting.started_ms, waiting.ended_ms) == (0, 0)
    assert ended is not None
    assert (ended.state, ended.worker) == ("cancelled", "w")
    assert ended.ended_ms >= ended.started_ms


async def test_load_estimates_the_waiting_time(queue: Queue) -> None:
    await fill(queue, *(entry(f"j{n}", cost=0.001) for n in range(4)))
    leases = await queue.lease("w", 3)
    await asyncio.sleep(0.02)
    await queue.complete(finished(leases[:1]))

    load = await queue.load()

    assert (load.depth, load.cost, load.running, load.live) == (1, 0.001, 2, 3)
    assert load.service_s >= 0.02
    assert load.pace == pytest.approx(load.service_s / 0.001, rel=0.01)
    assert load.seconds(load.cost) == pytest.approx(0.001 * load.pace / 2)
    assert load.oldest_ms >= 20


async def test_an_ended_job_keeps_no_payload(queue: Queue, client: Redis, namespace: str) -> None:
    large = QueueEntry(id="j1", account="a", payload=b"x" * 50_000, cost=1.0)
    await fill(queue, large)
    await queue.complete(finished(await queue.lease("w", 1)))

    used = await client.memory_usage(f"{namespace}:{{{queue.model}}}:job:j1")
    assert used is not None
    assert used < 1000


async def test_a_weight_must_be_positive(queue: Queue) -> None:
    with pytest.raises(ValueError, match="weight"):
        await fill(queue, entry("j1", weight=0.0))


async def test_only_unknown_jobs_are_missing(queue: Queue) -> None:
    await fill(queue, entry("j1"))

    assert await queue.missing(["j1", "j2"]) == ["j2"]
    assert await queue.missing([]) == []


async def test_forgotten_jobs_leave_nothing_behind(
    queue: Queue, client: Redis, namespace: str
) -> None:
    await fill(queue, entry("running", "b"), entry("delayed", "c"))
    leases = await queue.lease("w", 2, lease_ms=1)
    await queue.complete([Completion("delayed", leases[1].token, "retry", retry_ms=1)])
    await fill(queue, entry("other", "b"))
    await fill(queue, *(entry(name, deadline_ms=IN_AN_HOUR_MS) for name in ("queued", "later")))
    prefix = f"{namespace}:{{{queue.model}}}"
    await client.delete(*(f"{prefix}:job:{name}" for name in ("queued", "running", "delayed")))
    await asyncio.sleep(0.005)

    await queue.reclaim()
    await queue.reclaim()
    leases = await queue.lease("w", 10)
    await queue.complete(finished(leases))
    given_back = await queue.release_worker("w", crashed=False)

    assert (sorted(ids(leases)), given_back) == (["later", "other"], 0)
    load = await queue.load()
    assert (load.depth, load.cost, load.running, load.live) == (0, 0.0, 0, 0)
    keys = cast(list[bytes], await client.keys(f"{prefix}:*"))
    left = {key.decode().removeprefix(f"{prefix}:") for key in keys}
    assert {name for name in left if not name.startswith(("job:", "answer:"))} <= {
        *("counters", "done", "finish", "wake"),
    }


async def test_finish_tags_of_idle_accounts_are_dropped(
    queue: Queue, client: Redis, namespace: str
) -> None:
    await fill(queue, *(entry(f"j{n}", f"account{n}") for n in range(50)))
    await queue.complete(finished(await queue.lease("w", 50)))
    await fill(queue, entry("last"), entry("very last"))
    await queue.complete(finished(await queue.lease("w", 2)))

    await queue.reclaim()

    assert await client.zcard(f"{namespace}:{{{queue.model}}}:finish") == 1


async def test_lease_that_meets_expired_jobs_leaves_no_account_behind(
    queue: Queue, client: Redis, namespace: str
) -> None:
    await fill(
        queue,
        entry("late", deadline_ms=1),
        entry("in time"),
        entry("late too", deadline_ms=1),
    )

    assert ids(await queue.lease("w", 3)) == ["in time"]

    assert not await client.exists(f"{namespace}:{{{queue.model}}}:accounts")
    assert (await queue.load()).depth == 0

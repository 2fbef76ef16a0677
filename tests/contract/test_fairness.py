"""Fair order: shares by cost and weight, share limits, batches."""

from __future__ import annotations

from collections import Counter
from itertools import cycle

from tests.contract.making import entry, fill, finished, ids
from workers.contract.queue import Queue


async def serve(queue: Queue, count: int) -> list[str]:
    """Lease and complete jobs one by one. Return the account of each."""
    order = []
    for _ in range(count):
        [lease] = await queue.lease("w", 1)
        await queue.complete(finished([lease]))
        order.append(lease.account)
    return order


async def test_accounts_share_by_weight_however_many_jobs_they_send(queue: Queue) -> None:
    await fill(queue, *(entry(f"a{n}", "a", cost=3.0) for n in range(500)))
    await serve(queue, 10)
    await fill(queue, *(entry(f"b{n}", "b", cost=3.0) for n in range(100)))
    await fill(queue, *(entry(f"c{n}", "c", cost=3.0, weight=3.0) for n in range(100)))

    order = await serve(queue, 100)

    assert Counter(order) == {"a": 20, "b": 20, "c": 60}
    for start in range(0, 100, 5):
        assert Counter(order[start : start + 5]) == {"a": 1, "b": 1, "c": 3}


async def test_shares_are_of_device_time_not_of_jobs(queue: Queue) -> None:
    await fill(queue, *(entry(f"long{n}", "long", cost=4.0) for n in range(50)))
    await fill(queue, *(entry(f"short{n}", "short", cost=0.5) for n in range(50)))

    assert Counter(await serve(queue, 45)) == {"long": 5, "short": 40}


async def test_shares_hold_for_batches_too(queue: Queue) -> None:
    for account, weight in (("a", 1.0), ("b", 1.0), ("c", 3.0)):
        await fill(queue, *(entry(f"{account}{n}", account, weight=weight) for n in range(60)))

    leases = await queue.lease("w", 50)

    assert Counter(lease.account for lease in leases) == {"a": 10, "b": 10, "c": 30}


async def test_idle_accounts_do_not_accumulate_credit(queue: Queue) -> None:
    await fill(queue, entry("b0", "b"))
    await fill(queue, *(entry(f"a{n}", "a") for n in range(100)))
    await serve(queue, 50)
    await fill(queue, *(entry(f"b{n}", "b") for n in range(1, 50)))

    assert Counter(await serve(queue, 20)) == {"a": 10, "b": 10}


async def test_account_alone_can_use_every_slot(queue: Queue) -> None:
    await fill(queue, *(entry(f"a{n}", "a") for n in range(12)))

    first = await queue.lease("w1", 4, account_share=0.5)
    second = await queue.lease("w2", 4, account_share=0.5)

    assert len(first) == len(second) == 4


async def test_account_at_its_share_is_skipped_while_another_one_waits(
    queue: Queue,
) -> None:
    # By cost alone, the first account would be served every time.
    await fill(queue, *(entry(f"a{n}", "a", cost=0.01) for n in range(20)))
    first = await queue.lease("w", 8, account_share=0.5)
    await fill(queue, *(entry(f"b{n}", "b", cost=50.0) for n in range(6)))

    later = []
    for lease in first:
        await queue.complete(finished([lease]))
        later += await queue.lease("w", 1, account_share=0.5)

    assert Counter(lease.account for lease in first) == {"a": 8}
    assert Counter(lease.account for lease in later) == {"b": 4, "a": 4}
    assert [lease.account for lease in later[:4]] == ["b"] * 4


async def test_slots_that_no_other_account_needs_are_not_kept_free(queue: Queue) -> None:
    await fill(queue, *(entry(f"a{n}", "a") for n in range(10)), entry("b0", "b"))

    leases = await queue.lease("w", 8, account_share=0.25)

    assert Counter(lease.account for lease in leases) == {"a": 7, "b": 1}


async def test_flow_of_lower_weight_does_not_overtake_an_account_at_its_share(
    queue: Queue,
) -> None:
    await fill(queue, *(entry(f"a{n}", "a", cost=1.0) for n in range(60)))
    first = await queue.lease("w", 8, account_share=0.5)
    await fill(queue, *(entry(f"b{n}", "b", cost=1.0, weight=0.1) for n in range(60)))

    later = []
    for lease in first * 5:
        await queue.complete(finished([lease]))
        taken = await queue.lease("w", 1, account_share=0.5)
        first.extend(taken)
        later += taken

    assert Counter(lease.account for lease in later)["b"] <= 6


async def test_load_contains_the_backlog_of_each_account(queue: Queue) -> None:
    await fill(queue, entry("a0", "a", cost=1.0), entry("a1", "a", cost=2.5), entry("b0", "b"))
    before = await queue.load()
    [lease] = await queue.lease("w", 1)
    await queue.cancel("b0")
    after = await queue.load()

    assert (before.accounts, before.backlogs["a"]) == (2, 3.5)
    assert (lease.id, after.accounts, after.backlogs) == ("a0", 1, {"a": 2.5})


async def test_leased_batch_has_one_key_and_is_still_fair(queue: Queue) -> None:
    kinds = cycle(["512", "1024"])
    for n in range(16):
        kind = next(kinds)
        await fill(queue, *(entry(f"{a}{n}", a, batch_key=kind) for a in ("a", "b")))

    batches = [await queue.lease("w", 8) for _ in range(4)]

    assert [len(batch) for batch in batches] == [8, 8, 8, 8]
    for batch in batches:
        assert len({int(lease.id[1:]) % 2 for lease in batch}) == 1
        assert Counter(lease.account for lease in batch) == {"a": 4, "b": 4}


async def test_long_queue_is_leased_in_order_and_nothing_is_left_behind(queue: Queue) -> None:
    kinds = ["x", "y"] * 40
    await fill(queue, *(entry(f"j{n:02}", batch_key=kind) for n, kind in enumerate(kinds)))
    await fill(queue, entry("late", "b", batch_key="x", cost=100.0))

    first = await queue.lease("w", 64)
    again = await queue.lease("w2", 64)
    rest = [lease for _ in range(3) for lease in await queue.lease("w3", 64)]

    # The skipped jobs fill the places that are looked at.
    assert ids(first) == ["j00", "late", *(f"j{n:02}" for n in range(2, 32, 2))]
    assert ids(again)[:16] == [f"j{n:02}" for n in range(1, 33, 2)]
    leased = [*first, *again, *rest]
    assert sorted(ids(leased)) == [*(f"j{n:02}" for n in range(80)), "late"]
    assert (await queue.load()).depth == 0


async def test_look_ahead_is_limited(queue: Queue) -> None:
    others = (entry(f"other{n}", batch_key="y") for n in range(3))
    await fill(queue, entry("x0", batch_key="x"), *others, entry("x1", batch_key="x"))

    near = await queue.lease("w", 2, look_ahead=3)
    await queue.release_worker("w", crashed=False)
    far = await queue.lease("w", 2, look_ahead=4)

    assert (ids(near), ids(far)) == (["x0"], ["x0", "x1"])

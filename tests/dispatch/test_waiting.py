"""The waiting time of an account's next job, by arithmetic."""

from __future__ import annotations

import random

import pytest

from gateway.dispatch.waiting import Waiting
from workers.contract.load import Load


def load(backlogs: dict[str, float], *, depth: int, accounts: int | None = None) -> Load:
    return Load(
        depth=depth,
        cost=sum(backlogs.values()),
        running=2,
        delayed=0,
        live=depth + 2,
        oldest_ms=0,
        pace=1.5,
        service_s=1.0,
        accounts=len(backlogs) if accounts is None else accounts,
        backlogs=backlogs,
    )


def weight(flow: str) -> float:
    return 0.1 if flow.endswith(":batch") else 1.0


def test_long_queue_of_one_account_is_short_for_another() -> None:
    waiting = Waiting(load({"flood": 1000.0}, depth=100), weight)

    assert waiting.seconds("flood") == 1000 * 1.5 / 2
    assert waiting.seconds("other") == 10 * 1.5 / 2


def test_account_waits_for_its_own_backlog_and_as_much_of_each_other() -> None:
    found = Waiting(load({"a": 20.0, "b": 100.0, "c": 5.0}, depth=125), weight)

    # 20 of its own, 20 and a turn of the second, all of the third.
    assert found.seconds("a") == pytest.approx((20 + 21 + 5) * 1.5 / 2)


def test_batches_delay_little_and_wait_long() -> None:
    found = Waiting(load({"a": 20.0, "b:batch": 400.0}, depth=420), weight)

    assert found.seconds("a") == pytest.approx((20 + 2 + 1) * 1.5 / 2)
    assert found.seconds("b:batch") == pytest.approx((400 + 20) * 1.5 / 2)


def test_empty_queue_means_no_wait() -> None:
    assert Waiting(load({}, depth=0), weight).seconds("a") == 0.0


def test_accounts_without_a_known_backlog_count_one_turn_each() -> None:
    many = Load(
        depth=5000, cost=10_000.0, running=2, delayed=0, live=5000, oldest_ms=0, pace=1.0,
        service_s=1.0, accounts=5000, backlogs={},
    )  # fmt: skip

    assert Waiting(many, weight).seconds("a") == 10_000 / 2


def test_estimate_equals_the_time_of_serving_in_turn() -> None:
    choose = random.Random(7)
    for _ in range(50):
        cost = choose.choice([0.5, 1.0, 3.0])
        jobs = {f"a{n}": choose.randint(1, 40) for n in range(choose.randint(1, 8))}
        found = Waiting(
            load({name: cost * n for name, n in jobs.items()}, depth=sum(jobs.values())), weight
        )
        for name, own in jobs.items():
            # Round by round, the other accounts first, until its own jobs are done.
            left = dict(jobs)
            served = 0
            for _ in range(own + 1):
                for other in sorted(left, key=lambda each: each == name):
                    if left[other] and (other != name or served >= 0):
                        left[other] -= 1
                        served += 1
            assert found.seconds(name) == pytest.approx(served * cost * 1.5 / 2)

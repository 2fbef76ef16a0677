from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator

import pytest

from gateway.accounts.limits import Limit
from gateway.accounts.rates import (
    Rate,
    RateReservation,
    Rates,
    UnusedRates,
    refuse_overrun,
    refuse_oversized,
    wanted,
)
from gateway.errors import TooManyRequests, Unavailable
from workers.contract.redis import connect

ACCOUNT = 7
KEY = 70


@contextlib.asynccontextmanager
async def gateways(url: str, count: int, *, window_s: int = 60) -> AsyncIterator[list[Rates]]:
    """Two gateways with separate connections and the same namespace."""
    namespace = f"t{secrets.token_hex(6)}"
    clients = [connect(url) for _ in range(count)]
    try:
        yield [Rates(client, namespace=namespace, window_s=window_s) for client in clients]
    finally:
        for client in clients:
            await client.aclose()


def requests(per_minute: int, *, key: int | None = KEY, model: str | None = None) -> Limit:
    return Limit(ACCOUNT, key, model, requests_per_minute=per_minute)


def tokens(per_minute: int, *, key: int | None = KEY, model: str | None = None) -> Limit:
    return Limit(ACCOUNT, key, model, tokens_per_minute=per_minute)


def rates(*limits: Limit, key: int = KEY, model: str = "echo", most: int = 0) -> tuple[Rate, ...]:
    return wanted(limits, key, model, tokens=most)


def refused(taken: RateReservation) -> bool:
    return any(usage.wait_s for usage in taken.usages)


def remaining(taken: RateReservation) -> list[int]:
    return [usage.remaining for usage in taken.usages]


@pytest.mark.parametrize("limit", [1, 50, 199])
async def test_a_burst_over_two_gateways_passes_exactly_the_limit(
    server_url: str, limit: int
) -> None:
    async with gateways(server_url, 2) as both:
        answers = await asyncio.gather(
            *(both[n % 2].take(rates(requests(limit))) for n in range(200))
        )

    assert sum(not refused(taken) for taken in answers) == limit
    assert sorted(remaining(taken)[0] for taken in answers if not refused(taken)) == [*range(limit)]


async def test_request_refused_by_one_limit_counts_against_none(server_url: str) -> None:
    async with gateways(server_url, 1) as (gateway,):
        both = (requests(10), tokens(100))
        await gateway.take(rates(*both, most=60))

        answer = await gateway.take(rates(*both, most=60))
        fitting = await gateway.take(rates(*both, most=40))

    assert refused(answer)
    assert remaining(answer) == [9, 40]
    assert not refused(fitting)
    assert remaining(fitting) == [8, 0]


async def test_limits_of_account_key_and_model_are_taken_together(server_url: str) -> None:
    limits = (
        requests(3, key=None),
        requests(2, key=KEY),
        requests(1, key=None, model="large"),
        requests(2, key=KEY + 1, model="large"),
    )
    async with gateways(server_url, 1) as (gateway,):
        calls = [
            (KEY, "large", False),
            (KEY + 1, "large", True),  # the model's limit holds for all keys
            (KEY, "echo", False),
            (KEY, "echo", True),  # the key's
            (KEY + 1, "echo", False),
            (KEY + 1, "echo", True),  # the account's
        ]
        for key, model, expected in calls:
            assert refused(await gateway.take(rates(*limits, key=key, model=model))) is expected


async def test_refused_request_returns_what_it_reserved(server_url: str) -> None:
    async with gateways(server_url, 2) as both:
        taken = await both[0].take(rates(requests(1), tokens(100), most=100))
        assert [usage.remaining for usage in taken.usages_undone()] == [1, 100]

        await both[1].undo(taken)

        assert not refused(await both[0].take(rates(requests(1), tokens(100), most=100)))


async def test_unused_tokens_are_returned_when_the_request_ends(
    server_url: str,
) -> None:
    async with gateways(server_url, 2) as both:
        limits = (requests(10), tokens(100), tokens(150, key=None))
        taken = await both[0].take(rates(*limits, most=100))

        await both[1].return_unused([UnusedRates(taken.note, requests=0, tokens=70)])

        read = await both[0].look(rates(*limits))
        assert [usage.used for usage in read] == [1, 30, 30]


async def test_returning_more_than_was_counted_stops_at_zero(
    server_url: str,
) -> None:
    async with gateways(server_url, 1) as (gateway,):
        taken = await gateway.take(rates(tokens(100), most=10))

        await gateway.return_unused([UnusedRates(taken.note, requests=0, tokens=70)] * 2)

        read = await gateway.look(rates(tokens(100)))
        assert [usage.used for usage in read] == [0]


async def test_the_window_slides(server_url: str) -> None:
    async with gateways(server_url, 1, window_s=2) as (gateway,):
        passed: list[tuple[float, float]] = []
        until = time.monotonic() + 7
        while (asked := time.monotonic()) < until:
            if not refused(await gateway.take(rates(requests(4)))):
                passed.append((asked, time.monotonic()))
            await asyncio.sleep(random.uniform(0.01, 0.05))

    # Never more than the limit in any interval of a window, and no unnecessary waiting.
    assert len(passed) >= 8
    for (asked, _), (_, answered) in zip(passed, passed[4:], strict=False):
        assert answered - asked >= 2


async def test_wait_in_a_refusal_is_sufficient_and_at_most_the_window(
    server_url: str,
) -> None:
    async with gateways(server_url, 1, window_s=2) as (gateway,):
        limit = rates(tokens(100), most=100)
        assert not refused(await gateway.take(limit))
        answer = await gateway.take(limit)

        assert 1 <= answer.usages[0].wait_s <= 2
        await asyncio.sleep(answer.usages[0].wait_s + 1)
        assert not refused(await gateway.take(limit))


async def test_looking_counts_nothing(server_url: str) -> None:
    async with gateways(server_url, 1) as (gateway,):
        limits = rates(requests(5), tokens(100), most=10)
        assert [usage.reset_s for usage in await gateway.look(limits)] == [0, 0]
        await gateway.take(limits)

        for _ in range(3):
            read = await gateway.look(limits)

        assert [(usage.remaining, usage.reset_s) for usage in read] == [(4, 60), (90, 60)]


async def test_a_refusal_names_the_limit_the_amount_and_the_wait(server_url: str) -> None:
    async with gateways(server_url, 1) as (gateway,):
        limits = rates(requests(1, key=None, model="echo"))
        await gateway.take(limits)
        answer = await gateway.take(limits)

    with pytest.raises(
        TooManyRequests, match="This account, for echo, is limited to 1 requests per minute"
    ) as caught:
        refuse_overrun(answer.usages)
    assert caught.value.retry_after_s == 60
    assert caught.value.headers["X-Should-Retry"] == "true"


def test_request_larger_than_a_limit_must_not_be_retried() -> None:
    with pytest.raises(TooManyRequests, match="it can never be accepted") as caught:
        refuse_oversized(rates(tokens(100), most=101))

    assert caught.value.headers["X-Should-Retry"] == "false"
    assert caught.value.retry_after_s is None


async def test_outage_of_the_server_refuses_requests() -> None:
    async with gateways("unix:///nowhere/at/all", 1) as (gateway,):
        assert not (await gateway.take(())).usages
        with pytest.raises(Unavailable):
            await gateway.take(rates(requests(5)))
        await gateway.return_unused([UnusedRates('[1,["x:tokens"]]', requests=0, tokens=5)])

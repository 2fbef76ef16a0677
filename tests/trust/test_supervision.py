"""The supervisor alone: a failed loop runs again, and repeated failures end the process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from gateway import supervision
from gateway.supervision import Beat, Supervisor, next_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("PAUSE_MIN_S", 0.01),
        ("PAUSE_MAX_S", 0.02),
        ("CHECK_EVERY_S", 0.01),
        ("IDLE_BEAT_S", 0.01),
    ):
        monkeypatch.setattr(supervision, name, value)


@pytest.fixture
def ended() -> list[float]:
    return []


def make(ended: list[float], *, silence_max_s: float = 60, failures_max: int = 3) -> Supervisor:
    return Supervisor(
        failures_max=failures_max, silence_max_s=silence_max_s, grace_s=0, end=ended.append
    )


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # what a thread changes too
            await asyncio.sleep(0.01)


async def until(condition: asyncio.Event) -> None:
    async with asyncio.timeout(30):
        await condition.wait()


async def test_a_loop_that_fails_runs_again(ended: list[float]) -> None:
    rounds, recovered = 0, asyncio.Event()

    async def work(beat: Beat) -> None:
        nonlocal rounds
        rounds += 1
        if rounds < 3:
            raise KeyError("a row that was not foreseen")
        beat()
        recovered.set()
        await asyncio.Event().wait()

    supervisor = make(ended)
    async with supervisor.running():
        supervisor.start("settler", work)
        await until(recovered)

    assert ended == []
    assert supervisor.failed is None


async def test_a_loop_that_fails_while_it_is_stopped_does_not_run_again(ended: list[float]) -> None:
    rounds, started = 0, asyncio.Event()

    async def work(beat: Beat) -> None:
        nonlocal rounds
        rounds += 1
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            # As releasing a lease does if the database is slow.
            raise TimeoutError

    supervisor = make(ended)
    async with asyncio.timeout(30), supervisor.running():
        supervisor.start("sweeper", work)
        await started.wait()

    assert rounds == 1
    assert (ended, supervisor.failed) == ([], None)


async def test_failures_with_beats_between_them_do_not_end_the_process(ended: list[float]) -> None:
    rounds, done = 0, asyncio.Event()

    async def work(beat: Beat) -> None:
        nonlocal rounds
        rounds += 1
        beat()
        if rounds == 10:
            done.set()
        raise KeyError("after each round")

    supervisor = make(ended)
    async with supervisor.running():
        supervisor.start("settler", work)
        await until(done)

    assert ended == []


async def test_repeatedly_failing_loop_ends_the_process(ended: list[float]) -> None:
    async def work(beat: Beat) -> None:
        raise KeyError("every time")

    supervisor = make(ended)
    async with supervisor.running():
        supervisor.start("settler", work)
        await wait_until(lambda: ended)

    assert "settler failed 3 times" in (supervisor.failed or "")


async def test_a_loop_that_returns_counts_as_failed(ended: list[float]) -> None:
    async def work(beat: Beat) -> None:
        return

    supervisor = make(ended)
    async with supervisor.running():
        supervisor.start("sweeper", work)
        await wait_until(lambda: ended)


async def test_a_loop_survives_the_cancellation_of_what_it_awaits(ended: list[float]) -> None:
    rounds, recovered = 0, asyncio.Event()

    async def work(beat: Beat) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            gone.cancel()
            await gone
        beat()
        recovered.set()
        await asyncio.Event().wait()

    supervisor = make(ended)
    async with supervisor.running():
        supervisor.start("settler", work)
        await until(recovered)

    assert ended == []


async def test_a_task_that_is_cancelled_from_outside_ends_the_process(ended: list[float]) -> None:
    async def work(beat: Beat) -> None:
        beat()
        await asyncio.Event().wait()

    supervisor = make(ended)
    async with supervisor.running():
        supervisor.start("settler", work)
        await asyncio.sleep(0)
        next(iter(supervisor._tasks)).cancel()
        await wait_until(lambda: ended)


async def test_a_lifespan_that_fails_after_its_start_ends_the_process(ended: list[float]) -> None:
    supervisor = make(ended)

    with contextlib.suppress(LookupError):
        async with supervisor.running():
            raise LookupError("of the application")

    assert len(ended) == 1


async def test_a_silent_loop_is_late_and_then_ends_the_process(ended: list[float]) -> None:
    async def work(beat: Beat) -> None:
        beat()
        await asyncio.Event().wait()

    supervisor = make(ended, silence_max_s=0.05)
    async with supervisor.running():
        supervisor.start("prices", work)
        assert supervisor.late() == {}
        await wait_until(supervisor.late)
        await wait_until(lambda: ended)

    assert list(supervisor.late()) == ["prices"]


async def test_a_loop_with_nothing_to_do_beats(ended: list[float]) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    taken: list[int] = []

    async def work(beat: Beat) -> None:
        while True:
            taken.append(await next_of(queue, beat))

    supervisor = make(ended, silence_max_s=0.5)
    async with supervisor.running():
        supervisor.start("workflows", work)
        await asyncio.sleep(0.8)
        assert supervisor.late() == {}
        queue.put_nowait(7)
        await asyncio.sleep(0.05)

    assert taken == [7]
    assert ended == []

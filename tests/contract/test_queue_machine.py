"""Any sequence of operations, on real servers, against a reference of the queue in plain Python.

After every operation, all data on the server is compared with the reference: no job is lost or in
two places, counters are correct, every key has a time to live.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from tests.contract.reference import Job, Reference
from workers.contract.queue import Completion, Queue, QueueEntry
from workers.contract.redis import connect

ACCOUNTS = ("ann", "bob", "cy")
WORKERS = ("w1", "w2")
FAR_MS = 4_000_000_000_000
LONG_MS = 600_000
RECENT = st.integers(-6, 0)
"""Index counted back from the last enqueued job, so that operations meet the same few jobs."""

_numbers = itertools.count()

entries = st.builds(
    QueueEntry,
    id=st.just(""),
    account=st.sampled_from(ACCOUNTS),
    payload=st.binary(max_size=4),
    cost=st.sampled_from([0.0, 0.01, 0.3, 1.0, 7.5]),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    deadline_ms=st.sampled_from([0, 0, FAR_MS, 1]),
    batch_key=st.sampled_from(["", "x"]),
    reply=st.sampled_from(["", "box"]),
)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self, runner: asyncio.Runner, client: Redis) -> None:
        super().__init__()
        self.runner = runner
        self.client = client
        self.namespace = f"machine-{next(_numbers)}"
        self.queue = Queue(client, "m", namespace=self.namespace)
        self.model = Reference()
        self.tokens: list[tuple[str, str]] = []
        """All leases so far, as (id, token)."""
        self.nonces: dict[str, tuple[str, int, float]] = {}

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    # --- Operations -------------------------------------------------------------------------------

    def id(self, back: int) -> str:
        return f"j{self.model.arrivals + back}"

    @initialize(batch=st.lists(entries, min_size=3, max_size=8))
    def fill(self, batch: list[QueueEntry]) -> None:
        self.enqueue(batch, 1000, 1000, 0)

    @rule(
        batch=st.lists(entries, min_size=1, max_size=4),
        queue_max=st.sampled_from([1000, 1000, 4]),
        account_max=st.sampled_from([1000, 1000, 2]),
        back=st.sampled_from([0, 0, 0, -1, -3]),
    )
    def enqueue(self, batch: list[QueueEntry], queue_max: int, account_max: int, back: int) -> None:
        batch = [
            msgspec.structs.replace(entry, id=self.id(back + number))
            for number, entry in enumerate(batch, start=1)
        ]
        expected = [
            self.model.enqueue(_job(entry), queue_max=queue_max, account_max=account_max)
            for entry in batch
        ]

        answers = self.run(self.queue.enqueue(batch, queue_max=queue_max, account_max=account_max))

        assert [answer.status for answer in answers] == expected
        assert answers[-1].depth == len(self.model.waiting())
        assert answers[-1].cost == sum(job.cost_us for job in self.model.waiting()) / 1e6

    @rule(
        worker=st.sampled_from(WORKERS),
        count=st.integers(1, 5),
        share=st.sampled_from([1.0, 1.0, 0.01, 0.34, 0.5]),
        look=st.sampled_from([16, 1, 2]),
        lapses=st.booleans(),
    )
    def lease(self, worker: str, count: int, share: float, look: int, lapses: bool) -> None:
        nonce = f"nonce{next(_numbers)}"
        self.nonces[worker] = (nonce, count, share)
        self._lease(worker, count, share, look, nonce, lapses)

    @precondition(lambda self: self.nonces)
    @rule(data=st.data(), lapses=st.booleans())
    def lease_again(self, data: st.DataObject, lapses: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.nonces)))
        nonce, count, share = self.nonces[worker]
        self._lease(worker, count, share, 16, nonce, lapses)

    def _lease(
        self, worker: str, count: int, share: float, look: int, nonce: str, lapses: bool
    ) -> None:
        expected = self.model.lease(
            worker, count, share=share, look=look, nonce=nonce, lapses=lapses
        )

        leases = self.run(
            self.queue.lease(
                worker,
                count,
                lease_ms=1 if lapses else LONG_MS,
                account_share=share,
                look_ahead=look,
                nonce=nonce,
            )
        )

        assert [
            (lease.id, lease.token, lease.attempt, lease.account, lease.reply, lease.payload)
            for lease in leases
        ] == [
            (job.id, job.token, job.attempt, job.account, job.reply, job.payload)
            for job in expected
        ]
        assert len({job.batch_key for job in expected}) <= 1
        assert all(lease.queued_us >= 0 for lease in leases)
        self.tokens += [(lease.id, lease.token) for lease in leases]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), lapses=st.booleans())
    def heartbeat(self, data: st.DataObject, lapses: bool) -> None:
        leased = data.draw(st.lists(st.sampled_from(self.tokens), unique_by=lambda pair: pair[0]))
        expected = self.model.heartbeat(leased, lapses=lapses)

        beat = self.run(self.queue.heartbeat(leased, lease_ms=1 if lapses else LONG_MS))

        assert (set(beat.lost), beat.cancelled, beat.replies) == expected

    @precondition(lambda self: self.tokens)
    @rule(
        data=st.data(),
        status=st.sampled_from(["ok", "ok", "failed", "cancelled", "retry", "retry"]),
        delay=st.sampled_from(["none", "short", "long"]),
    )
    def complete(
        self,
        data: st.DataObject,
        status: Literal["ok", "failed", "cancelled", "retry"],
        delay: str,
    ) -> None:
        pairs = data.draw(st.lists(st.sampled_from(self.tokens[-12:]), min_size=1, max_size=4))
        retry_ms = {"none": 0, "short": 1, "long": FAR_MS}[delay]
        expected = [
            self.model.complete(id, token, status, b"result", delay=delay) for id, token in pairs
        ]

        results = self.run(
            self.queue.complete(
                [Completion(id, token, status, b"result", retry_ms) for id, token in pairs]
            )
        )

        assert results == expected

    @rule(status=st.sampled_from(["ok", "failed", "cancelled", "retry"]), number=st.integers(0, 3))
    def complete_what_was_lost(
        self, status: Literal["ok", "failed", "cancelled", "retry"], number: int
    ) -> None:
        id, token = f"lost{number}", f"token{number}"
        expected = self.model.complete(id, token, status, b"late", delay="none")

        [result] = self.run(self.queue.complete([Completion(id, token, status, b"late")]))

        assert result == expected

    @rule(worker=st.sampled_from(WORKERS), crashed=st.booleans())
    def release_worker(self, worker: str, crashed: bool) -> None:
        expected = self.model.release_worker(worker, crashed=crashed)

        assert self.run(self.queue.release_worker(worker, crashed=crashed)) == expected

    @rule(
        back=RECENT,
        reasons=st.lists(st.sampled_from(["client", "deadline", "operator"]), min_size=1),
    )
    def cancel(self, back: int, reasons: list[Literal["client", "deadline", "operator"]]) -> None:
        id = self.id(back)
        for reason in reasons[:2]:
            expected = self.model.cancel(id, reason)

            assert self.run(self.queue.cancel(id, reason)) == expected

    @rule(back=RECENT, reply=st.sampled_from(["elsewhere", ""]))
    def set_reply(self, back: int, reply: str) -> None:
        id = self.id(back)
        expected = self.model.set_reply(id, reply)

        assert self.run(self.queue.set_reply(id, reply)) is expected

    @rule()
    def reclaim(self) -> None:
        expected = self.model.reclaim()
        time.sleep(0.003)  # until short leases and delays have expired by the server's clock

        reclaimed = self.run(self.queue.reclaim())

        assert (reclaimed.expired, reclaimed.due, reclaimed.overdue) == expected

    # --- Invariants -------------------------------------------------------------------------------

    @invariant()
    def the_server_agrees_with_the_model(self) -> None:
        self.run(self._compare())

    async def _compare(self) -> None:
        model, client = self.model, self.client
        prefix = f"{self.namespace}:{{m}}"
        async with client.pipeline(transaction=True) as pipeline:
            for account in ACCOUNTS:
                pipeline.zrange(f"{prefix}:queue:{account}", 0, -1)
            for worker in WORKERS:
                pipeline.smembers(f"{prefix}:worker:{worker}")
            for name in ("leases", "delayed", "deadlines", "live"):
                pipeline.zrange(f"{prefix}:{name}", 0, -1)
            pipeline.zrange(f"{prefix}:accounts", 0, -1, withscores=True)
            pipeline.hgetall(f"{prefix}:backlog")
            pipeline.hgetall(f"{prefix}:running")
            pipeline.hmget(f"{prefix}:counters", "queued", "cost_us", "virtual")
            pipeline.exists(f"{prefix}:wake")
            pipeline.xrange(f"{prefix}:done")
            pipeline.keys(f"{self.namespace}:*")
            found = iter(await pipeline.execute())
        for account in ACCOUNTS:
            assert _names(next(found)) == [job.id for job in model.waiting(account)]
        for worker in WORKERS:
            assert sorted(_names(next(found))) == _ids(model.leased(worker))
        assert sorted(_names(next(found))) == _ids(model.running())
        assert sorted(_names(next(found))) == _ids(model.delayed())
        assert set(_names(next(found))) == {job.id for job in model.live() if job.has_deadline}
        assert sorted(_names(next(found))) == _ids(model.live())
        assert {name.decode(): tag for name, tag in next(found)} == model.eligible
        assert {name.decode(): int(cost_us) for name, cost_us in next(found).items()} == {
            account: sum(job.cost_us for job in model.waiting(account))
            for account in ACCOUNTS
            if model.waiting(account)
        }
        assert {name.decode(): int(count) for name, count in next(found).items()} == {
            account: len(model.running(account)) for account in ACCOUNTS if model.running(account)
        }
        queued, cost_us, virtual = next(found)
        assert int(queued or 0) == len(model.waiting())
        assert int(cost_us or 0) == sum(job.cost_us for job in model.waiting())
        assert float(virtual or 0) == model.virtual
        assert next(found) or not model.eligible, "work that can be leased, and nobody is woken"
        done = [_done(fields) for _, fields in next(found)]
        assert sorted(done) == sorted(model.done)
        assert len({id for id, *_ in done}) == len(done), "a job ended twice"
        keys = next(found)
        assert all(key.decode().startswith(f"{prefix}:") for key in keys), "beyond the hash tag"
        async with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.ttl(key)
            assert [
                key for key, ttl in zip(keys, await pipeline.execute(), strict=True) if ttl == -1
            ] == []

    def teardown(self) -> None:
        """From any state, all jobs can be ended, and nothing is left over."""
        self.run(self._finish())

    async def _finish(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0.003)
            await self.queue.reclaim()
            for worker in WORKERS:
                await self.queue.release_worker(worker, crashed=False)
            leases = await self.queue.lease("last", 64)
            ends = [Completion(lease.id, lease.token, "ok") for lease in leases]
            assert await self.queue.complete(ends) == ["done"] * len(ends)
        load = await self.queue.load()
        assert (load.depth, load.cost, load.running, load.live) == (
            *(0, 0.0, 0),
            load.delayed,
        )
        keys = await self.client.keys(f"{self.namespace}:*")
        if keys:
            await self.client.delete(*keys)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_any_sequence_of_operations_matches_the_reference(
    server_url: str, runner: asyncio.Runner
) -> None:
    client = connect(server_url)
    try:
        run_state_machine_as_test(
            # Annotated as a class, documented as a callable.
            lambda: QueueMachine(runner, client),  # type: ignore[arg-type]
            settings=settings(
                max_examples=50,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        runner.run(client.aclose())


def _job(entry: QueueEntry) -> Job:
    return Job(
        id=entry.id,
        account=entry.account,
        payload=entry.payload,
        cost_us=round(max(entry.cost, 0.001) * 1e6),
        weight=entry.weight,
        past_deadline=entry.deadline_ms == 1,
        has_deadline=entry.deadline_ms != 0,
        batch_key=entry.batch_key,
        reply=entry.reply,
        arrival=0,
    )


def _names(values: list[bytes] | set[bytes]) -> list[str]:
    return [value.decode() for value in values]


def _ids(jobs: list[Job]) -> list[str]:
    return sorted(job.id for job in jobs)


def _done(fields: dict[bytes, bytes]) -> tuple[str, str, int, bytes, str]:
    return (
        fields[b"id"].decode(),
        fields[b"status"].decode(),
        int(fields[b"attempt"]),
        fields[b"outcome"],
        fields[b"reason"].decode(),
    )

"""Batches have a small share of a model's queue beside interactive requests."""

from __future__ import annotations

import uuid

from gateway.dispatch.enqueue import BATCH_PRIORITY, Dispatch
from gateway.settings import Settings
from workers.contract.jobs import Job, RequestId, Usage, encode
from workers.contract.queue import Completion
from workers.contract.redis import connect

LIMITS = Usage(requests=1, input_tokens=16, output_tokens=100)


def job(name: str, account: str, *, batch: bool) -> Job:
    return Job(
        RequestId(name),
        account,
        "m",
        "text-generation",
        {},
        LIMITS,
        priority=BATCH_PRIORITY if batch else 0,
    )


async def test_interactive_requests_come_before_batches_but_batches_progress(valkey: str) -> None:
    redis = connect(valkey)
    namespace = f"t{uuid.uuid4().hex[:8]}"
    dispatch = Dispatch(redis, "gw", settings=Settings(namespace=namespace))
    for number in range(40):
        queued = job(f"batch{number}", "1", batch=True)
        await dispatch.enqueue("m", dispatch.entry(queued, encode(queued)))
    for number in range(40):
        for account in ("1", "2"):
            queued = job(f"live{account}-{number}", account, batch=False)
            await dispatch.enqueue("m", dispatch.entry(queued, encode(queued)))

    served = []
    queue = dispatch.queue("m")
    for _ in range(63):
        (lease,) = await queue.lease("w", 1)
        served.append(lease.account)
        await queue.complete([Completion(lease.id, lease.token, "ok")])
    await redis.aclose()

    assert served.count("1:batch") in (3, 4)
    assert abs(served.count("1") - served.count("2")) <= 1


def test_requeued_job_stays_in_its_flow() -> None:
    dispatch = Dispatch(None, "gw", settings=Settings())  # type: ignore[arg-type]  # never asked
    queued = job("a", "7", batch=True)

    entry = dispatch.entry(queued, encode(queued))

    assert (entry.account, entry.weight) == ("7:batch", 0.1)
    other = job("b", "7", batch=False)
    assert dispatch.entry(other, encode(other)).account == "7"

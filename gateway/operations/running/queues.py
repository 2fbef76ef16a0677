"""Queues: what waits and runs, by model and account; cancel a request, look for lost ones.

All of it is read from the queue server when it is asked for, in a few round trips.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypedDict

from sqlalchemy import Connection

from gateway.audit_log import Author, record
from gateway.catalog.schema import CatalogEntry
from gateway.dispatch.enqueue import is_batch_flow
from gateway.errors import NotFound
from gateway.ids import first_request_id
from gateway.ledger.holds import OpenId, OwnedId, find_open, read_open_ids
from gateway.ledger.periods import booking_time
from gateway.ledger.settle import settle
from gateway.operations.running.server import QueueServer, moment
from gateway.operations.running.workers import (
    RunningJobView,
    account_of,
    age_s,
    job_view,
    request_of,
)
from gateway.requests.settle import judge_end
from gateway.requests.streamed import NOT_STREAMED
from gateway.requests.sweep import UNTOUCHED_S, check_all_soon
from gateway.settings import Settings
from workers.contract.jobs import RequestId
from workers.contract.load import Load
from workers.contract.queue import Queue, loads
from workers.contract.queue_views import JOBS_MAX, QueueView, queue_views

CHECKED_MAX: Final = 2000
"""Open requests of which is counted how many the queue server does not know."""


class QueueLoadView(TypedDict):
    """The queue of a model. ``wait_s`` is the estimated time until all queued jobs have run."""

    object: Literal["queue"]
    model: str
    queued: int
    running: int
    delayed: int
    accounts: int
    oldest_s: float
    wait_s: float
    pace: float | None
    service_s: float | None


class FlowView(TypedDict):
    """Jobs of an account in a queue; its batches are a separate flow with another weight.

    ``share`` is that of the queued device time.
    """

    account_id: int | None
    batch: bool
    weight: float
    queued: int
    running: int
    queued_s: float
    share: float


class WaitingJobView(TypedDict):
    """A queued job; ``position`` is its place if jobs were leased one at a time."""

    id: str
    request_id: str
    position: int
    account_id: int | None
    batch: bool
    attempt: int
    age_s: float
    estimated_s: float
    deadline_at: str | None


class QueueDetailView(QueueLoadView):
    """A queue with its accounts and jobs, at most 200 of each.

    ``delayed_jobs`` wait for a retry, which is due after ``lease_left_s``.
    """

    flows: list[FlowView]
    jobs: list[WaitingJobView]
    running_jobs: list[RunningJobView]
    delayed_jobs: list[RunningJobView]


class LostView(TypedDict):
    """How many of the checked open requests the queue server does not know."""

    object: Literal["lost"]
    checked: int
    lost: int


class CheckView(TypedDict):
    """A check of all open requests, which the next sweep makes."""

    object: Literal["check"]
    within_s: float


async def list_queues(
    server: QueueServer, models: Sequence[str], *, idle: bool = False
) -> list[QueueLoadView]:
    """Return the queues of models, those with the longest wait first; ``idle``: empty ones too."""
    found = await loads(server.redis, models, namespace=server.namespace)
    views = [_load_view(model, load) for model, load in found.items() if idle or load.live]
    return sorted(views, key=lambda view: (-view["wait_s"], -view["running"], view["model"]))


async def show_queue(
    server: QueueServer, model: str, *, weights: Mapping[bool, float], limit: int = JOBS_MAX
) -> QueueDetailView:
    """Return the queue of a model with its jobs. ``weights``: of a flow, by whether it is of
    batches."""
    load = (await loads(server.redis, [model], namespace=server.namespace))[model]
    views = await queue_views(server.redis, [model], limit=limit, namespace=server.namespace)
    view = views[model]
    return {
        **_load_view(model, load),
        "flows": _flows(view, load, weights),
        "jobs": [
            {
                "id": job.id,
                "request_id": request_of(job.id),
                "position": position,
                "account_id": account_of(job.account),
                "batch": is_batch_flow(job.account),
                "attempt": job.attempt,
                "age_s": age_s(job.enqueued_ms),
                "estimated_s": job.cost,
                "deadline_at": moment(job.deadline_ms),
            }
            for position, job in enumerate(view.jobs, 1)
        ],
        "running_jobs": [job_view(model, job) for job in view.leases],
        "delayed_jobs": [job_view(model, job) for job in view.delayed],
    }


def weights_of(settings: Settings) -> dict[bool, float]:
    """Return the weight of a flow, by whether it is of batches."""
    return {False: 1.0, True: settings.batch_weight}


def workflows_of(entries: Sequence[CatalogEntry]) -> frozenset[str]:
    """Return the names of workflows, which are in no queue: their steps are."""
    return frozenset(entry.name for entry in entries if entry.workflow is not None)


def open_by_model(connection: Connection, *, limit: int = 20_000) -> dict[str, int]:
    """Count open requests by queue, from their holds; for when the queue server is away."""
    found = read_open_ids(connection, after="", until="req_g", limit=limit)
    return dict(Counter(each.queue for each in found).most_common())


async def count_lost(server: QueueServer, found: Sequence[OpenId]) -> LostView:
    """Count the open requests that the queue server does not know."""
    by_queue: defaultdict[str, list[str]] = defaultdict(list)
    for each in found:
        by_queue[each.queue].append(each.request_id)
    lost = 0
    for model, ids in by_queue.items():
        queue = Queue(server.redis, model, namespace=server.namespace)
        lost += len(await queue.missing(ids))
    return {"object": "lost", "checked": len(found), "lost": lost}


def oldest_open(connection: Connection, *, workflows: Collection[str]) -> list[OpenId]:
    """Read the oldest open requests that must be in a queue: of a workflow, only its steps are."""
    until = first_request_id(datetime.now(UTC) - timedelta(seconds=UNTOUCHED_S))
    found = read_open_ids(connection, after="", until=until, limit=CHECKED_MAX)
    return [each for each in found if each.queue not in workflows]


def record_check(connection: Connection, author: Author) -> None:
    """Record that all open requests are to be checked, before that is asked for."""
    record(connection, author, "queue.requeue", "queue", after={"check": "all open requests"})


async def requeue_lost(server: QueueServer, *, sweep_interval_s: float) -> CheckView:
    """Let the next sweep of a gateway check all open requests, and enqueue those that are lost."""
    await check_all_soon(server.redis, server.namespace)
    return {"object": "check", "within_s": sweep_interval_s}


def record_cancellation(connection: Connection, author: Author, request_id: str) -> OwnedId:
    """Record that an open request is cancelled, before it is. Raise ``NotFound``."""
    found = find_open(connection, request_id)
    if found is None:
        raise NotFound("request_not_open", f"{request_id} is not open: it has ended, or never was.")
    record(
        connection,
        author,
        "queue.cancel",
        request_id,
        account_id=found.account_id,
        after={"model": found.queue},
    )
    return found


async def cancel_in_queue(server: QueueServer, found: OwnedId) -> bool:
    """Cancel a request at the queue server, without a gateway. Return whether one closes it: its
    job was known. Otherwise ``close_cancelled`` does."""
    queue = Queue(server.redis, found.queue, namespace=server.namespace)
    return await queue.cancel(found.request_id, "operator") != "unknown"


def close_cancelled(connection: Connection, request_id: RequestId) -> None:
    """Release the hold of a request that the queue server does not know."""
    settle(
        connection,
        [judge_end(request_id, "cancelled", "operator", None, NOT_STREAMED)],
        now=booking_time(connection),
        prices={},
        retention=timedelta(0),
    )


def _load_view(model: str, load: Load) -> QueueLoadView:
    return {
        "object": "queue",
        "model": model,
        "queued": load.depth,
        "running": load.running,
        "delayed": load.delayed,
        "accounts": load.accounts,
        "oldest_s": load.oldest_ms / 1000,
        "wait_s": round(load.seconds(load.cost), 3),
        "pace": round(load.pace, 3) or None,
        "service_s": round(load.service_s, 3) or None,
    }


def _flows(view: QueueView, load: Load, weights: Mapping[bool, float]) -> list[FlowView]:
    flows: list[FlowView] = []
    for each in view.accounts:
        batch = is_batch_flow(each.account)
        flows.append(
            {
                "account_id": account_of(each.account),
                "batch": batch,
                "weight": weights[batch],
                "queued": each.queued,
                "running": each.running,
                "queued_s": round(each.cost, 3),
                "share": round(each.cost / load.cost, 4) if load.cost else 0.0,
            }
        )
    return sorted(flows, key=lambda flow: -flow["queued_s"])

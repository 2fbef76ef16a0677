"""Workers: what they announce, the jobs that they run, and the wishes of operators.

A wish is recorded before it is sent. The worker reads it at once, or within seconds if the hint is
lost; a worker that is killed before leaves no trace of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NotRequired, TypeAlias, TypedDict

from gateway.audit_log import Act, Author, record
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.operations.running.server import QueueServer, moment
from gateway.sql.database import Database
from workers.contract.announcements import Announcement, EndpointState, ModelState
from workers.contract.queue_views import LeasedState, leases_of

WorkerState: TypeAlias = Literal["serving", "draining", "ending", "silent"]
ModelLoad: TypeAlias = Literal["loaded", "loading", "unloaded", "upstream", "unavailable"]
WishedAct: TypeAlias = Literal["drain", "resume", "load", "unload"]

_ACTS: dict[WishedAct, Act] = {
    "drain": "worker.drain",
    "resume": "worker.resume",
    "load": "worker.load",
    "unload": "worker.unload",
}


class ServedModelView(TypedDict):
    """A model of a worker. ``busy`` is the share of the last minute in which its engine worked;
    ``device`` and ``dtype`` are those of loaded weights, ``resident_bytes`` what they count for in
    the worker's memory budget."""

    name: str
    state: ModelLoad
    reason: str | None
    device: str | None
    dtype: str | None
    running: int
    capacity: int
    weights_bytes: int
    cache_bytes: int
    resident_bytes: int
    used_at: str | None
    loads: int
    load_ms: float | None
    busy: float | None


class EndpointView(TypedDict):
    """An upstream's endpoint of one model, as one worker sees it."""

    model: str
    host: str
    tier: int
    state: str
    in_flight: int
    limit: int
    failures: int
    down_since: str | None
    next_call_at: str | None
    calls: int
    p95_ms: float | None
    errors: dict[str, int]


class RunningJobView(TypedDict):
    """A job that a worker has leased. ``lease_left_s`` is negative if the lease has expired."""

    id: str
    request_id: str
    model: str
    account_id: int | None
    attempt: int
    started_at: str | None
    age_s: float
    lease_left_s: float
    deadline_at: str | None
    cancelled: str | None


class WorkerView(TypedDict):
    """A worker. ``busy`` and ``steps_per_second`` are of the last minute."""

    object: Literal["worker"]
    name: str
    state: WorkerState
    heard_at: str | None
    device: str
    version: str
    started_at: str | None
    running: int
    capacity: int
    memory_total_bytes: int
    memory_used_bytes: int
    memory_budget_bytes: int | None
    weights_bytes: int
    cache_bytes: int
    busy: float | None
    busy_s: float
    steps: int
    steps_per_second: float | None
    catalog_problem: str | None
    models: list[ServedModelView]
    endpoints: list[EndpointView]
    jobs: NotRequired[list[RunningJobView]]


async def list_workers(server: QueueServer) -> list[WorkerView]:
    """Return live workers by name, then those that fell silent within the last hour."""
    live = [worker_view(each) for each in await server.workers.list()]
    silent = [
        worker_view(each.last, heard_ms=each.heard_ms) for each in await server.workers.silent()
    ]
    return live + silent


async def show_worker(server: QueueServer, name: str) -> WorkerView:
    """Return a worker with the jobs that it has leased. Raise ``NotFound``."""
    view = find_worker(await list_workers(server), name)
    models = [each["name"] for each in view["models"]]
    leases = await leases_of(server.redis, view["name"], models, namespace=server.namespace)
    view["jobs"] = [job_view(model, job) for model, jobs in leases.items() for job in jobs]
    return view


def find_worker(views: Sequence[WorkerView], name: str) -> WorkerView:
    """Return the worker of this name, or the only one whose name begins with it.

    Raise ``NotFound``, or ``Conflict`` if several fit.
    """
    fitting = [each for each in views if each["name"] == name] or [
        each for each in views if each["name"].startswith(name)
    ]
    if not fitting:
        raise NotFound("worker_not_found", f"No worker {name!r} is known.", param="worker")
    if len(fitting) > 1:
        names = ", ".join(each["name"] for each in fitting)
        raise Conflict("worker_ambiguous", f"{name!r} fits {names}.", param="worker")
    return fitting[0]


def check_wish(view: WorkerView, act: WishedAct, model: str | None) -> None:
    """Raise ``Conflict`` or ``InvalidRequest`` if a wish makes no sense for a worker."""
    name = view["name"]
    if view["state"] == "silent":
        raise Conflict("worker_silent", f"{name} has not been heard since {view['heard_at']}.")
    if view["state"] == "ending":
        raise Conflict("worker_ending", f"{name} ends when its running jobs have ended.")
    if act in ("drain", "resume"):
        return
    found = next((each for each in view["models"] if each["name"] == model), None)
    if found is None:
        known = ", ".join(each["name"] for each in view["models"]) or "none"
        message = f"{name} has no model {model!r}; its models: {known}."
        raise InvalidRequest("invalid_value", message, param="model")
    if found["state"] == "upstream":
        message = f"{model} runs at an upstream, and takes no memory of {name}."
        raise InvalidRequest("invalid_value", message, param="model")


async def wish(
    server: QueueServer,
    database: Database,
    author: Author,
    name: str,
    act: WishedAct,
    model: str | None = None,
) -> WorkerView:
    """Tell a worker to drain, to resume, or to load or unload a model; return it as it was.

    Raise ``NotFound``, ``Conflict`` or ``InvalidRequest``.
    """
    view = find_worker(await list_workers(server), name)
    check_wish(view, act, model)
    worker = view["name"]
    after = {"draining": act == "drain"} if model is None else {"model": model}
    await database.write(
        lambda connection: record(connection, author, _ACTS[act], f"worker {worker}", after=after)
    )
    if model is None:
        await server.workers.wish_drain(worker, act == "drain")
    else:
        await server.workers.wish_loaded(worker, model, act == "load")
    return view


def worker_view(announced: Announcement, *, heard_ms: int = 0) -> WorkerView:
    """Return a worker as operators see it; ``heard_ms`` is the last moment of a silent one."""
    work, earlier = announced.work, announced.earlier
    span_us = 1000 * (work.at_ms - earlier.at_ms)
    state: WorkerState = "draining" if announced.draining else "serving"
    if announced.ending:
        state = "ending"
    states = announced.states.values()
    return {
        "object": "worker",
        "name": announced.worker,
        "state": "silent" if heard_ms else state,
        "heard_at": moment(heard_ms or work.at_ms),
        "device": announced.device,
        "version": announced.version,
        "started_at": moment(announced.started_ms),
        "running": announced.running,
        "capacity": sum(each.capacity for each in states),
        "memory_total_bytes": announced.bytes_total,
        "memory_used_bytes": announced.bytes_used,
        "memory_budget_bytes": announced.budget_bytes or None,
        "weights_bytes": sum(each.weights_bytes for each in states),
        "cache_bytes": sum(each.cache_bytes for each in states),
        "busy": _share(work.busy_us - earlier.busy_us, span_us),
        "busy_s": work.busy_us / 1e6,
        "steps": work.steps,
        "steps_per_second": (
            round(max(work.steps - earlier.steps, 0) * 1e6 / span_us, 1) if span_us > 0 else None
        ),
        "catalog_problem": announced.catalog_problem or None,
        "models": [_model_view(announced, each, span_us) for each in _models_of(announced)],
        "endpoints": [endpoint_view(each) for each in announced.endpoints],
    }


def endpoint_view(state: EndpointState) -> EndpointView:
    return {
        "model": state.model,
        "host": state.host,
        "tier": state.tier,
        "state": state.state,
        "in_flight": state.in_flight,
        "limit": state.limit,
        "failures": state.failures,
        "down_since": moment(state.since_ms),
        "next_call_at": moment(state.until_ms),
        "calls": state.calls,
        "p95_ms": round(state.p95_us / 1000, 1) if state.calls else None,
        "errors": dict(state.errors),
    }


def job_view(model: str, job: LeasedState) -> RunningJobView:
    return {
        "id": job.id,
        "request_id": request_of(job.id),
        "model": model,
        "account_id": account_of(job.account),
        "attempt": job.attempt,
        "started_at": moment(job.started_ms),
        "age_s": age_s(job.started_ms or job.enqueued_ms),
        "lease_left_s": job.left_ms / 1000,
        "deadline_at": moment(job.deadline_ms),
        "cancelled": job.cancel or None,
    }


def age_s(unix_ms: int) -> float:
    """Return the seconds since a moment; at least 0, as clocks can differ."""
    return max(0.0, round(time.time() - unix_ms / 1000, 3))


def request_of(job_id: str) -> str:
    """Return the request of a job, which may be a step of it."""
    return job_id.partition(".")[0]


def account_of(flow: str) -> int | None:
    """Return the account of a flow in a queue; None if the name is of another version."""
    number = flow.partition(":")[0]
    return int(number) if number.isascii() and number.isdecimal() else None


def _models_of(announced: Announcement) -> list[str]:
    lists = (announced.states, announced.models, announced.loading, announced.unavailable)
    return sorted({name for names in lists for name in names})


def _model_view(announced: Announcement, name: str, span_us: int) -> ServedModelView:
    state = announced.states.get(name) or ModelState()
    busy_us = announced.work.models.get(name)
    return {
        "name": name,
        "state": _load_of(announced, name),
        "reason": announced.problems.get(name) or announced.unavailable.get(name),
        "device": state.device or None,
        "dtype": state.dtype or None,
        "running": state.running,
        "capacity": state.capacity,
        "weights_bytes": state.weights_bytes,
        "cache_bytes": state.cache_bytes,
        "resident_bytes": state.resident_bytes,
        "used_at": moment(state.used_ms),
        "loads": state.loads,
        "load_ms": round(state.load_us / 1000, 1) if state.loads else None,
        "busy": (
            None
            if busy_us is None
            else _share(busy_us - announced.earlier.models.get(name, 0), span_us)
        ),
    }


def _load_of(announced: Announcement, name: str) -> ModelLoad:
    if name in announced.loading:
        return "loading"
    if name in announced.unavailable:
        return "unavailable"
    if any(each.model == name for each in announced.endpoints):
        return "upstream"
    return "loaded" if name in announced.loaded else "unloaded"


def _share(part_us: int, span_us: int) -> float | None:
    """Return a share of a time, between 0 and 1; None if the time is too short to tell."""
    return round(min(max(part_us / span_us, 0.0), 1.0), 3) if span_us > 0 else None

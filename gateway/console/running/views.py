"""What pages say about workers, queues, upstreams and gateways. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.console.columns import ListColumns
from gateway.operations.running.gateways import GatewayView, TaskView
from gateway.operations.running.queues import QueueLoadView
from gateway.operations.running.upstreams import UpstreamView
from gateway.operations.running.workers import RunningJobView, WorkerView

KINDS: Final[Mapping[str, str]] = {
    "serving": "good",
    "draining": "warn",
    "ending": "warn",
    "silent": "bad",
    "loaded": "good",
    "loading": "open",
    "unloaded": "idle",
    "upstream": "good",
    "unavailable": "bad",
    "up": "good",
    "paused": "warn",
    "partly": "warn",
    "down": "bad",
    "unknown": "idle",
    "current": "good",
    "behind": "bad",
}
"""State → how it is shown."""
JOBS: Final = ListColumns(
    "jobs",
    {
        "model": "Model",
        "account": "Account",
        "attempt": "Attempt",
        "age": "Age",
        "left": "Lease left, or due in",
        "deadline": "Deadline",
    },
)
"""Jobs that run or wait for a retry."""


def workers_title(workers: Sequence[WorkerView] | None) -> str:
    """Return the answer of the page: how many workers serve."""
    if workers is None:
        return "The queue server does not answer"
    serving = sum(each["state"] == "serving" for each in workers)
    if not workers:
        return "No worker is connected"
    if serving == len(workers):
        return "The worker serves" if serving == 1 else f"All {serving} workers serve"
    return f"{serving} of {len(workers)} workers serve"


def queues_title(queues: Sequence[QueueLoadView] | None) -> str:
    if queues is None:
        return "The queue server does not answer"
    queued = sum(each["queued"] + each["delayed"] for each in queues)
    running = sum(each["running"] for each in queues)
    if queued:
        return f"{queued} job{'' if queued == 1 else 's'} wait{'s' if queued == 1 else ''}"
    return (
        f"Nothing waits; {running} run{'s' if running == 1 else ''}" if running else "Nothing waits"
    )


def upstreams_title(upstreams: Sequence[UpstreamView] | None) -> str:
    if upstreams is None:
        return "The queue server does not answer"
    bad = sum(each["state"] in ("down", "partly") for each in upstreams)
    if not upstreams:
        return "No upstream models"
    if bad:
        return f"{bad} of {len(upstreams)} endpoints fail{'s' if bad == 1 else ''}"
    if all(each["state"] == "unknown" for each in upstreams):
        return "No worker calls an upstream"
    return "All endpoints are up"


def gateways_title(gateways: Sequence[GatewayView] | None) -> str:
    if gateways is None:
        return "The queue server does not answer"
    if any(each["schema"] == "behind" for each in gateways):
        return "The database lacks a migration"
    if any(each["late_loops"] for each in gateways):
        return "A gateway is late"
    count = sum(each["part"] == "gateway" for each in gateways)
    return "One gateway process runs" if count == 1 else f"{count} gateway processes run"


def memory_parts(worker: WorkerView) -> list[tuple[str, int]]:
    """Return the parts of a device's memory that add up to what is in use."""
    used = worker["memory_used_bytes"]
    weights = min(worker["weights_bytes"], used)
    cache = min(worker["cache_bytes"], used - weights)
    return [("weights", weights), ("cache", cache), ("other", used - weights - cache)]


def job_accounts(jobs: Sequence[RunningJobView]) -> set[int]:
    return {each["account_id"] for each in jobs if each["account_id"] is not None}


def next_tasks(tasks: Sequence[TaskView]) -> list[TaskView]:
    """Return tasks with those that failed first."""
    return sorted(tasks, key=lambda task: not task["failed"])

"""An open request as texts: those of its page, and those that follow. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from gateway.console.views.formats import Clock, ago, count, duration, usd
from gateway.tasks.submission import OpenRequest
from workers.contract.jobs import Progress
from workers.contract.queue import JobState

NOT_STARTED: Final = "not yet"


def open_title(found: OpenRequest) -> str:
    waiting = "" if found.position is None else f", {found.position} ahead of it"
    return f"{found.status.capitalize()}{waiting}: {found.model} holds {usd(found.hold_nanos)}"


def open_texts(
    found: OpenRequest,
    state: JobState | None,
    progress: Progress | None,
    now: datetime,
    *,
    sees_worker: bool,
) -> dict[str, str]:
    """Return what is known of an open request by name; what is not known is empty."""
    running = found.status == "running"
    known = progress if running else None
    stage = known.stage if known is not None else None
    return {
        "title": open_title(found),
        "status": "being cancelled" if state is not None and state.cancel else found.status,
        "position": "" if found.position is None else f"{count(found.position)} ahead of it",
        "waited": ago(found.accepted_at, Clock("UTC", now)),
        "started": _started(state, now, sees_worker=sees_worker) if running else NOT_STARTED,
        "stage": f"{stage.name}, {stage.model}" if stage is not None else "",
        "step": _step(known) if known is not None else "",
        "done": f"{known.step / known.steps:.3f}" if known is not None and known.steps else "",
    }


def _started(state: JobState | None, now: datetime, *, sees_worker: bool) -> str:
    if state is None or not state.started_ms:
        return "yes"
    started_at = datetime.fromtimestamp(state.started_ms / 1000, UTC)
    where = f" on {state.worker}" if sees_worker and state.worker else ""
    attempt = f", attempt {state.attempt}" if state.attempt > 1 else ""
    return f"{ago(min(started_at, now), Clock('UTC', now))}{where}{attempt}"


def _step(progress: Progress) -> str:
    left = "" if progress.eta_ms is None else f", about {duration(progress.eta_ms * 1000)} left"
    return f"step {progress.step} of {progress.steps}{left}"

"""Determines from the workers' announcements whether a model is available. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gateway.catalog.schema import CatalogEntry
from gateway.catalog.workflow import Workflow
from workers.contract.announcements import Announcement

NOT_SET_UP: Final = "it is not set up on this gateway"


@dataclass(frozen=True, slots=True)
class WhyUnavailable:
    """Reason: a code for programs, a sentence for customers, the cause for operators."""

    code: Literal["upstream_not_configured", "upstream_unavailable", "no_worker"]
    reason: str
    detail: str | None = None
    """For operators: may name settings and hosts of the installation."""


def availability(
    entry: CatalogEntry, announcements: Sequence[Announcement]
) -> WhyUnavailable | None:
    """Return why a model is unavailable, or None if a worker that is not draining serves it.

    A workflow needs such a worker for the model of every step.
    """
    staying = [worker for worker in announcements if not worker.draining]
    if entry.workflow is not None:
        return _of_steps(entry.workflow, staying)
    if any(entry.name in worker.models for worker in staying):
        return None
    reasons = [
        worker.unavailable[entry.name] for worker in staying if entry.name in worker.unavailable
    ]
    if entry.upstream is None:
        problems = (worker.problems.get(entry.name) for worker in staying)
        catalogs = (worker.catalog_problem for worker in staying)
        detail = next(filter(None, (*problems, *catalogs)), None)
        reason = reasons[0] if reasons else "no worker serves it now"
        return WhyUnavailable("no_worker", reason, detail)
    credential = entry.upstream.credential
    if reasons and reasons[0] != f"{credential} is not set":
        return WhyUnavailable("upstream_unavailable", reasons[0])
    if credential is None:
        return WhyUnavailable("no_worker", "no worker serves it now")
    detail = (
        reasons[0] if reasons else f"no worker serves it now; it needs one with {credential} set"
    )
    return WhyUnavailable("upstream_not_configured", NOT_SET_UP, detail)


def loads_soon(entry: CatalogEntry, announcements: Sequence[Announcement]) -> bool:
    """Whether a worker that is not draining loads what an unavailable model lacks, so that requests
    can wait for it in the queue."""
    staying = [worker for worker in announcements if not worker.draining]
    coming = {model for worker in staying for model in (*worker.models, *worker.loading)}
    if entry.workflow is None:
        return entry.name in coming
    return all(step.model in coming for step in entry.workflow.run_steps)


def _of_steps(workflow: Workflow, staying: Sequence[Announcement]) -> WhyUnavailable | None:
    for step in workflow.run_steps:
        if not any(step.model in worker.models for worker in staying):
            return WhyUnavailable(
                "no_worker", f"no worker serves {step.model} now, the model of step {step.name}"
            )
    return None

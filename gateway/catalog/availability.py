"""Whether a model can be had now, from what the living workers say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gateway.catalog.schema import CatalogEntry
from gateway.catalog.workflow import Workflow
from workers.contract.streams import Announcement

NOT_SET_UP: Final = "it is not set up on this gateway"


@dataclass(frozen=True, slots=True)
class WhyUnavailable:
    """Why not: a code for programs, a sentence for customers, the cause for operators."""

    code: Literal["upstream_not_configured", "upstream_unavailable", "no_worker"]
    reason: str
    detail: str | None = None
    """Names settings and hosts of the installation."""


def availability(
    entry: CatalogEntry, announcements: Sequence[Announcement]
) -> WhyUnavailable | None:
    """None if a worker serves the model and takes jobs; of a workflow, the models of its steps."""
    staying = [worker for worker in announcements if not worker.draining]
    if entry.workflow is not None:
        return _of_steps(entry.workflow, staying)
    if any(entry.name in worker.models for worker in staying):
        return None
    said = [
        worker.unavailable[entry.name] for worker in staying if entry.name in worker.unavailable
    ]
    if entry.upstream is None:
        return WhyUnavailable("no_worker", said[0] if said else "no worker serves it now")
    credential = entry.upstream.credential
    if said and said[0] != f"{credential} is not set":
        return WhyUnavailable("upstream_unavailable", said[0])
    if credential is None:
        return WhyUnavailable("no_worker", "no worker serves it now")
    needed = said[0] if said else f"no worker serves it now; it needs one with {credential} set"
    return WhyUnavailable("upstream_not_configured", NOT_SET_UP, needed)


def _of_steps(workflow: Workflow, staying: Sequence[Announcement]) -> WhyUnavailable | None:
    for step in workflow.steps:
        if not any(step.model in worker.models for worker in staying):
            return WhyUnavailable(
                "no_worker", f"no worker serves {step.model} now, which its step {step.name} needs"
            )
    return None

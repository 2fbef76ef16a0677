"""What an accepted workflow is: its steps as they will be run, fixed with their prices and bounds.

A plan is the input of the request's own job, so it is committed with the hold and cannot change
afterwards, whatever the catalog says by then. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from gateway.ledger.closed import UNITS
from workers.contract.jobs import Job, RequestId, Usage

_STEP_ID: Final = re.compile(r"(req_[0-9a-f]{32})\.([a-z][a-z0-9_]*)\.([0-9]+)")
_DELIVERED: Final = ("images", "video_ms", "audio_ms")
"""Quantities of the whole that are those of its output alone."""


class PlannedStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step; ``input`` is as the catalog has it, with what flows in still by its name."""

    name: str
    model: str
    task: str
    price_id: int
    limits: Usage
    input: dict[str, Any]
    needs: tuple[str, ...] = ()
    retries: int = 0
    characters: int = 0
    max_tokens: int | None = None
    backoff_ms: int = 0
    """Between the first attempt and the second; then twice as long each time."""


class WorkflowPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """``output`` is the step whose output the whole has; ``texts`` and ``media`` are the inputs,
    the latter as places among the job's attachments."""

    steps: tuple[PlannedStep, ...]
    output: str
    texts: dict[str, str] = {}
    media: dict[str, int] = {}
    by_steps: bool = False
    """Whether it costs what its steps cost, and not a price of its own."""


class StepId(NamedTuple):
    """The id of a step's job: of which request, which step, and which attempt from 1 on."""

    request_id: RequestId
    name: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}.{self.name}.{self.attempt}"


def read_step_id(text: str) -> StepId | None:
    """None if it is the id of a request that stands for itself."""
    found = _STEP_ID.fullmatch(text)
    return StepId(RequestId(found[1]), found[2], int(found[3])) if found else None


def plan_of(job: Job) -> WorkflowPlan | None:
    """The plan of a request that is a workflow."""
    return msgspec.convert(job.input, WorkflowPlan) if job.workflow else None


def combined(parts: Iterable[Usage], delivered: Usage) -> Usage:
    """The usage of the whole: what was spent on all steps, and what the output step delivered."""
    parts = tuple(parts)
    sums = {
        unit: getattr(delivered, unit)
        if unit in _DELIVERED
        else sum(getattr(part, unit) for part in parts)
        for unit in UNITS
    }
    return Usage(**{**sums, "requests": 1}, attributes=delivered.attributes)

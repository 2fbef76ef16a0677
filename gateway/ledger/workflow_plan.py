"""The plan of an accepted workflow run: its steps with their prices and limits.

A plan is the input of the request's own job, so it is committed with the hold and does not change
when the catalog does. Pure.
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
"""Quantities of a workflow run that count only the output step."""


class PlannedStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step; ``input`` is as in the catalog, with its references not yet resolved."""

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
    """Pause between the first attempt and the second; it doubles with each further attempt."""


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step whose output is that of one of its candidates, each of which is a step itself."""

    name: str
    candidates: tuple[str, ...]
    judge: str | None = None
    """The step that chooses; None: the answer of most candidates is chosen."""


class WorkflowPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """``output`` is the step or choice whose output is the run's; ``texts`` and ``media`` are the
    inputs, the latter as indices of the job's attachments."""

    steps: tuple[PlannedStep, ...]
    output: str
    texts: dict[str, str] = {}
    media: dict[str, int] = {}
    by_steps: bool = False
    """Whether the run is charged the sum of its steps instead of its own price."""
    choices: tuple[Choice, ...] = ()

    @property
    def output_step(self) -> str:
        """A step whose output is, or is like, that of the run."""
        found = (choice.candidates[0] for choice in self.choices if choice.name == self.output)
        return next(found, self.output)


class StepId(NamedTuple):
    """Id of a step's job: the request, the step, and the attempt, counted from 1."""

    request_id: RequestId
    name: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}.{self.name}.{self.attempt}"


def read_step_id(text: str) -> StepId | None:
    """Parse the id of a step's job; None for the id of a request."""
    found = _STEP_ID.fullmatch(text)
    return StepId(RequestId(found[1]), found[2], int(found[3])) if found else None


def plan_of(job: Job) -> WorkflowPlan | None:
    """Return the plan of a workflow run; None for any other request."""
    return msgspec.convert(job.input, WorkflowPlan) if job.workflow else None


def combined(parts: Iterable[Usage], delivered: Usage) -> Usage:
    """Return the usage of a run: sums over all steps, and the output of the output step."""
    parts = tuple(parts)
    sums = {
        unit: getattr(delivered, unit)
        if unit in _DELIVERED
        else sum(getattr(part, unit) for part in parts)
        for unit in UNITS
    }
    return Usage(**{**sums, "requests": 1}, attributes=delivered.attributes)

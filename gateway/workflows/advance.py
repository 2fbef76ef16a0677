"""Decides what to do next in a workflow run, from its plan and its attempts. Pure.

The result depends on its arguments only, so any gateway can decide: after a step has ended, when
another attempt is due, or in a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import msgspec

from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS
from gateway.catalog.workflow import BACKOFF_MAX_S, Reference, is_retried
from gateway.errors import TollgateError
from gateway.files.sources import Given, StoredSource
from gateway.ledger.closed import Output, RequestError, Status
from gateway.ledger.workflow_plan import PlannedStep, StepId, WorkflowPlan
from gateway.tasks.understanding import check_understood
from gateway.workflows.plan import StepInput, prepare_step
from gateway.workflows.store import NewStep, StepAttempt, WorkflowRun
from workers.contract.jobs import BlobRef, Job, RequestId, encode
from workers.contract.media import Medium


@dataclass(frozen=True, slots=True)
class WorkflowEnded:
    """The run has ended."""

    status: Status
    reason: str
    output: Output | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Steps that can run now, each with its attempt number. ``due`` is the time of the next retry,
    if one is waiting for it."""

    steps: tuple[tuple[PlannedStep, int], ...]
    due: datetime | None = None


Next: TypeAlias = WorkflowEnded | Ready


def advance(plan: WorkflowPlan, attempts: Sequence[StepAttempt], *, now: datetime) -> Next:
    """Decide what to do next; ``Ready`` without steps while running steps are awaited."""
    last: dict[str, StepAttempt] = {}
    for attempt in attempts:
        if attempt.id.name not in last or attempt.id.attempt > last[attempt.id.name].id.attempt:
            last[attempt.id.name] = attempt
    done = {name for name, attempt in last.items() if attempt.status == "succeeded"}
    if plan.output in done:
        return WorkflowEnded("succeeded", "completed", output=last[plan.output].output)
    ready = []
    due: datetime | None = None
    for step in plan.steps:
        if step.name not in last:
            if done.issuperset(step.needs):
                ready.append((step, 1))
            continue
        attempt = last[step.name]
        if attempt.status == "failed":
            if not _may_retry(step, attempt):
                return WorkflowEnded("failed", _code(attempt), error=_problem(step, attempt))
            retry_at = _retry_at(step, attempt)
            if retry_at is None or retry_at <= now:
                ready.append((step, attempt.id.attempt + 1))
            else:
                due = min(due or retry_at, retry_at)
        elif attempt.status == "expired":
            return WorkflowEnded("expired", "deadline")
        elif attempt.status == "cancelled":
            return WorkflowEnded("cancelled", "operator")
    return Ready(tuple(ready), due)


def job_of(run: WorkflowRun, step: PlannedStep, attempt: int, entry: CatalogEntry) -> NewStep:
    """Build the job of a step from the outputs of earlier steps. Raise ``TollgateError``."""
    made = {
        one.id.name: one.output
        for one in run.attempts
        if one.status == "succeeded" and one.output is not None
    }
    steps = {planned.name: planned for planned in run.plan.steps}

    def resolve(expression: Sequence[Reference]) -> str | Given | None:
        for each in expression:
            if each.source == "inputs":
                if each.name in run.plan.texts:
                    return run.plan.texts[each.name]
                if each.name in run.plan.media:
                    return StoredSource(run.job.attachments[run.plan.media[each.name]])
            elif each.name in made:
                return _readable(steps[each.name], made[each.name])
        return None

    step_input = StepInput(resolve)
    value = step_input.input(step.input)
    _, prepared = prepare_step(entry, _task(step), value, step_input, prefix=f"steps.{step.name}")
    check_understood(entry, value, prefix=f"steps.{step.name}")
    given: dict[str, Any] = prepared.input
    if step.max_tokens is not None:
        # At most what the hold covers, even if a shorter prompt leaves room for a longer answer.
        given = {**given, "max_tokens": min(given["max_tokens"], step.max_tokens)}
    id = StepId(run.request_id, step.name, attempt)
    job = Job(
        request_id=RequestId(str(id)),
        account_id=run.job.account_id,
        model=step.model,
        task=step.task,
        input=given,
        limits=step.limits,
        # Streamed for progress events only: text and audio of a step are not delivered before the
        # run ends.
        stream=TASKS[_task(step)].makes in ("image", "video"),
        deadline_ms=run.job.deadline_ms,
        attachments=tuple(
            source.given.blob
            for source in prepared.sources
            if isinstance(source.given, StoredSource)
        ),
        priority=run.job.priority,
        stored_under=run.request_id,
    )
    return NewStep(id, step.model, encode(job))


def refused_step(step: PlannedStep, error: TollgateError) -> WorkflowEnded:
    """Return the end of a run of which a step refused its input."""
    problem = RequestError(error.code, f"The step {step.name} ({step.model}): {error}", error.param)
    return WorkflowEnded("failed", "invalid_input", error=problem)


def steps_done(run: WorkflowRun) -> int:
    """Return the number of steps that have succeeded."""
    return len({one.id.name for one in run.attempts if one.status == "succeeded"})


def _readable(step: PlannedStep, output: Output) -> str | Given | None:
    """Return what other steps read of an output: its first text, image, video or audio."""
    makes = TASKS[_task(step)].makes
    if makes == "text":
        choices: Sequence[Mapping[str, Any]] = output.value.get("choices", ())
        text = choices[0].get("text", "") if choices else ""
        return str(text)[: step.characters]
    for medium in msgspec.convert(output.value.get("media", ()), tuple[Medium, ...]):
        if medium.kind == makes and medium.role == "output" and medium.blob is not None:
            blob: BlobRef = output.blobs[medium.blob]
            return StoredSource(blob)
    return None


def _may_retry(step: PlannedStep, attempt: StepAttempt) -> bool:
    return attempt.id.attempt <= step.retries and is_retried(_code(attempt))


def _retry_at(step: PlannedStep, failed: StepAttempt) -> datetime | None:
    """Return when a failed step may run again; None: immediately."""
    if failed.ended_at is None:
        return None
    seconds = step.backoff_ms / 1000 * 2 ** (failed.id.attempt - 1)
    return failed.ended_at + timedelta(seconds=min(seconds, BACKOFF_MAX_S))


def _code(attempt: StepAttempt) -> str:
    return attempt.error.code if attempt.error else "engine_error"


def _problem(step: PlannedStep, attempt: StepAttempt) -> RequestError:
    message = attempt.error.message if attempt.error else "it ended without an outcome."
    tries = f" {attempt.id.attempt} times" if attempt.id.attempt > 1 else ""
    return RequestError(
        _code(attempt), f"The step {step.name} ({step.model}) failed{tries}: {message}"
    )


def _task(step: PlannedStep) -> Any:
    return step.task

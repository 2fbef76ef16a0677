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
from gateway.catalog.tasks import TASKS, flows_as
from gateway.catalog.workflow import BACKOFF_MAX_S, Reference, is_retried
from gateway.errors import TollgateError
from gateway.files.sources import Given, StoredSource
from gateway.ledger.closed import Output, RequestError, Status
from gateway.ledger.workflow_plan import PlannedStep, StepId, WorkflowPlan
from gateway.tasks.understanding import check_understood
from gateway.workflows.choices import choose, remaining, text_of
from gateway.workflows.plan import StepInput, prepare_step, written_fields
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
    chosen: tuple[str, ...] = ()
    """The candidates that were chosen."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Steps that can run now, each with its attempt number. ``due`` is the time of the next retry,
    if one is waiting for it."""

    steps: tuple[tuple[PlannedStep, int], ...]
    due: datetime | None = None


Next: TypeAlias = WorkflowEnded | Ready


def advance(plan: WorkflowPlan, attempts: Sequence[StepAttempt], *, now: datetime) -> Next:
    """Decide what to do next; ``Ready`` without steps while running steps are awaited."""
    last = _last(attempts)
    made, lost = _made(last), _lost(plan, last)
    chosen = _chosen(plan, made, lost)
    delivered = chosen.get(plan.output, plan.output)
    if delivered in made:
        return WorkflowEnded(
            "succeeded", "completed", output=made[delivered], chosen=tuple(chosen.values())
        )
    spared = _spared(plan, lost)
    idle = {choice.judge for choice in plan.choices if len(remaining(choice, made, lost) or ()) < 2}
    over = made.keys() | spared | chosen.keys()
    ready = []
    due: datetime | None = None
    for step in plan.steps:
        if step.name not in last:
            if over.issuperset(step.needs) and step.name not in idle:
                ready.append((step, 1))
            continue
        attempt = last[step.name]
        if attempt.status == "failed":
            if step.name in spared:
                continue
            if step.name in lost:
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
    last = _last(run.attempts)
    made = _made(last)
    steps = {planned.name: planned for planned in run.plan.steps}
    for choice, candidate in _chosen(run.plan, made, _lost(run.plan, last)).items():
        made[choice], steps[choice] = made[candidate], steps[candidate]

    def resolve(expression: Sequence[Reference]) -> str | Given | None:
        for each in expression:
            if each.source == "inputs":
                if each.name in run.plan.texts:
                    return run.plan.texts[each.name]
                if each.name in run.plan.media:
                    return StoredSource(run.job.attachments[run.plan.media[each.name]])
            elif (output := made.get(each.name)) is not None:
                return _readable(steps[each.name], output)
        return None

    step_input = StepInput(resolve)
    value = step_input.input(step.input)
    _, prepared = prepare_step(entry, _task(step), value, step_input, prefix=f"steps.{step.name}")
    # The client's own texts were checked before.
    written = written_fields(step.input, lambda one: resolve((one,)) is not None)
    texts = {field: given for field, given in value.items() if field in written}
    warnings = check_understood(entry, texts, prefix=f"steps.{step.name}")
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
        warnings=warnings,
    )
    return NewStep(id, step.model, encode(job))


def refused_step(step: PlannedStep, error: TollgateError) -> WorkflowEnded:
    """Return the end of a run of which a step refused its input."""
    problem = RequestError(error.code, f"The step {step.name} ({step.model}): {error}", error.param)
    return WorkflowEnded("failed", "invalid_input", error=problem)


def steps_done(run: WorkflowRun) -> int:
    """Return the number of steps that have succeeded."""
    return len({one.id.name for one in run.attempts if one.status == "succeeded"})


def _last(attempts: Sequence[StepAttempt]) -> dict[str, StepAttempt]:
    """Return the last attempt at each step."""
    last: dict[str, StepAttempt] = {}
    for attempt in attempts:
        if attempt.id.name not in last or attempt.id.attempt > last[attempt.id.name].id.attempt:
            last[attempt.id.name] = attempt
    return last


def _made(last: Mapping[str, StepAttempt]) -> dict[str, Output | None]:
    """Return the outputs of the steps that succeeded."""
    return {name: one.output for name, one in last.items() if one.status == "succeeded"}


def _lost(plan: WorkflowPlan, last: Mapping[str, StepAttempt]) -> set[str]:
    """Return the steps that failed and are not tried again."""
    return {
        step.name
        for step in plan.steps
        if (attempt := last.get(step.name)) is not None
        and attempt.status == "failed"
        and not _may_retry(step, attempt)
    }


def _spared(plan: WorkflowPlan, lost: set[str]) -> set[str]:
    """Return the lost candidates without which the run goes on, because others are left."""
    return {
        name
        for choice in plan.choices
        if not lost.issuperset(choice.candidates)
        for name in lost.intersection(choice.candidates)
    }


def _chosen(
    plan: WorkflowPlan, made: Mapping[str, Output | None], lost: set[str]
) -> dict[str, str]:
    """Return the candidate of each choice that has been made."""
    found = ((choice.name, choose(choice, made, lost)) for choice in plan.choices)
    return {name: candidate for name, candidate in found if candidate is not None}


def _readable(step: PlannedStep, output: Output) -> str | Given | None:
    """Return what other steps read of an output: its first text, image, video or audio."""
    makes = flows_as(_task(step))
    if makes == "text":
        return text_of(output)[: step.characters]
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

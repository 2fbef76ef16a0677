"""What comes next in a workflow, from its plan and from what has become of its steps. Pure.

Whoever asks at one time gets the same answer, so any gateway may ask: after a step has ended,
when another attempt is due, or because nobody has for a while.
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
from gateway.workflows.plan import StepInput, prepare_step
from gateway.workflows.store import NewStep, StepAttempt, WorkflowRun
from workers.contract.jobs import BlobRef, Job, RequestId, encode
from workers.contract.media import Medium


@dataclass(frozen=True, slots=True)
class WorkflowEnded:
    """The whole has come to its end."""

    status: Status
    reason: str
    output: Output | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Steps that can run now, each with the number of its attempt; ``due`` is when one that is to
    be tried again can run, if nothing else happens before."""

    steps: tuple[tuple[PlannedStep, int], ...]
    due: datetime | None = None


Next: TypeAlias = WorkflowEnded | Ready


def advance(plan: WorkflowPlan, attempts: Sequence[StepAttempt], *, now: datetime) -> Next:
    """Decide what is to be done; ``Ready`` with nothing while what runs is waited for."""
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
        tried = last[step.name]
        if tried.status == "failed":
            if not _tried_again(step, tried):
                return WorkflowEnded("failed", _code(tried), error=_problem(step, tried))
            again = _again(step, tried)
            if again is None or again <= now:
                ready.append((step, tried.id.attempt + 1))
            else:
                due = min(due or again, again)
        elif tried.status == "expired":
            return WorkflowEnded("expired", "deadline")
        elif tried.status == "cancelled":
            return WorkflowEnded("cancelled", "operator")
    return Ready(tuple(ready), due)


def job_of(run: WorkflowRun, step: PlannedStep, attempt: int, entry: CatalogEntry) -> NewStep:
    """Make the job of a step, of what its predecessors made. Raise ``TollgateError``."""
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
                return _flowing(steps[each.name], made[each.name])
        return None

    step_input = StepInput(resolve)
    value = step_input.input(step.input)
    _, prepared = prepare_step(entry, _task(step), value, step_input, prefix=f"steps.{step.name}")
    given: dict[str, Any] = prepared.input
    if step.max_tokens is not None:
        # What was held for, even if a shorter text than feared leaves room for a longer answer.
        given = {**given, "max_tokens": min(given["max_tokens"], step.max_tokens)}
    id = StepId(run.request_id, step.name, attempt)
    job = Job(
        request_id=RequestId(str(id)),
        account_id=run.job.account_id,
        model=step.model,
        task=step.task,
        input=given,
        limits=step.limits,
        # For its progress; what it writes or says nobody hears before the whole has ended.
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
    """The end of a workflow of which a step was given what it cannot take."""
    problem = RequestError(error.code, f"The step {step.name} ({step.model}): {error}", error.param)
    return WorkflowEnded("failed", "invalid_input", error=problem)


def steps_done(run: WorkflowRun) -> int:
    """How many steps have succeeded."""
    return len({one.id.name for one in run.attempts if one.status == "succeeded"})


def _flowing(step: PlannedStep, output: Output) -> str | Given | None:
    """What others read of a step's output: its first text, or its first picture, video or sound."""
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


def _tried_again(step: PlannedStep, attempt: StepAttempt) -> bool:
    return attempt.id.attempt <= step.retries and is_retried(_code(attempt))


def _again(step: PlannedStep, failed: StepAttempt) -> datetime | None:
    """When a step that failed may be tried again."""
    if failed.ended_at is None:
        return None
    seconds = step.backoff_ms / 1000 * 2 ** (failed.id.attempt - 1)
    return failed.ended_at + timedelta(seconds=min(seconds, BACKOFF_MAX_S))


def _code(attempt: StepAttempt) -> str:
    return attempt.error.code if attempt.error else "engine_error"


def _problem(step: PlannedStep, attempt: StepAttempt) -> RequestError:
    said = attempt.error.message if attempt.error else "it ended without an outcome."
    tries = f" {attempt.id.attempt} times" if attempt.id.attempt > 1 else ""
    return RequestError(
        _code(attempt), f"The step {step.name} ({step.model}) failed{tries}: {said}"
    )


def _task(step: PlannedStep) -> Any:
    return step.task

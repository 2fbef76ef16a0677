"""Plans a workflow submission: the steps that will run, and the maximum usage of each.

Outputs that are unknown before a step has run are assumed at their largest: texts have the maximum
length that other steps read, and images stand for any image. A plan's quote is therefore the sum of
upper bounds, and the hold covers every course that the run can take. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.catalog.ensembles import candidate_names, expanded, judge_name
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Task, flows_as
from gateway.catalog.workflow import (
    Reference,
    Step,
    Workflow,
    condition,
    fill,
    output_step,
    references,
    sole_expression,
)
from gateway.errors import InvalidRequest
from gateway.files.sources import Given, Source, StoredSource, StoredVoice, read_given
from gateway.ledger.workflow_plan import Choice, PlannedStep, WorkflowPlan, combined
from gateway.pricing import Bill, Price, UnpricedUsage, quote
from gateway.tasks.prepared import Prepared
from gateway.tasks.registry import choose_task, parse, prepare
from gateway.tasks.understanding import check_understood
from gateway.tasks.workflow_submission import WorkflowSubmission
from workers.contract.jobs import BlobRef, PromptWarning
from workers.contract.media import MediumKind

TEXT_MAX: Final = 32_000
"""Maximum length of a text input, in characters."""

_WIDEST: Final = "\U0001f7e6"
"""A character of four bytes, so that a text of these has the most bytes for its length."""
_PLACEHOLDER: Final = StoredSource(BlobRef("", 0, ""))
"""Stands for the media output of a step that has not run yet."""

_Value = str | Given | None


@dataclass(frozen=True, slots=True)
class StepQuote:
    """Maximum cost of one step, at the price in force for its model."""

    step: PlannedStep
    bill: Bill
    warnings: tuple[PromptWarning, ...]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A plan, with its attachments, maximum usage and maximum cost."""

    plan: WorkflowPlan
    prepared: Prepared
    bill: Bill
    steps: tuple[StepQuote, ...]
    warnings: tuple[PromptWarning, ...]
    """What the models of steps will not understand of the client's texts."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    texts: Mapping[str, str]
    media: Mapping[str, Given]

    def has(self, name: str) -> bool:
        return name in self.texts or name in self.media


@dataclass(frozen=True, slots=True)
class StepModels:
    """The models that steps may use, with their prices for the requesting account."""

    entry: Callable[[str], CatalogEntry]
    priced: Callable[[str], tuple[int, Price]]
    own: Price
    """Price of the workflow itself; without components it is priced by its steps."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """Builds a step's input. ``resolve`` returns a text or a medium, or None if neither exists."""

    resolve: Callable[[Sequence[Reference]], _Value]
    media: list[Given] = field(default_factory=list)
    """Media that were inserted, to be compared with the attachments that the model accepted."""

    def input(self, template: Mapping[str, Any]) -> dict[str, Any]:
        """Replace references by values; a field whose reference has no value is omitted."""
        return {
            name: value
            for name, given in template.items()
            if (value := self._filled(given)) is not None
        }

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self.input(value)
        if isinstance(value, list | tuple):
            return [one for each in value if (one := self._filled(each)) is not None]
        if not isinstance(value, str):
            return value
        alone = sole_expression(value)
        if alone is not None:
            found = self.resolve(alone)
            if found is not None and not isinstance(found, str):
                self.media.append(found)
            return found
        texts = {named: self._text(named) for _, named in references(value)}
        return fill(value, texts)

    def _text(self, named: tuple[Reference, ...]) -> str:
        found = self.resolve(named)
        return found if isinstance(found, str) else ""


def plan(
    entry: CatalogEntry, submission: WorkflowSubmission, models: StepModels, *, prefix: str
) -> PlannedRun:
    """Plan a submission. Raise ``InvalidRequest`` or ``NotFound``."""
    workflow = entry.workflow
    assert workflow is not None
    inputs = _read_inputs(entry, workflow, submission, prefix)
    chosen = _chosen(workflow, inputs)
    output = next((each.name for each in output_step(workflow) if each.name in chosen), None)
    if output is None:
        raise InvalidRequest(
            "nothing_to_do", f"With these inputs {entry.name} runs no step that has its output."
        )
    needed = _needed(chosen, inputs, output)
    # A judge reads the candidates of its step.
    every = {**{one.name: one for step in chosen.values() for one in expanded(step)}, **chosen}
    quotes = [
        _quoted(one, workflow, every, inputs, models, prefix=prefix)
        for name in needed
        for one in expanded(chosen[name])
    ]
    steps = tuple(one.step for one in quotes)
    run = WorkflowPlan(steps, output, choices=tuple(_choices(chosen[name] for name in needed)))
    delivered = next(step.limits for step in steps if step.name == run.output_step)
    limits = combined((step.limits for step in steps), delivered)
    by_steps = not models.own.components
    texts, media = dict(inputs.texts), list(inputs.media)
    return PlannedRun(
        msgspec.structs.replace(
            run,
            texts=texts,
            media={name: place for place, name in enumerate(media)},
            by_steps=by_steps,
        ),
        Prepared(
            input={"prompt": texts.get("prompt", ""), "inputs": texts},
            limits=limits,
            sources=tuple(
                Source(_kind(workflow, name), inputs.media[name], _param(prefix, name))
                for name in media
            ),
            stores=any(TASKS[_task(step)].makes in ("image", "video", "audio") for step in steps),
        ),
        _sum(one.bill for one in quotes) if by_steps else quote(models.own, limits),
        tuple(quotes),
        tuple(dict.fromkeys(warning for one in quotes for warning in one.warnings)),
    )


def prepare_step(
    entry: CatalogEntry,
    task: Task | None,
    value: Mapping[str, Any],
    step_input: StepInput,
    *,
    prefix: str,
) -> tuple[Task, Prepared]:
    """Check a step's input like a client's. Raise ``InvalidRequest``."""
    read = parse(task or entry.task, value, prefix=prefix)
    task = task or choose_task(entry, read)
    prepared = prepare(entry, read, task=task, prefix=prefix)
    if any(isinstance(source.given, StoredVoice) for source in prepared.sources):
        raise InvalidRequest(
            "unsupported_parameter",
            f"A workflow step can use the voices of {entry.name}, but not voices stored by an "
            "account.",
            param=prefix,
        )
    if len(prepared.sources) != len(step_input.media):
        raise InvalidRequest(
            "task_not_supported",
            f"{entry.name} cannot read another step's output in {task}.",
            param=prefix,
        )
    return task, prepared


def _read_inputs(
    entry: CatalogEntry, workflow: Workflow, submission: WorkflowSubmission, prefix: str
) -> _Inputs:
    texts: dict[str, str] = {}
    media: dict[str, Given] = {}
    for name, value in submission.given.items():
        declared = workflow.inputs.get(name)
        param = _param(prefix, name)
        if declared is None:
            raise InvalidRequest(
                "unknown_parameter",
                f"{entry.name} has no input {name!r}; it has {', '.join(workflow.inputs)}.",
                param=param,
            )
        if value is None:
            continue
        if declared.type != "text":
            try:
                media[name] = read_given(value)
            except ValueError as error:
                raise InvalidRequest(
                    "invalid_value", f"Invalid value for {param}: {error}.", param=param
                ) from None
        elif not isinstance(value, str) or len(value) > TEXT_MAX:
            raise InvalidRequest(
                "invalid_value",
                f"Invalid value for {param}: expected a text of at most {TEXT_MAX} characters.",
                param=param,
            )
        else:
            texts[name] = value
    for name, declared in workflow.inputs.items():
        if name in texts or name in media:
            continue
        if declared.default is not None:
            texts[name] = declared.default
        elif declared.required:
            param = _param(prefix, name)
            raise InvalidRequest(
                "missing_required_parameter", f"Missing required parameter: {param}.", param=param
            )
    return _Inputs(texts, media)


def _chosen(workflow: Workflow, inputs: _Inputs) -> dict[str, Step]:
    """Return the steps whose conditions hold."""
    found = {}
    for step in workflow.steps:
        required = condition(step)
        if required is None or inputs.has(required[0]) == required[1]:
            found[step.name] = step
    return found


def _needs(step: Step, chosen: Mapping[str, Step], inputs: _Inputs) -> set[str]:
    """Return the steps whose output a step reads: of each expression, the first that exists."""
    sources = _sources(step.input, _known(chosen, inputs))
    return {source.name for source in sources if source.source == "steps"}


def _known(chosen: Mapping[str, Step], inputs: _Inputs) -> Callable[[Reference], bool]:
    """Return whether a reference has a value in a plan."""
    return lambda one: one.name in chosen if one.source == "steps" else inputs.has(one.name)


def _sources(template: Any, has_value: Callable[[Reference], bool]) -> list[Reference]:
    """Return the references that a template takes its values from: of each expression, the first
    that has a value."""
    found = (next(filter(has_value, each), None) for _, each in references(template))
    return [source for source in found if source is not None]


def written_fields(
    input: Mapping[str, Any], has_value: Callable[[Reference], bool]
) -> frozenset[str]:
    """Return the fields of a step's input that contain the output of another step."""
    return frozenset(
        field
        for field, template in input.items()
        if any(source.source == "steps" for source in _sources(template, has_value))
    )


def _needed(chosen: Mapping[str, Step], inputs: _Inputs, output: str) -> list[str]:
    """Return the names of the output's step and all that it depends on, in the catalog's order."""
    wanted, open_names = {output}, [output]
    while open_names:
        for name in _needs(chosen[open_names.pop()], chosen, inputs) - wanted:
            wanted.add(name)
            open_names.append(name)
    return [name for name in chosen if name in wanted]


def _choices(steps: Iterable[Step]) -> Iterator[Choice]:
    for step in steps:
        if names := candidate_names(step):
            yield Choice(step.name, names, judge_name(step))


def _quoted(
    step: Step,
    workflow: Workflow,
    chosen: Mapping[str, Step],
    inputs: _Inputs,
    models: StepModels,
    *,
    prefix: str,
) -> StepQuote:
    entry = models.entry(step.model)
    has_value = _known(chosen, inputs)

    def resolve(expression: Sequence[Reference]) -> _Value:
        source = next(filter(has_value, expression), None)
        if source is None:
            return None
        if source.source == "inputs":
            name = source.name
            return inputs.texts[name] if name in inputs.texts else inputs.media[name]
        made = chosen[source.name]
        task = made.task or models.entry(made.model).task
        return _WIDEST * made.characters if flows_as(task) == "text" else _PLACEHOLDER

    step_input = StepInput(resolve)
    place = f"steps.{step.name}"
    value = step_input.input(step.input)
    try:
        task, prepared = prepare_step(entry, step.task, value, step_input, prefix=place)
    except InvalidRequest as error:
        raise _by_inputs(error, workflow, step, prefix) from None
    written = written_fields(step.input, has_value)
    known = {field: given for field, given in value.items() if field not in written}
    names = _client_names(step, has_value, prefix)
    warnings = check_understood(entry, known, prefix=place, names=names)
    price_id, price = models.priced(entry.name)
    try:
        bill = quote(price, prepared.limits)
    except UnpricedUsage as error:
        raise InvalidRequest(
            "nothing_to_do", f"This input leaves {entry.name} nothing to do: {error}."
        ) from None
    planned = PlannedStep(
        name=step.name,
        model=entry.name,
        task=task,
        price_id=price_id,
        limits=prepared.limits,
        input=msgspec.to_builtins(step.input),
        needs=tuple(sorted(_needs(step, chosen, inputs))),
        retries=step.retries,
        characters=step.characters,
        max_tokens=prepared.input.get("max_tokens"),
        backoff_ms=round(step.backoff_s * 1000),
    )
    return StepQuote(planned, bill, warnings)


def _client_names(
    step: Step, has_value: Callable[[Reference], bool], prefix: str
) -> dict[str, str]:
    """Return the fields of a step that are inputs of the workflow, with the inputs' names."""
    return {
        field: _param(prefix, sources[0].name)
        for field, template in step.input.items()
        if isinstance(template, str)
        and sole_expression(template) is not None
        and (sources := _sources(template, has_value))
    }


def _by_inputs(
    error: InvalidRequest, workflow: Workflow, step: Step, prefix: str
) -> InvalidRequest:
    """Return the refusal of a step's field with the names of the client's inputs that fill it."""
    field = (error.param or "").removeprefix(f"steps.{step.name}.").partition(".")[0]
    names = [
        name
        for _, expression in references(step.input.get(field))
        for each in expression
        if (name := _filling_input(workflow, each)) is not None
    ]
    if error.param is None or not names:
        return error
    params = [_param(prefix, name) for name in dict.fromkeys(names)]
    message = error.message.replace(error.param, " or ".join(params))
    return InvalidRequest(error.code, message, param=params[0])


def _filling_input(workflow: Workflow, reference: Reference) -> str | None:
    """Return the input that a reference needs: its own, or that by which its step is chosen."""
    if reference.source == "inputs":
        return reference.name
    for step in workflow.steps:
        if step.name == reference.name and (required := condition(step)) is not None:
            return required[0] if required[1] else None
    return None


def _sum(bills: Iterable[Bill]) -> Bill:
    bills = tuple(bills)
    return Bill(
        sum(bill.total_nanos for bill in bills),
        tuple(line for bill in bills for line in bill.lines),
    )


def _kind(workflow: Workflow, name: str) -> MediumKind:
    kind = workflow.inputs[name].type
    assert kind != "text"
    return kind


def _task(step: PlannedStep) -> Task:
    return step.task  # type: ignore[return-value]  # checked when it was planned


def _param(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def from_fields(entry: CatalogEntry, fields: Mapping[str, Any]) -> WorkflowSubmission:
    """Build a submission from a dialect's task fields: those that are set, by name."""
    assert entry.workflow is not None
    given = {name: value for name, value in fields.items() if value}
    if given.get("n") == 1 and "n" not in entry.workflow.inputs:
        del given["n"]
    for name in given:
        if name not in entry.workflow.inputs:
            raise InvalidRequest(
                "unsupported_parameter",
                f"{entry.name} is a workflow with the inputs {', '.join(entry.workflow.inputs)}; "
                f"{name} is not one of them.",
                param=name,
            )
    return WorkflowSubmission(given)

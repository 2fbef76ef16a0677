"""The schema of ``workflow`` in a catalog entry: inputs, steps, and the data flow between them.

A step is a request to another model of the catalog. Its input may refer to the client's inputs and
to outputs of earlier steps, as in ``${inputs.prompt}`` and ``${steps.draw.image}``; with
alternatives, as in ``${steps.enlarge | steps.draw}``, the first one that exists is used. Everything
that does not depend on a request is checked here, when the catalog is read. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StringConstraints

from gateway.catalog import ensembles
from gateway.catalog.ensembles import BestOf, Vote
from gateway.catalog.tasks import TASKS, Modality, Task, flows_as
from gateway.checks.strict import StrictModel

if TYPE_CHECKING:
    from gateway.catalog.schema import CatalogEntry

Place: TypeAlias = tuple[str | int, ...]
Conflict: TypeAlias = tuple[Place, str]
InputKind: TypeAlias = Literal["text", "image", "video", "audio"]

STEPS_MAX: Final = 32
INPUTS_MAX: Final = 32
RETRIES_MAX: Final = 5
BACKOFF_MAX_S: Final = 60.0
"""Maximum pause between two attempts at a step."""
READ_CHARACTERS: Final = 1000
"""Default number of characters of a step's text that other steps read."""

FIELDS: Final[Mapping[str, InputKind]] = {
    # Fields of a step's input that hold media, with their kind; all others hold text.
    "image": "image",
    "images": "image",
    "mask": "image",
    "video": "video",
    "audio": "audio",
    "recording": "audio",
}

_Label: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
_ModelName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=200)]

_EXPRESSION: Final = re.compile(r"\$\{([^{}]*)\}")
_NAME: Final = re.compile(
    r"inputs\.(?P<input>[a-z][a-z0-9_]*)"
    r"|steps\.(?P<step>[a-z][a-z0-9_]*)(\.(?P<kind>text|image|video|audio))?"
)
_WHEN: Final = re.compile(r"(?P<absent>not )?inputs\.(?P<input>[a-z][a-z0-9_]*)")


class _Strict(StrictModel):
    model_config = ConfigDict(frozen=True)


class WorkflowInput(_Strict):
    """An input that a client sends. It may be omitted if it has a default or is optional."""

    type: InputKind
    optional: StrictBool = False
    default: Annotated[str, StringConstraints(min_length=1, max_length=1000)] | None = None
    description: Annotated[str, StringConstraints(max_length=1000)] = ""

    @property
    def required(self) -> bool:
        return not self.optional and self.default is None


class Step(_Strict):
    """One request to another model, sent when everything that its input refers to exists."""

    name: _Label
    model: _ModelName
    task: Task | None = None
    input: Annotated[dict[str, Any], Field(min_length=1)]
    retries: Annotated[StrictInt, Field(ge=0, le=RETRIES_MAX)] = 0
    """Maximum number of further attempts after a transient failure."""
    backoff_s: Annotated[float, Field(strict=True, gt=0, le=BACKOFF_MAX_S)] = 1.0
    """Pause before the second attempt; it doubles before each further one."""
    when: str | None = None
    """``inputs.x`` or ``not inputs.x``: run only if the input was sent, or only if it was not."""
    characters: Annotated[StrictInt, Field(ge=1, le=32_000)] = READ_CHARACTERS
    """Number of characters of the step's text that other steps read; longer texts are cut."""
    best_of: BestOf | None = None
    vote: Vote | None = None

    @property
    def ensemble(self) -> Vote | None:
        """How the step chooses among several candidates; None if it is run once."""
        return self.best_of or self.vote


class Workflow(_Strict):
    inputs: Annotated[dict[_Label, WorkflowInput], Field(min_length=1, max_length=INPUTS_MAX)]
    steps: Annotated[tuple[Step, ...], Field(min_length=1, max_length=STEPS_MAX)]
    output: str

    @property
    def run_steps(self) -> tuple[Step, ...]:
        """The steps that are run, with candidates and judges in place of their ensembles."""
        return tuple(one for step in self.steps for one in ensembles.expanded(step))


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to an input or to a step's output; ``kind`` if it names the output's kind."""

    source: Literal["inputs", "steps"]
    name: str
    kind: InputKind | None = None

    def __str__(self) -> str:
        return f"{self.source}.{self.name}" + (f".{self.kind}" if self.kind else "")


class InvalidExpression(ValueError):
    """An expression is not a valid reference."""


def parse_expression(text: str) -> tuple[Reference, ...]:
    """Parse the text between the braces: references, in the order in which they are tried."""
    found = []
    for part in text.split("|"):
        name = _NAME.fullmatch(part.strip())
        if name is None:
            raise InvalidExpression(
                f"${{{text}}} is not a valid reference; accepted are inputs.<name>, steps.<name> "
                "and steps.<name>.text, .image, .video or .audio, alternatives separated by |"
            )
        if name["input"]:
            found.append(Reference("inputs", name["input"]))
        else:
            found.append(Reference("steps", name["step"], name["kind"]))  # type: ignore[arg-type]  # the pattern's
    return tuple(found)


def sole_expression(text: str) -> tuple[Reference, ...] | None:
    """Parse a text that consists of one expression; return None for any other text."""
    found = _EXPRESSION.fullmatch(text)
    return parse_expression(found[1]) if found else None


def fill(text: str, value: Mapping[tuple[Reference, ...], str]) -> str:
    """Replace the expressions in a text by values."""
    return _EXPRESSION.sub(lambda found: value[parse_expression(found[1])], text)


def references(value: Any, place: Place = ()) -> Iterator[tuple[Place, tuple[Reference, ...]]]:
    """Yield every expression in an input, with its place. Raise ``InvalidExpression``."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from references(inner, (*place, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from references(inner, (*place, index))
    elif isinstance(value, str):
        rest = _EXPRESSION.sub("", value)
        if "${" in rest:
            raise InvalidExpression(f"{value[:60]!r} has ${{ without a closing }}")
        for found in _EXPRESSION.finditer(value):
            yield place, parse_expression(found[1])


def condition(step: Step) -> tuple[str, bool] | None:
    """Return the input that a step depends on, and whether it must be given.

    Raise ``InvalidExpression``.
    """
    if step.when is None:
        return None
    found = _WHEN.fullmatch(step.when)
    if found is None:
        raise InvalidExpression(
            f"{step.when!r} is not a valid condition; accepted are inputs.<name> and not "
            "inputs.<name>"
        )
    return found["input"], not found["absent"]


def output_step(workflow: Workflow) -> tuple[Reference, ...]:
    """Return the steps whose output is the workflow's: the first one that runs counts."""
    found = sole_expression(workflow.output)
    if found is None or any(each.source != "steps" for each in found):
        raise InvalidExpression(
            f"{workflow.output!r} is not a valid output; accepted is the output of a step, such "
            "as ${steps.draw}"
        )
    return found


def is_retried(code: str) -> bool:
    """Whether a failure can be transient: not an invalid input, and not three crashes."""
    return code not in _FINAL


_FINAL: Final = frozenset(
    {
        "invalid_input",
        "context_length_exceeded",
        "unsupported_parameter",
        "upstream_rejected",
        "output_too_large",
        "worker_lost",
    }
)


# --- Checks of an entry by itself ----------------------------------------------------------------


def conflicts(workflow: Workflow) -> Iterator[Conflict]:
    """Find errors in a workflow that do not depend on its models; places are relative to it."""
    names = [step.name for step in workflow.steps]
    for index, step in enumerate(workflow.steps):
        if names.index(step.name) != index:
            yield ("steps", index, "name"), f"{step.name!r} is already the name of a step"
        yield from _condition_conflicts(workflow, index, step)
        try:
            for place, expression in references(step.input):
                at = ("steps", index, "input", *place)
                yield from _unknown(workflow, expression, at)
        except InvalidExpression as error:
            yield ("steps", index, "input"), str(error)
    for place, message in ensembles.conflicts(workflow.steps):
        yield ("steps", *place), message
    if (count := len(workflow.run_steps)) > STEPS_MAX:
        yield ("steps",), f"with their candidates, these are {count} steps; at most {STEPS_MAX}"
    for name, given in workflow.inputs.items():
        if given.default is not None and given.type != "text":
            yield ("inputs", name, "default"), "only a text can have a default"
        if given.default is not None and given.optional:
            yield ("inputs", name, "optional"), "redundant: an input with a default is optional"
    try:
        yield from _unknown(workflow, output_step(workflow), ("output",))
    except InvalidExpression as error:
        yield ("output",), str(error)
    try:
        TopologicalSorter(dependencies(workflow)).prepare()
    except CycleError as error:
        circle = " → ".join(reversed(error.args[1]))
        yield ("steps",), f"these steps wait for each other: {circle}"
    except InvalidExpression:
        return  # reported above


def _unread(workflow: Workflow) -> Iterator[Conflict]:
    read = set().union(*dependencies(workflow).values())
    read |= {each.name for each in output_step(workflow)}
    for index, step in enumerate(workflow.steps):
        if step.name not in read:
            yield ("steps", index), f"the output of step {step.name} is never used; leave it out"


def dependencies(workflow: Workflow) -> dict[str, set[str]]:
    """Return the steps that each step depends on."""
    return {
        step.name: {
            each.name
            for _, expression in references(step.input)
            for each in expression
            if each.source == "steps"
        }
        for step in workflow.steps
    }


def _condition_conflicts(workflow: Workflow, index: int, step: Step) -> Iterator[Conflict]:
    try:
        found = condition(step)
    except InvalidExpression as error:
        yield ("steps", index, "when"), str(error)
        return
    if found is None:
        return
    given = workflow.inputs.get(found[0])
    if given is None:
        yield (
            ("steps", index, "when"),
            f"unknown input {found[0]!r}; the inputs are {', '.join(workflow.inputs)}",
        )
    elif not given.optional:
        yield ("steps", index, "when"), f"the input {found[0]!r} is not optional"


def _unknown(
    workflow: Workflow, expression: tuple[Reference, ...], place: Place
) -> Iterator[Conflict]:
    steps = [step.name for step in workflow.steps]
    for each in expression:
        known = list(workflow.inputs) if each.source == "inputs" else steps
        if each.name not in known:
            yield place, f"{each} does not exist; the {each.source} are {', '.join(known)}"


# --- Checks against the other entries ------------------------------------------------------------


def misfits(entry: CatalogEntry, models: Mapping[str, CatalogEntry]) -> Iterator[Conflict]:
    """Find steps that the catalog's models cannot run, and references of the wrong kind."""
    workflow = entry.workflow
    assert workflow is not None
    if any(True for _ in conflicts(workflow)):
        return  # reported by ``conflicts``
    for place, message in _unread(workflow):
        yield ("workflow", *place), message
    kinds: dict[str, Modality] = {}
    for index, step in enumerate(workflow.steps):
        at: Place = ("workflow", "steps", index)
        model = models.get(step.model)
        if model is None:
            yield (*at, "model"), f"unknown model {step.model!r}; name a model of the catalog"
        elif model.workflow is not None:
            yield (*at, "model"), f"{step.model} is a workflow, and workflows cannot be nested"
        elif step.task is not None and step.task not in (model.task, *model.also):
            tasks = ", ".join((model.task, *model.also))
            yield (*at, "task"), f"{step.model} does {tasks}, not {step.task}"
        elif unfit := tuple(ensembles.misfits(step, models)):
            for inner, message in unfit:
                yield (*at, *inner), message
        else:
            kinds[step.name] = flows_as(step.task or model.task)
    if len(kinds) < len(workflow.steps):
        return
    for index, step in enumerate(workflow.steps):
        model = models[step.model]
        able = (step.task,) if step.task else (model.task, *model.also)
        for place, expression in references(step.input):
            at = ("workflow", "steps", index, "input", *place)
            for each in expression:
                yield from _misfit(each, _kind(each, workflow, kinds), able, step, place, at)
    for each in output_step(workflow):
        made = kinds[each.name]
        if each.kind not in (None, made):
            yield ("workflow", "output"), f"the step {each.name} produces {made}, not {each.kind}"
        elif made != flows_as(entry.task):
            yield (
                ("workflow", "output"),
                f"the step {each.name} produces {made}, but {entry.task} produces "
                f"{TASKS[entry.task].makes}",
            )


def _kind(each: Reference, workflow: Workflow, kinds: Mapping[str, Modality]) -> Modality:
    return workflow.inputs[each.name].type if each.source == "inputs" else kinds[each.name]


def _misfit(
    each: Reference, made: Modality, tasks: Sequence[Task], step: Step, place: Place, at: Place
) -> Iterator[Conflict]:
    """Report why a reference does not fit its field."""
    if each.kind not in (None, made):
        yield at, f"the step {each.name} produces {made}, not {each.kind}"
        return
    field = str(place[0])
    wanted = FIELDS.get(field)
    text = step.input[field] if len(place) == 1 else None
    if len(place) == 2 and field == "images" and isinstance(step.input[field], list | tuple):
        text = step.input[field][place[1]]
    if made == "text" and wanted is not None:
        yield at, f"{each} is text, but {field} holds {wanted}"
    elif made in ("embedding", "ranking"):
        yield at, f"{each} is {made}, which no model can read"
    elif made != "text" and wanted != made:
        yield at, f"{each} is {made}, but {field} holds {wanted or 'text'}"
    elif made != "text" and all(made not in TASKS[task].reads for task in tasks):
        yield at, f"{each} is {made}, which {step.model} does not read in {', '.join(tasks)}"
    elif made != "text" and not (isinstance(text, str) and sole_expression(text)):
        yield at, f"{each} is {made}, so it must be the only content of its field"

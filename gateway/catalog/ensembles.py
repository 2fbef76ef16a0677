"""Steps of a workflow that choose among several candidates: their schema, checks and expansion.

``best_of`` lets a judge choose, ``vote`` the majority. Each candidate, and the judge, is a step of
its own, so it is quoted, held and charged like any other. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from pydantic import ConfigDict, Field, StrictInt, StringConstraints

from gateway.catalog.tasks import TASKS
from gateway.checks.strict import StrictModel

if TYPE_CHECKING:
    from gateway.catalog.schema import CatalogEntry
    from gateway.catalog.workflow import Step

Place: TypeAlias = tuple[str | int, ...]
Conflict: TypeAlias = tuple[Place, str]

CANDIDATES_MAX: Final = 8
NAME_MAX: Final = 34
"""Maximum length of the step's name, to which ``_judge`` is added."""

_ModelName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Vote(StrictModel):
    """The answer that most candidates give; of equally many, the one that came first."""

    model_config = ConfigDict(frozen=True)

    n: Annotated[StrictInt, Field(ge=2, le=CANDIDATES_MAX)]
    """Number of candidates."""
    models: Annotated[tuple[_ModelName, ...], Field(max_length=CANDIDATES_MAX)] = ()
    """Models of the candidates, in turn. Default: the step's."""


class BestOf(Vote):
    """The candidate that a judge, another model, prefers."""

    judge: _ModelName
    criterion: Annotated[str, StringConstraints(pattern=r"^[^$]+$", max_length=1000)] = (
        "the most correct and helpful answer"
    )
    max_tokens: Annotated[StrictInt, Field(ge=1, le=32_000)] = 16
    """Maximum tokens of the verdict, of which the first number counts."""


def candidate_names(step: Step) -> tuple[str, ...]:
    """Return the names of a step's candidates; empty unless it is an ensemble."""
    count = step.ensemble.n if step.ensemble is not None else 0
    return tuple(f"{step.name}_{number}" for number in range(1, count + 1))


def judge_name(step: Step) -> str | None:
    """Return the name of the step that judges, if there is one."""
    return f"{step.name}_judge" if step.best_of is not None else None


def expanded(step: Step) -> tuple[Step, ...]:
    """Return the steps that are run for a step: itself, or its candidates and their judge."""
    if step.ensemble is None:
        return (step,)
    models = step.ensemble.models or (step.model,)
    plain = {"best_of": None, "vote": None}
    found = []
    for place, name in enumerate(candidate_names(step)):
        given = dict(step.input)
        if isinstance(given.get("seed"), int):
            # Otherwise all would be the same.
            given["seed"] += place
        changes = {"name": name, "model": models[place % len(models)], "input": given}
        found.append(step.model_copy(update={**plain, **changes}))
    if step.best_of is not None:
        found.append(_judge(step, step.best_of))
    return tuple(found)


def _judge(step: Step, best_of: BestOf) -> Step:
    names = candidate_names(step)
    texts = [
        f"Candidate {number}:\n${{steps.{name}.text}}" for number, name in enumerate(names, start=1)
    ]
    content = "\n\n".join(
        (
            f"Several candidates answered the same request. Choose {best_of.criterion}.",
            f"Request:\n{_request(step.input)}",
            *texts,
            f"Reply with the number of the best candidate, 1 to {len(names)}, and nothing else.",
        )
    )
    given = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": best_of.max_tokens,
        "temperature": 0,
    }
    update = {
        "name": judge_name(step),
        "model": best_of.judge,
        "task": "text-generation",
        "input": given,
        "best_of": None,
        "vote": None,
    }
    return step.model_copy(update=update)


def _request(given: Mapping[str, Any]) -> str:
    """Return the text of a step's input, with its references."""
    if isinstance(given.get("prompt"), str):
        return str(given["prompt"])
    found: list[str] = []
    messages = given.get("messages")
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list | tuple) else ({"text": content},)
        texts = (part.get("text") for part in parts if isinstance(part, dict))
        found += [text for text in texts if isinstance(text, str)]
    return "\n\n".join(found)


# --- Checks ---------------------------------------------------------------------------------------


def conflicts(steps: Sequence[Step]) -> Iterator[Conflict]:
    """Find errors that do not depend on the models; places are relative to the steps."""
    names = {step.name for step in steps}
    for index, step in enumerate(steps):
        if step.best_of is not None and step.vote is not None:
            yield (index, "vote"), "a step has either `best_of` or `vote`"
        if step.ensemble is None:
            continue
        field = "best_of" if step.best_of is not None else "vote"
        if len(step.name) > NAME_MAX:
            yield (index, "name"), f"at most {NAME_MAX} characters, since candidates add theirs"
        if len(step.ensemble.models) > step.ensemble.n:
            yield (
                (index, field, "models"),
                f"{len(step.ensemble.models)} models for {step.ensemble.n} candidates; raise `n`",
            )
        if taken := sorted(names & {one.name for one in expanded(step)}):
            yield (index, "name"), f"{taken[0]!r} is the name of one of its candidates too"


def misfits(step: Step, models: Mapping[str, CatalogEntry]) -> Iterator[Conflict]:
    """Find candidates and judges that cannot do what is asked; places are relative to the step."""
    if step.ensemble is None:
        return
    field = "best_of" if step.best_of is not None else "vote"
    if message := _unfit(step.model, models, step.task):
        yield ("model",), message
    for place, name in enumerate(step.ensemble.models):
        if message := _unfit(name, models, step.task):
            yield (field, "models", place), message
    if step.best_of is not None and (
        message := _unfit(step.best_of.judge, models, "text-generation")
    ):
        yield (field, "judge"), message


def _unfit(name: str, models: Mapping[str, CatalogEntry], task: str | None) -> str | None:
    model = models.get(name)
    if model is None:
        return f"unknown model {name!r}; name a model of the catalog"
    if model.workflow is not None:
        return f"{name} is a workflow, and workflows cannot be nested"
    if task is not None and task not in (model.task, *model.also):
        return f"{name} does {', '.join((model.task, *model.also))}, not {task}"
    if TASKS[task or model.task].makes != "text":
        return f"{name} produces {TASKS[model.task].makes}; only texts can be chosen among"
    return None

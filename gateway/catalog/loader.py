"""Reads a catalog file: returns a checked ``Catalog``, or reports every problem with its position.

All problems are reported together, each with file, line and column, the value and what is accepted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, get_args

from pydantic import BaseModel, ValidationError

from gateway.catalog.advice import findings
from gateway.catalog.document import Document, Flaw, Place, Unreadable
from gateway.catalog.ensembles import BestOf, Vote
from gateway.catalog.market.contract_checks import Finding
from gateway.catalog.names import repeated
from gateway.catalog.problems import CatalogError, CatalogProblem, Level
from gateway.catalog.rules import Conflicts, route
from gateway.catalog.schema import (
    Catalog,
    CatalogEntry,
    DefaultParameters,
    Dialect,
    Engine,
    Limits,
    PriceLine,
    Quality,
    Upstream,
    Vocabulary,
)
from gateway.catalog.tasks import TASKS
from gateway.catalog.vocabulary.files import NoWords, with_words
from gateway.catalog.workflow import Step, Workflow, WorkflowInput
from gateway.pricing import UNITS

SHOWN_MAX: Final = 60

Inspect: TypeAlias = Callable[[Path, Catalog], Mapping[str, Sequence[Finding]]]
"""Returns findings by the names of entries."""

_SECTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "models": CatalogEntry,
    "price": PriceLine,
    "cost": PriceLine,
    "limits": Limits,
    "upstream": Upstream,
    "workflow": Workflow,
    "inputs": WorkflowInput,
    "steps": Step,
    "best_of": BestOf,
    "vote": Vote,
    "default_parameters": DefaultParameters,
    "qualities": Quality,
    "vocabulary": Vocabulary,
}
_ACCEPTED: Final[Mapping[str, str]] = {
    "models": "a list of entries",
    "name": 'the name that clients send, such as "acme/small-1.5"',
    "task": f"one of {', '.join(TASKS)}",
    "price": 'a list, such as [{unit: request, amount: "0.035"}]',
    "cost": 'a list, such as [{unit: request, amount: "0.02"}]',
    "unit": f"one of {', '.join(UNITS)}",
    "amount": 'USD as a decimal string in quotes, such as "0.035"',
    "url": 'a URL, such as "https://api.example.com/v1"',
    "engine": f"one of {', '.join(get_args(Engine))}",
    "dialect": f"one of {', '.join(get_args(Dialect))}",
}
_PATTERNS: Final[Mapping[str, str]] = {
    "name": "accepted are letters, digits and . _ : / -, a letter or digit first",
    "url": "accepted is an http:// or https:// URL without user or password",
    "aliases": "accepted are letters, digits and . _ : / -, a letter or digit first",
    "sizes": 'accepted is width and height in pixels, such as "1024x768"',
    "credential": "accepted is the name of an environment variable, such as ACME_API_KEY",
}


def load_catalog(path: Path) -> Catalog:
    """Read and check a catalog file. Raise ``CatalogError``, or ``OSError`` if it is unreadable."""
    return read_catalog(path.read_bytes(), path)


def read_catalog(content: bytes, path: Path) -> Catalog:
    """Check what a catalog file contains, or is to contain. Raise ``CatalogError``.

    ``path`` is where it is or will be: what it refers to is relative to it.
    """
    return _read(content, path)[0]


def _read(content: bytes, path: Path) -> tuple[Catalog, Document]:
    try:
        document = Document(content.decode())
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise CatalogError(
            [CatalogProblem(str(path), line, 1, "", "invalid UTF-8; save the file as UTF-8")]
        ) from None
    except Unreadable as error:
        raise CatalogError([_problem(path, error.flaw)]) from None
    problems = [_problem(path, flaw) for flaw in document.repeated_keys]
    catalog = None
    try:
        catalog = Catalog.model_validate({} if document.value is None else document.value)
    except ValidationError as error:
        for place, message in (*complaints(error), *_across(document.value)):
            problems.append(_problem_at(path, document, place, message))
    if catalog is not None:
        models = []
        for index, entry in enumerate(_with_aliases(catalog)):
            try:
                models.append(with_words(entry, path.resolve().parent))
            except NoWords as error:
                place = ("models", index, "vocabulary", "file")
                problems.append(_problem_at(path, document, place, str(error)))
        catalog = catalog.model_copy(update={"models": tuple(models)})
    if problems or catalog is None:
        raise CatalogError(_once_per_position(problems))
    return catalog, document


def _with_aliases(catalog: Catalog) -> Iterator[CatalogEntry]:
    """Yield the entries, each also with its aliases from the catalog's block."""
    for entry in catalog.models:
        more = tuple(alias for alias, name in catalog.aliases.items() if name == entry.name)
        yield entry.model_copy(update={"aliases": (*entry.aliases, *more)}) if more else entry


def check(path: Path, inspect: Inspect | None = None) -> tuple[CatalogProblem, ...]:
    """Return all problems of a catalog file. It can be loaded if there are none, or if each of them
    is a warning or contradicts the contract of a vendor's model.

    ``inspect`` finds more in a catalog without mistakes.
    """
    try:
        return check_content(path.read_bytes(), path, inspect)[1]
    except OSError as error:
        return (CatalogProblem(str(path), 1, 1, "", f"cannot be read: {error.strerror}"),)


def check_content(
    content: bytes, path: Path, inspect: Inspect | None = None
) -> tuple[Catalog | None, tuple[CatalogProblem, ...]]:
    """Return a catalog, None if it cannot be loaded, and all of its problems."""
    try:
        catalog, document = _read(content, path)
    except CatalogError as error:
        return None, error.problems
    more = inspect(path, catalog) if inspect is not None else {}
    return catalog, tuple(_advice(path, catalog, document, more))


def _advice(
    path: Path, catalog: Catalog, document: Document, more: Mapping[str, Sequence[Finding]]
) -> Iterator[CatalogProblem]:
    """Yield what is wrong with a catalog that can be loaded."""
    for index, entry in enumerate(catalog.models):
        for place, message, level in (*findings(entry), *more.get(entry.name, ())):
            yield _problem_at(path, document, ("models", index, *place), message, level)


def _problem(path: Path, flaw: Flaw) -> CatalogProblem:
    return CatalogProblem(str(path), flaw.position.line, flaw.position.column, "", flaw.message)


def _problem_at(
    path: Path, document: Document, place: Place, message: str, level: Level = "error"
) -> CatalogProblem:
    at = document.position(place)
    model = _entry_name(document.value, place)
    return CatalogProblem(str(path), at.line, at.column, dotted(place), message, level, model)


def _entry_name(document: Any, place: Place) -> str | None:
    """Return the name of the entry that a place is in, unless the name itself is the place."""
    match place:
        case ("models", int(index), *rest) if rest != ["name"]:
            entry = document["models"][index]
            name = entry.get("name") if isinstance(entry, dict) else None
            return name if isinstance(name, str) else None
    return None


def _once_per_position(problems: Sequence[CatalogProblem]) -> list[CatalogProblem]:
    """Remove duplicates, which arise if aliases repeat an error in several entries."""
    distinct: dict[tuple[int, int, str], CatalogProblem] = {}
    for problem in problems:
        distinct.setdefault((problem.line, problem.column, problem.message), problem)
    return [distinct[key] for key in sorted(distinct)]


def _across(document: Any) -> Iterator[tuple[Place, str]]:
    """Yield conflicts across entries, which the schema does not check if an entry is invalid."""
    models = document.get("models") if isinstance(document, dict) else None
    entries = [
        entry if isinstance(entry, dict) else {}
        for entry in (models if isinstance(models, list) else [])
    ]
    yield from repeated([(entry.get("name"), entry.get("aliases")) for entry in entries])
    for index, entry in enumerate(entries):
        given = route(
            engine=entry.get("engine") is not None or entry.get("workflow") is not None,
            upstream=entry.get("upstream") is not None,
        )
        for _, message in given if entry else ():
            yield ("models", index), message


def complaints(error: ValidationError) -> Iterator[tuple[Place, str]]:
    """Yield the place and the explanation of each error of an entry or a part of one."""
    for found in error.errors(include_url=False):
        place: Place = tuple(part for part in found["loc"] if part != "[key]")
        conflicts = found.get("ctx", {}).get("error")
        if isinstance(conflicts, Conflicts):
            for inner, message in conflicts.found:
                yield place + inner, message
        # Pydantic also reports a list as too short if its only item is invalid.
        elif not (found["type"] == "too_short" and found["input"]):
            yield place, _explain(found, place)


def _explain(found: Mapping[str, Any], place: Place) -> str:
    """Describe the value that was found and what is accepted."""
    kind, value, name = found["type"], found["input"], _last_name(place)
    message = str(found["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if kind == "value_error":
        return message
    if kind == "extra_forbidden":
        section = next((part for part in reversed(place[:-1]) if part in _SECTIONS), "")
        known = list(_SECTIONS.get(str(section), Catalog).model_fields)
        return f"unknown field {name!r}; {_nearest(name, known)}"
    if kind == "missing":
        accepted = f"; accepted is {_ACCEPTED[name]}" if name in _ACCEPTED else ""
        return f"{name!r} is missing{accepted}"
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", found["ctx"]["expected"])
        if isinstance(value, str) and options:
            return f"{_shown(value)} is unknown; {_nearest(value, options)}"
    if kind == "string_pattern_mismatch" and name in _PATTERNS:
        return f"{_shown(value)} is invalid; {_PATTERNS[name]}"
    if kind == "string_type" and not isinstance(value, (dict, list, type(None))):
        return f"YAML reads {_shown(value)}, which is not a string; write it in quotes"
    if kind == "tuple_type":
        return f"found {_shown(value)}; accepted is {_ACCEPTED.get(name, 'a list')}"
    if kind in ("model_type", "dict_type"):
        return f"found {_shown(value)}; accepted are fields, each with a value"
    return f"{message} (got {_shown(value)})"


def _nearest(word: str, options: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, options, n=1)
    accepted = f"accepted: {', '.join(options)}"
    return f"did you mean {near[0]}? ({accepted})" if near else accepted


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."


def _last_name(place: Place) -> str:
    return next((part for part in reversed(place) if isinstance(part, str)), "")


def dotted(place: Place) -> str:
    """Return a place as text, such as ``price[0].unit``."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")

"""Reads a catalog file: YAML in, a checked ``Catalog`` out, or every problem with its place.

All problems are found at once, each with file, line, what was found and what would be accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel, ValidationError

from gateway.catalog.schema import Catalog, Entry, Limits, PriceLine, Upstream
from gateway.pricing import UNITS

Place: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a catalog."""

    file: str
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        where = f" {self.path}:" if self.path else ""
        return f"{self.file}:{self.line}:{where} {self.message}"


class CatalogError(Exception):
    """A catalog that cannot be sold from; ``problems`` lists everything that is wrong."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def load_catalog(path: Path) -> Catalog:
    """Read and check a catalog file. Raise ``CatalogError``, or ``OSError`` if it is unreadable."""
    text = path.read_text(encoding="utf-8")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise CatalogError([Problem(str(path), line, "", f"no YAML: {error.problem}")]) from None
    if node is None:
        raise CatalogError([Problem(str(path), 1, "", "the file is empty; it needs `models:`")])
    lines = _Lines(node)
    problems = [
        Problem(str(path), line, key, f"{key!r} is given twice")
        for line, key in _duplicate_keys(node)
    ]
    document = yaml.safe_load(text)
    catalog = None
    try:
        catalog = Catalog.model_validate(document)
    except ValidationError as error:
        problems += [
            _problem(path, lines, found)
            for found in error.errors(include_url=False)
            # Said of a list whose only item is wrong itself, and that was said already.
            if not (found["type"] == "too_short" and found["input"])
        ]
    problems += _duplicate_names(path, lines, document)
    if problems or catalog is None:
        raise CatalogError(sorted(problems, key=lambda problem: problem.line))
    return catalog


def check(path: Path) -> tuple[Problem, ...]:
    """List what is wrong with a catalog file; nothing if it can be sold from."""
    try:
        load_catalog(path)
    except CatalogError as error:
        return error.problems
    except OSError as error:
        return (Problem(str(path), 1, "", f"cannot be read: {error.strerror}"),)
    return ()


class _Lines:
    """Finds the line on which a place of the document stands."""

    def __init__(self, root: yaml.Node) -> None:
        self._root = root

    def find(self, place: Place) -> int:
        node, line = self._root, self._root.start_mark.line + 1
        for part in place:
            child = self._child(node, part)
            if child is None:
                break
            line, node = child
        return line

    @staticmethod
    def _child(node: yaml.Node, part: str | int) -> tuple[int, yaml.Node] | None:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            child = node.value[part]
            return child.start_mark.line + 1, child
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == part:
                    return key.start_mark.line + 1, value
        return None


def _problem(path: Path, lines: _Lines, found: Any) -> Problem:
    place: Place = tuple(found["loc"])
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        known = _known_fields(place)
        near = difflib.get_close_matches(str(place[-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"accepted are {', '.join(known)}"
        message = f"unknown field {place[-1]!r}; {hint}"
    elif found["type"] == "missing":
        message = f"{place[-1]!r} is missing"
        if place[-1] == "unit":
            message += f"; one of {', '.join(UNITS)}"
    elif found["type"] not in ("value_error", "assertion_error"):
        message += f" (got {found['input']!r})"
    return Problem(str(path), lines.find(place), _dotted(place), message)


def _known_fields(place: Place) -> list[str]:
    owner: type[BaseModel] = Catalog
    if "price" in place:
        owner = PriceLine
    elif "upstream" in place[:-1]:
        owner = Upstream
    elif "limits" in place[:-1]:
        owner = Limits
    elif place[0] == "models" and len(place) > 1:
        owner = Entry
    return list(owner.model_fields)


def _duplicate_keys(node: yaml.Node) -> Iterator[tuple[int, str]]:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen and key.value != "<<":
                yield key.start_mark.line + 1, key.value
            seen.add(key.value)
            yield from _duplicate_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _duplicate_keys(child)


def _duplicate_names(path: Path, lines: _Lines, document: Any) -> list[Problem]:
    models = document.get("models") if isinstance(document, dict) else None
    seen: dict[str, int] = {}
    problems = []
    for index, entry in enumerate(models if isinstance(models, list) else []):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            continue
        line = lines.find(("models", index, "name"))
        if name in seen:
            message = f"{name!r} is on sale already, on line {seen[name]}; names must differ"
            problems.append(Problem(str(path), line, _dotted(("models", index, "name")), message))
        seen.setdefault(name, line)
    return problems


def _dotted(place: Place) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")

"""A text that may become the catalog: its problems, what it changes for customers, and its lines
beside those of another text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypedDict

from gateway.catalog.editing.changes import CatalogChange, Effect, compare
from gateway.catalog.loader import check_content
from gateway.catalog.picking.typical import Find
from gateway.catalog.problems import CatalogProblem
from gateway.catalog.reloads import digest_of
from gateway.catalog.schema import CatalogEntry

TEXT_MAX: Final = 500_000
"""Characters of a catalog that is sent."""
CONTEXT: Final = 3
"""Unchanged lines around a change."""
_EXAMPLE: Final = Path(__file__).with_name("example.yaml")


@dataclass(frozen=True, slots=True)
class Draft:
    """A checked text; ``models`` is None if it cannot be loaded."""

    sha256: str
    problems: Sequence[CatalogProblem]
    models: int | None
    changes: Sequence[CatalogChange]

    @property
    def can_be_loaded(self) -> bool:
        return self.models is not None


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of a comparison, with its numbers in the two texts."""

    kind: Literal["same", "removed", "added", "gap"]
    old: int | None
    new: int | None
    text: str


class CatalogProblemView(TypedDict):
    line: int
    column: int
    path: str
    model: str | None
    level: str
    message: str


class CatalogChangeView(TypedDict):
    """What changes for the customers of a model."""

    model: str
    field: str
    effect: Effect
    sentence: str


class CatalogDiffView(TypedDict):
    """What a text would change; ``models`` is null if it cannot be loaded."""

    object: Literal["catalog.diff"]
    sha256: str
    models: int | None
    problems: list[CatalogProblemView]
    changes: list[CatalogChangeView]


def examine(
    content: bytes, path: Path, old: Sequence[CatalogEntry], *, in_force: Find | None = None
) -> Draft:
    """Check a text as the file at ``path``, and compare it with the entries on sale."""
    catalog, problems = check_content(content, path)
    if catalog is None:
        return Draft(digest_of(content), problems, None, ())
    changes = compare(old, catalog.models, in_force=in_force)
    return Draft(digest_of(content), problems, len(catalog.models), changes)


@cache
def example_text() -> str:
    """Return a catalog with a commented entry for each task."""
    return _EXAMPLE.read_text(encoding="utf-8")


def compare_lines(old: str, new: str) -> list[DiffLine]:
    """Return the lines that differ, with some unchanged ones around them."""
    before, after = old.splitlines(), new.splitlines()
    matcher = SequenceMatcher(None, before, after, autojunk=len(before) > 5000)
    found: list[DiffLine] = []
    for group in matcher.get_grouped_opcodes(CONTEXT):
        if found:
            found.append(DiffLine("gap", None, None, ""))
        for tag, first, last, start, stop in group:
            if tag == "equal":
                found += [
                    DiffLine("same", first + at + 1, start + at + 1, before[first + at])
                    for at in range(last - first)
                ]
                continue
            found += [DiffLine("removed", at + 1, None, before[at]) for at in range(first, last)]
            found += [DiffLine("added", None, at + 1, after[at]) for at in range(start, stop)]
    return found


def diff_view(draft: Draft) -> CatalogDiffView:
    return {
        "object": "catalog.diff",
        "sha256": draft.sha256,
        "models": draft.models,
        "problems": [
            {
                "line": one.line,
                "column": one.column,
                "path": one.path,
                "model": one.model,
                "level": one.level,
                "message": one.message,
            }
            for one in draft.problems
        ],
        "changes": [
            {
                "model": one.model,
                "field": one.field,
                "effect": one.effect,
                "sentence": one.sentence,
            }
            for one in draft.changes
        ],
    }

"""Problems of a catalog file: each with its place. Imports nothing, as every command needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class CatalogProblem:
    """An error in a catalog file, at ``path``, such as ``models[3].price[0].unit``."""

    file: str
    line: int
    column: int
    path: str
    message: str
    level: Level = "error"
    """A catalog with warnings alone is valid."""
    model: str | None = None
    """Name of the entry that has the error, if it has a name."""

    def __str__(self) -> str:
        of = f" of {self.model}" if self.model else ""
        where = f" {self.path}{of}:" if self.path else ""
        level = " warning:" if self.level == "warning" else ""
        return f"{self.file}:{self.line}:{self.column}:{level}{where} {self.message}"


class CatalogError(Exception):
    """The catalog is invalid; ``problems`` lists every error."""

    def __init__(self, problems: Sequence[CatalogProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

"""Problems of a catalog file: each with its place. Imports nothing, as every command needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CatalogProblem:
    """An error in a catalog file, at ``path``, such as ``models[3].price[0].unit``."""

    file: str
    line: int
    column: int
    path: str
    message: str

    def __str__(self) -> str:
        where = f" {self.path}:" if self.path else ""
        return f"{self.file}:{self.line}:{self.column}:{where} {self.message}"


class CatalogError(Exception):
    """The catalog is invalid; ``problems`` lists every error."""

    def __init__(self, problems: Sequence[CatalogProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

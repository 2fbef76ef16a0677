"""What a dialect gives so that its requests can be made in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.ledger.closed import ClosedRequest
from gateway.settings import Settings
from gateway.tasks.submission import Submission

Entries: TypeAlias = Callable[[str], CatalogEntry]
"""Finds the entry of a model by its name. Raises ``NotFound``."""


def _never(_: Mapping[str, Any]) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class BatchEndpoint:
    """One path of the live API as a batch uses it."""

    path: str
    tasks: frozenset[Task]
    read: Callable[[Mapping[str, Any], Entries], Submission]
    """Check a body as the live endpoint does, and make it an order. Raises ``TollgateError``."""
    answer: Callable[[ClosedRequest, Mapping[str, Any]], bytes]
    """The JSON body with which the live endpoint answers a request that succeeded; its body is
    what was asked."""
    forgets: Callable[[Mapping[str, Any]], bool] = _never
    """Whether what a body asks for is not to be fetched again outside the batch's files."""
    brings_files: bool = False
    """Whether a body may bring pictures along, and an answer is in the blob store."""

    def body_bytes_max(self, settings: Settings) -> int:
        """Of one line, as of a body of the live endpoint."""
        return settings.media_body_bytes_max if self.brings_files else settings.body_bytes_max

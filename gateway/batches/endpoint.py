"""The interface through which batches run requests of a dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gateway.catalog.schema import CatalogEntry
from gateway.ledger.closed import ClosedRequest
from gateway.settings import Settings
from gateway.tasks.submission import Submission

Entries: TypeAlias = Callable[[str], CatalogEntry]
"""Returns the entry of a model by its name. Raises ``NotFound``."""


def _never(_: Mapping[str, Any]) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class BatchEndpoint:
    """One endpoint of the live API, as used by batches."""

    path: str
    read: Callable[[Mapping[str, Any], Entries], Submission]
    """Check a body like the live endpoint; return its submission. Raises ``TollgateError``."""
    answer: Callable[[ClosedRequest, Mapping[str, Any]], bytes]
    """Return the JSON with which the live endpoint answers a request that succeeded. The mapping is
    the request's body."""
    forgets: Callable[[Mapping[str, Any]], bool] = _never
    """Whether the output of a body may not be kept outside the batch's files."""
    brings_files: bool = False
    """Whether bodies can have attachments, and outputs are blobs."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The dialect's names of our parameters, for errors."""

    def body_bytes_max(self, settings: Settings) -> int:
        """Maximum size of a line's body in bytes, the same as for the live endpoint."""
        return settings.media_body_bytes_max if self.brings_files else settings.body_bytes_max

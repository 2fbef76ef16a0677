"""A checked input and its maximum usage, which the hold covers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.catalog.schema import CatalogEntry, Limits
from gateway.errors import InvalidRequest
from gateway.files.sources import Source
from workers.contract.jobs import Usage


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked input; ``limits`` is the most that running it can use."""

    input: dict[str, Any]
    limits: Usage
    batch_key: str = ""
    sources: tuple[Source, ...] = ()
    """Attachments still to be fetched, in the order of the worker contract."""
    choices: int | None = None
    """Number of choices that share the token limit, if the request named no length; else None."""
    stores: bool = False
    """Whether intermediate outputs are stored as blobs, whatever the task itself produces."""
    measured_by: Callable[[CatalogEntry, Prepared, int | None], Prepared] | None = None
    """Bounds the input anew by the duration in milliseconds that its attachment states, if any."""


def gpu_us_max(limits: Limits) -> int:
    return round((limits.gpu_seconds or 0) * 1_000_000)


def over(param: str, value: float, most: str) -> InvalidRequest:
    return InvalidRequest("invalid_value", f"{param} is {value}, but {most}.", param=param)

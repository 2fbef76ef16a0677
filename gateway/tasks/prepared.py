"""A checked input and the most that it can use, which is what a hold covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.catalog.schema import Limits
from gateway.errors import InvalidRequest
from gateway.files.sources import Source
from workers.contract.jobs import Usage


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked input, and the most that running it can use."""

    input: dict[str, Any]
    limits: Usage
    batch_key: str = ""
    sources: tuple[Source, ...] = ()
    """What is still to be fetched and attached, in the order that the contract has."""
    choices: int | None = None
    """Of a text whose length was left open: how many answers share the limit on its tokens."""
    stores: bool = False
    """Whether something comes to lie in the store on the way, whatever the task makes."""


def gpu_us_max(limits: Limits) -> int:
    return round((limits.gpu_seconds or 0) * 1_000_000)


def over(param: str, value: float, most: str) -> InvalidRequest:
    return InvalidRequest("invalid_value", f"{param} is {value}, but {most}.", param=param)

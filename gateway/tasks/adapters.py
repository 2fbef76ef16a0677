"""The LoRA adapters that a request chooses from the list of a catalog entry. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

from pydantic import Field, StringConstraints

from gateway.catalog.schema import CatalogEntry
from gateway.errors import InvalidRequest
from gateway.tasks.prepared import over

ADAPTERS_MAX: Final = 4
SCALE_MAX: Final = 100.0

Adapters: TypeAlias = Annotated[
    dict[
        Annotated[str, StringConstraints(min_length=1, max_length=40)],
        Annotated[float, Field(ge=0, le=SCALE_MAX)] | None,
    ],
    Field(max_length=ADAPTERS_MAX),
]
"""Scales by name; None is the adapter's own."""


def choose_adapters(
    entry: CatalogEntry, requested: Mapping[str, float | None], prefix: str
) -> dict[str, float]:
    """Return the requested adapters with their scales. Raise ``InvalidRequest`` if one is not
    listed or too strong."""
    known = entry.known_adapters
    chosen: dict[str, float] = {}
    for name, scale in requested.items():
        if name not in known:
            listed = ", ".join(known) or "none"
            raise InvalidRequest(
                "invalid_value",
                f"{entry.name} has no adapter {name}; it has: {listed}.",
                param=f"{prefix}adapters.{name}",
            )
        most = known[name].scale_max
        if scale is not None and scale > most:
            raise over(f"{prefix}adapters.{name}", scale, f"{entry.name} takes at most {most:g}")
        chosen[name] = known[name].scale if scale is None else scale
    return chosen

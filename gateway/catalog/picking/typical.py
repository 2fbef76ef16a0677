"""The price of a typical order: one number per model, whatever the units of its price are.

An order has every attribute that a price can depend on, so its quote is what it would be charged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import yaml
from pydantic import Field, StrictInt, TypeAdapter

from gateway.catalog.derived import once_per_entry
from gateway.catalog.schema import CatalogEntry, CatalogModel
from gateway.catalog.tasks import TASKS, Task
from gateway.pricing import Unbookable, UnpricedUsage, quote
from workers.contract.jobs import Usage

_FILE: Final = Path(__file__).with_name("typical_orders.yaml")

SIZES: Final = (
    *("input_tokens", "output_tokens", "images"),
    *("video_seconds", "audio_seconds", "characters"),
)
"""Quantities of an order that somebody may choose."""
Find: TypeAlias = Callable[[str], CatalogEntry | None]
"""Finds a model's entry, at the price of the account that asks."""
_Quantity: TypeAlias = Annotated[StrictInt, Field(ge=1)] | None


class TypicalOrder(CatalogModel):
    """What one result of a task usually takes."""

    input_tokens: _Quantity = None
    output_tokens: _Quantity = None
    images: _Quantity = None
    video_seconds: _Quantity = None
    audio_seconds: _Quantity = None
    characters: _Quantity = None
    steps: _Quantity = None
    gpu_seconds: _Quantity = None


@cache
def typical_orders() -> Mapping[Task, TypicalOrder]:
    orders: Mapping[Task, TypicalOrder] = TypeAdapter(dict[Task, TypicalOrder]).validate_python(
        yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    )
    if missing := TASKS.keys() - orders.keys():
        raise ValueError(f"{_FILE.name} lacks {', '.join(sorted(missing))}")
    return orders


def sized_order(task: Task, sizes: Mapping[str, int]) -> TypicalOrder:
    """Return the typical order of a task with other quantities, where it has these at all."""
    order = typical_orders()[task]
    given = {name: size for name, size in sizes.items() if getattr(order, name) is not None}
    return order.model_copy(update=given)


def typical_usage(entry: CatalogEntry, task: Task, sizes: Mapping[str, int] | None = None) -> Usage:
    """Return the usage of a typical order, or one of other sizes, within the limits of an entry."""
    order, limits, default = sized_order(task, sizes or {}), entry.limits, entry.default_parameters
    attributes = {
        "quality": default.quality or next(iter(entry.qualities), None),
        "size": next(iter(entry.sizes), None),
        "resolution": next(iter(entry.resolutions), None),
    }
    return Usage(
        requests=1,
        input_tokens=round(_least(order.input_tokens, limits.context_tokens)),
        output_tokens=round(_least(order.output_tokens, limits.output_tokens)),
        images=order.images or 0,
        video_ms=round(_least(order.video_seconds, limits.seconds) * 1000),
        audio_ms=round(_least(order.audio_seconds, limits.seconds) * 1000),
        characters=round(_least(order.characters, limits.characters)),
        steps=round(_least(default.steps or order.steps, limits.steps)),
        gpu_us=round(_least(order.gpu_seconds, limits.gpu_seconds) * 1_000_000),
        attributes={name: value for name, value in attributes.items() if value is not None}
        | entry.unguided,
    )


def typical_nanos(
    entry: CatalogEntry,
    find: Find,
    task: Task | None = None,
    sizes: Mapping[str, int] | None = None,
) -> int | None:
    """Return the price of one typical result, for a task of the entry or its first one.

    A workflow that is priced by its steps costs what each of them does once. ``sizes`` replace
    quantities of the order. None if the order cannot be priced.
    """
    if entry.workflow is not None and not entry.price:
        steps = []
        for step in entry.workflow.run_steps:
            model = find(step.model)
            steps.append(None if model is None else typical_nanos(model, find, step.task, sizes))
        return None if None in steps else sum(nanos or 0 for nanos in steps)
    task = task if task in entry.also else entry.task
    return _quoted(entry, task, sizes) if sizes else _by_task(entry)[task]


@once_per_entry
def _by_task(entry: CatalogEntry) -> Mapping[Task, int | None]:
    return {task: _quoted(entry, task) for task in (entry.task, *entry.also)}


def _quoted(entry: CatalogEntry, task: Task, sizes: Mapping[str, int] | None = None) -> int | None:
    try:
        return quote(entry.selling_price, typical_usage(entry, task, sizes)).total_nanos
    except (Unbookable, UnpricedUsage):
        return None


def _least(quantity: int | None, limit: float | None) -> float:
    return min(quantity or 0, limit) if limit is not None else quantity or 0

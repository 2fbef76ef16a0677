"""Compares catalog entries with what GMI Cloud's request queue publishes about its models. Pure.

The queue publishes names, types and bounds of parameters, whether a model is active, and its price
with its unit. The forms read here are those seen in use; what has another form is not compared.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.catalog.costs import largest_loss
from gateway.catalog.market.contract import Contract, Parameter, contract_of
from gateway.catalog.problems import Level
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS
from gateway.pricing import NANOS_PER_USD, Component, Price, Unit, format_usd

Difference = tuple[Level, str]
_MICRO: Final = NANOS_PER_USD // 1_000_000
_PER: Final = re.compile(r"(?:per |/)?\s*([0-9][0-9,]*)?\s*(k|m)?\s*([a-z_ ]+?)s?$")
_WORDS: Final[Mapping[str, Unit]] = {
    "": "request",
    "usd": "request",
    "request": "request",
    "asset": "request",
    "call": "request",
    "generation": "request",
    "image": "image",
    "character": "character",
    "char": "character",
    "video_second": "video_second",
    "audio_second": "audio_second",
}


def differences(entry: CatalogEntry, model: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield how an entry and its contract differ from what its upstream publishes of the model."""
    status = str(model.get("status") or "active")
    if status.lower() != "active":
        yield "error", f"the model's status is {status!r}"
    parameters = model.get("parameters")
    contract = contract_of(entry)
    if contract is not None and isinstance(parameters, list) and parameters:
        published = {
            str(one["name"]): one
            for one in parameters
            if isinstance(one, dict) and isinstance(one.get("name"), str)
        }
        yield from _parameters(contract, published)
    price = read_price(entry, model)
    if price is not None:
        yield from _prices(entry, price)


def read_price(entry: CatalogEntry, model: Mapping[str, Any]) -> Price | None:
    """Return the published price; None if there is none, or its form or unit is unknown.

    A whole number is in millionths of a dollar, a decimal string in dollars.
    """
    info = model.get("price_info")
    if not isinstance(info, dict):
        return None
    nanos = _nanos(info.get("price"))
    words = [str(info.get(name) or "").lower() for name in ("unit", "pricing_type")]
    makes = TASKS[entry.task].makes
    for word in words:
        found = _PER.match(word.strip()) if word.strip() not in ("", "usd") else None
        if found is None:
            continue
        count = int((found[1] or "1").replace(",", "")) * {"k": 1000, "m": 1_000_000}.get(
            found[2] or "", 1
        )
        name = found[3].strip().replace(" ", "_")
        unit = _WORDS.get(name)
        if name in ("second", "sec"):
            unit = "video_second" if makes == "video" else "audio_second"
        if unit is not None and nanos:
            return Price((Component(unit, nanos, count),))
        return None
    return Price((Component("request", nanos),)) if nanos else None


def _nanos(price: Any) -> int | None:
    if isinstance(price, bool):
        return None
    if isinstance(price, int):
        return price * _MICRO
    if isinstance(price, str | float):
        try:
            return round(float(price) * NANOS_PER_USD)
        except ValueError:
            return None
    return None


def _prices(entry: CatalogEntry, price: Price) -> Iterator[Difference]:
    published = _described(price)
    loss = largest_loss(entry, price)
    if loss is not None:
        yield (
            "error",
            f"it is published at {published}, so a request can cost "
            f"${format_usd(loss.cost_nanos)}{' or more' if loss.is_unbounded else ''}, and sells "
            f"for ${format_usd(loss.price_nanos)}",
        )
    stated = entry.buying_price
    if stated is None:
        yield "warning", f"it is published at {published}; state that as `cost`"
    elif stated.components != price.components:
        yield "warning", f"it is published at {published}, but `cost` is {_described(stated)}"


def _described(price: Price) -> str:
    return " and ".join(
        f"${format_usd(one.amount_nanos)} per {'' if one.per == 1 else f'{one.per:,} '}{one.unit}"
        for one in price.components
    )


def _parameters(contract: Contract, published: Mapping[str, Any]) -> Iterator[Difference]:
    known = {one.sent_as for one in contract.parameters}
    added = [name for name in published if name not in known]
    for parameter in contract.parameters:
        found = published.get(parameter.sent_as)
        if found is None:
            near = difflib.get_close_matches(parameter.sent_as, added, n=1, cutoff=0.5)
            hint = f"; did it become {near[0]!r}?" if near else ""
            level: Level = "error" if parameter.required else "warning"
            yield level, f"the model has no parameter {parameter.sent_as!r}{hint}"
        else:
            yield from _facts(parameter, found)
    for name in added:
        if published[name].get("required"):
            yield "error", f"the model requires {name!r}, which the contract does not have"
        else:
            yield "warning", f"the model has a parameter {name!r} that the contract does not have"


def _facts(parameter: Parameter, published: Mapping[str, Any]) -> Iterator[Difference]:
    name = parameter.sent_as
    if published.get("required") and not parameter.required:
        yield "warning", f"{name!r} is required"
    theirs = published.get("options")
    if isinstance(theirs, list) and theirs and parameter.options:
        accepted = {str(one.get("value") if isinstance(one, dict) else one) for one in theirs}
        ours = {parameter.values.get(str(one), str(one)) for one in parameter.options}
        if gone := sorted(ours - accepted):
            level: Level = "error" if parameter.is_sure("options") else "warning"
            yield level, f"{name!r} no longer accepts {', '.join(gone)}"
        if new := sorted(accepted - ours):
            yield "warning", f"{name!r} also accepts {', '.join(new)}"
    for bound, field in (("min", "min_value"), ("max", "max_value")):
        mine, limit = getattr(parameter, bound), published.get(field)
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if (
            number
            and mine is not None
            and mine != limit
            and parameter.type in ("integer", "number")
        ):
            yield "warning", f"{name!r} has the {bound}imum {limit}, not {mine}"

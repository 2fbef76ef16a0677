"""Finds requests that can cost the operator more than they sell for. Pure.

Cost and price are sums over quantities, so their difference is largest at an end of each quantity's
range. Every combination of ends is compared, for every attribute that a price or a cost names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Final

from gateway.catalog.market.contract import Contract, contract_of
from gateway.catalog.market.contract_checks import Finding
from gateway.catalog.schema import CatalogEntry
from gateway.pricing import (
    Price,
    Unbookable,
    Unit,
    UnpricedUsage,
    charge,
    discounted,
    format_usd,
    measure_of,
)
from workers.contract.jobs import Usage

UNBOUNDED: Final = 1_000_000
"""Quantity that stands for one that nothing bounds."""
_WORDS: Final[Mapping[Unit, str]] = {
    "input_token": "input tokens",
    "cached_input_token": "input tokens",
    "output_token": "output tokens",
    "image": "images",
    "video_second": "seconds of video",
    "audio_second": "seconds of audio",
    "character": "characters",
}
_LIMITS: Final[Mapping[Unit, str]] = {
    "input_token": "context_tokens",
    "cached_input_token": "context_tokens",
    "output_token": "output_tokens",
    "image": "images",
    "video_second": "seconds",
    "audio_second": "seconds",
    "character": "characters",
}
_PARAMETERS: Final[Mapping[Unit, tuple[str, ...]]] = {
    "video_second": ("seconds",),
    "audio_second": ("seconds",),
    "character": ("text", "prompt"),
}


@dataclass(frozen=True, slots=True)
class Range:
    """The quantity of a unit that a request can have; ``most`` is None if nothing bounds it."""

    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Loss:
    """The request on which the operator loses most."""

    cost_nanos: int
    price_nanos: int
    quantities: Mapping[Unit, int]
    attributes: Mapping[str, str]
    is_unbounded: bool


def buying_price(entry: CatalogEntry) -> tuple[Price, bool] | None:
    """Return what an entry's upstream charges, and whether it is only what the vendor's contract
    presumes."""
    if entry.buying_price is not None:
        return entry.buying_price, False
    contract = contract_of(entry)
    if contract is None or contract.presumed_cost is None:
        return None
    return contract.presumed_cost.price, True


def largest_loss(entry: CatalogEntry, cost: Price, price: Price | None = None) -> Loss | None:
    """Return the request on which the operator loses most at a cost, or None if none loses.

    ``price`` is by default that of the entry outside of batches.
    """
    price = price or entry.selling_price
    contract = contract_of(entry)
    units = [unit for unit in _WORDS if unit in cost.rates or unit in price.rates]
    ranges = [_range(entry, contract, unit) for unit in units]
    ends = [(one.least, UNBOUNDED if one.most is None else one.most) for one in ranges]
    worst: Loss | None = None
    for attributes in _attributes(entry, cost):
        for values in product(*ends):
            quantities = dict(zip(units, values, strict=True))
            usage = usage_of(quantities, attributes)
            try:
                found = charge(cost, usage).total_nanos
                paid = charge(price, usage).total_nanos
            except (Unbookable, UnpricedUsage):
                continue
            if found > paid and (
                worst is None or found - paid > worst.cost_nanos - worst.price_nanos
            ):
                at_most = [
                    one.most is None and value == UNBOUNDED
                    for one, value in zip(ranges, values, strict=True)
                ]
                worst = Loss(found, paid, quantities, attributes, any(at_most))
    return worst


def cost_findings(entry: CatalogEntry) -> Iterator[Finding]:
    """Warn of requests that can cost more than they sell for."""
    found = buying_price(entry)
    if found is None:
        return
    cost, is_presumed = found
    loss, prefix = largest_loss(entry, cost), ""
    place = ("price",) if is_presumed else ("cost",)
    if loss is None and entry.discount is not None:
        with contextlib.suppress(Unbookable):
            in_batch = discounted(entry.selling_price, Fraction(entry.discount))
            loss, prefix = largest_loss(entry, cost, in_batch), "in a batch, "
            place = ("batch_discount",)
    if loss is None:
        return
    units = [unit for unit in loss.quantities if unit in cost.rates]
    request = ", ".join(_shown(unit, loss.quantities[unit]) for unit in units) or "a request"
    if loss.attributes:
        request += f" ({', '.join(f'{k} {v}' for k, v in sorted(loss.attributes.items()))})"
    is_one = sum(loss.quantities[unit] for unit in units) <= 1
    verb = ("presumably " if is_presumed else "") + ("costs" if is_one else "cost")
    parts = [
        f"{prefix}{request} {verb} ${format_usd(loss.cost_nanos)} upstream, and sell"
        f"{'s' if is_one else ''} for ${format_usd(loss.price_nanos)}"
    ]
    if loss.is_unbounded:
        parts.append(f"nothing bounds them; set limits.{_LIMITS[units[0]]}")
    if prefix:
        parts.append("lower batch_discount, or do not sell it in batches (`batch: false`)")
    elif (covered := _covered(entry, cost)) is not None:
        parts.append(f"the price covers {covered}")
    if is_presumed:
        parts.append("set `cost` to what you pay")
    yield place, "; ".join(parts), "warning"


def _covered(entry: CatalogEntry, cost: Price) -> str | None:
    """Return the quantity that a price per request covers, if the cost has only one unit."""
    price = entry.selling_price
    if len(cost.rates) != 1 or set(price.rates) != {"request"} or len(price.components) != 1:
        return None
    ((unit, rates),) = cost.rates.items()
    if unit not in _WORDS or len(rates) != 1:
        return None
    component, paid = rates[0].component, price.components[0].amount_nanos
    return _shown(unit, paid * component.per // component.amount_nanos)


def usage_of(quantities: Mapping[Unit, int], attributes: Mapping[str, str]) -> Usage:
    """Return the usage of one request with whole quantities of some units."""
    measured: dict[str, int] = {"requests": 1}
    for unit, quantity in quantities.items():
        name, parts = measure_of(unit)
        measured[name] = quantity * parts
    return Usage(**measured, attributes=dict(attributes))


def _range(entry: CatalogEntry, contract: Contract | None, unit: Unit) -> Range:
    limits = entry.limits
    if unit == "image":
        return Range(1, limits.images or 1)
    if unit == "output_token":
        return Range(1, (limits.output_tokens or 0) * (limits.choices or 1) or None)
    if unit in ("input_token", "cached_input_token"):
        most = limits.context_tokens
        return Range(0, None if most is None else most * (limits.inputs or 1))
    least, most = 1, None
    limit = getattr(limits, _LIMITS[unit])
    if limit is not None:
        most = -(-limit // 1)
    for name in _PARAMETERS[unit]:
        parameter = None if contract is None else contract.find(name)
        if parameter is None:
            continue
        numbers = [one for one in parameter.options if isinstance(one, int | float)]
        if numbers and parameter.is_sure("options"):
            low, high = min(numbers), max(numbers)
        elif parameter.max is not None and parameter.is_sure("max"):
            low, high = parameter.min or 1, parameter.max
        else:
            continue
        least = max(1, round(low))
        most = round(high) if most is None else min(most, round(high))
        break
    return Range(least, None if most is None else max(round(most), least))


def _attributes(entry: CatalogEntry, cost: Price) -> Iterator[Mapping[str, str]]:
    """Yield the combinations of attributes that the lines of cost and price name, and others."""
    named: dict[str, dict[str, None]] = {}
    for price in (cost, entry.selling_price):
        for component in price.components:
            for name, value in component.when.items():
                named.setdefault(name, {})[value] = None
    choices = [[(name, value) for value in values] + [None] for name, values in named.items()]
    for combination in product(*choices):
        yield dict(one for one in combination if one is not None)


def _shown(unit: Unit, quantity: int) -> str:
    words = _WORDS[unit]
    if quantity == 1:
        words = words.replace("seconds", "second") if "second" in words else words.removesuffix("s")
    return f"{quantity:,} {words}"

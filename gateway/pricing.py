"""Prices, quotes and charges in nano-dollars: pure, exact, and the only place that rounds.

A price is a sum of components, each an amount for so many units. ``charge`` applies it to measured
usage, ``quote`` to the limits of a request; both are the same sum in rational arithmetic, rounded
up once to the next nano-dollar. Knows no database, no catalog and no clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from workers.contract.jobs import Usage

NANOS_PER_USD: Final = 1_000_000_000
NANOS_MAX: Final = 2**63 - 1

_AMOUNT: Final = re.compile(r"(-)?([0-9]{1,20})(?:\.([0-9]{1,40}))?", re.ASCII)

Unit: TypeAlias = Literal[
    "request",
    "input_token",
    "cached_input_token",
    "output_token",
    "image",
    "video_second",
    "audio_second",
    "character",
    "step",
    "gpu_second",
]
UNITS: Final[tuple[Unit, ...]] = get_args(Unit)

ServiceClass: TypeAlias = Literal["standard", "batch"]
"""How a request is served, each class at a price of its own: at once, or when there is room."""
SERVICE_CLASSES: Final[tuple[ServiceClass, ...]] = get_args(ServiceClass)

_MEASURES: Final[Mapping[Unit, tuple[str, int]]] = {
    # Which quantity of a usage a unit counts, and how many of those make one unit.
    "request": ("requests", 1),
    "input_token": ("input_tokens", 1),
    "cached_input_token": ("cached_input_tokens", 1),
    "output_token": ("output_tokens", 1),
    "image": ("images", 1),
    "video_second": ("video_ms", 1000),
    "audio_second": ("audio_ms", 1000),
    "character": ("characters", 1),
    "step": ("steps", 1),
    "gpu_second": ("gpu_us", 1_000_000),
}

_NOTHING: Final = Fraction(0)

UNBOUNDED_UNITS: Final = frozenset({"step", "gpu_second"})
"""Measured without a limit, unless a request names one; a price on them needs that limit."""


class Unbookable(ValueError):
    """A bill of more than the ledger can hold."""


class UnpricedUsage(Exception):
    """The price does not say what this usage costs: no price, no run."""


@dataclass(frozen=True, slots=True)
class Component:
    """``amount_nanos`` for every ``per`` units, where the usage's attributes match ``when``."""

    unit: Unit
    amount_nanos: int
    per: int = 1
    when: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Price:
    """An immutable price. A charge is at least ``minimum_nanos``."""

    components: tuple[Component, ...]
    minimum_nanos: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a bill: ``quantity`` units at ``price_nanos`` for every ``per`` of them.

    ``quantity`` is a decimal string, since seconds are measured in fractions.
    """

    unit: str
    quantity: str
    price_nanos: int
    per: int
    amount_nanos: int


@dataclass(frozen=True, slots=True)
class Bill:
    """What a usage costs; the lines' amounts sum exactly to the total."""

    total_nanos: int
    lines: tuple[Line, ...]


def charge(price: Price, usage: Usage) -> Bill:
    """Price a measured usage.

    A cached input token costs what an input token costs where it has no price of its own. Raise
    ``UnpricedUsage`` if a unit is priced but not under these attributes, or if nothing is priced.
    """
    chosen: list[tuple[Component, Fraction]] = []
    for unit in UNITS:
        quantity = _quantity(usage, unit)
        if not quantity:
            continue
        component = _component(price, unit, usage.attributes)
        if component is None and unit == "cached_input_token":
            component = _component(price, "input_token", usage.attributes)
        if component is not None:
            chosen.append((component, quantity))
        elif any(other.unit == unit for other in price.components):
            raise UnpricedUsage(f"{unit} has no price for {dict(usage.attributes)}")
    return _bill(chosen, price.minimum_nanos)


def quote(price: Price, limits: Usage) -> Bill:
    """Return the most that any usage within the limits can cost.

    With every attribute given that a condition names, each unit counts at the component that
    ``charge`` chooses. Where attributes are left open, the dearest one that it can come to choose
    counts; an input token may turn out to be cached or not, so it counts at the dearer of the two.
    """
    chosen: list[tuple[Component, Fraction]] = []
    for unit in UNITS:
        quantity = _quantity(limits, unit)
        candidates = _open_components(price, unit, limits.attributes)
        if candidates and not quantity and unit in UNBOUNDED_UNITS:
            raise UnpricedUsage(f"{unit} is priced, but the request has no limit on it")
        if unit == "input_token":
            candidates += _open_components(price, "cached_input_token", limits.attributes)
            quantity += _quantity(limits, "cached_input_token")
        if quantity and candidates and unit != "cached_input_token":
            chosen.append((max(candidates, key=_rate), quantity))
    return _bill(chosen, price.minimum_nanos)


def is_exact_quote(price: Price) -> bool:
    """Whether a quote is the charge itself, if all that was ordered is made: it counts only what is
    sent, under no conditions."""
    return all(one.unit in ("request", "character") and not one.when for one in price.components)


def discounted(price: Price, discount: Fraction) -> Price:
    """Give a price less a part of it (0 < ``discount`` < 1).

    Nothing is lost by rounding: where an amount would have a fraction, ``per`` grows instead. The
    minimum is rounded up. Raise ``Unbookable`` if an amount comes to be too large.
    """
    if not 0 < discount < 1:
        raise ValueError(f"a discount is {discount}; it must be between 0 and 1")
    left = 1 - discount
    components = []
    for component in price.components:
        amount = component.amount_nanos * left
        if amount.numerator > NANOS_MAX:
            raise Unbookable(f"{component.unit}: {amount.numerator} nano-dollars is too much")
        components.append(
            replace(
                component,
                amount_nanos=amount.numerator,
                per=component.per * amount.denominator,
            )
        )
    minimum = price.minimum_nanos * left
    return Price(tuple(components), -(-minimum.numerator // minimum.denominator))


def clip(usage: Usage, limits: Usage) -> tuple[Usage, bool]:
    """Cut a usage down to its limits, and say whether anything was cut.

    Usage above a limit is our mistake, not the customer's bill, and so is making something else
    than the limits name: what they leave open is as measured. Device time and steps have no limit
    unless one is named, and are then priced by nobody.
    """
    cached = min(usage.cached_input_tokens, limits.input_tokens + limits.cached_input_tokens)
    fresh = min(usage.input_tokens, limits.input_tokens + limits.cached_input_tokens - cached)
    clipped = Usage(
        requests=min(usage.requests, limits.requests or 1),
        input_tokens=fresh,
        cached_input_tokens=cached,
        output_tokens=min(usage.output_tokens, limits.output_tokens),
        images=min(usage.images, limits.images),
        video_ms=min(usage.video_ms, limits.video_ms),
        audio_ms=min(usage.audio_ms, limits.audio_ms),
        characters=min(usage.characters, limits.characters),
        steps=min(usage.steps, limits.steps) if limits.steps else usage.steps,
        gpu_us=min(usage.gpu_us, limits.gpu_us) if limits.gpu_us else usage.gpu_us,
        attributes={**usage.attributes, **limits.attributes},
    )
    # An attribute that the worker leaves unsaid is filled in, which cuts nothing.
    told = {**limits.attributes, **usage.attributes}
    return clipped, clipped != msgspec.structs.replace(usage, attributes=told)


def device_cost(gpu_us: int, hour_nanos: int) -> int:
    """Give what device time costs its operator, rounded up to the nano-dollar."""
    return -(-gpu_us * hour_nanos // 3_600_000_000)


def format_usd(nanos: int) -> str:
    """Write an amount as a decimal string of USD, without exponent or trailing zeros."""
    whole, rest = divmod(abs(nanos), NANOS_PER_USD)
    text = f"{whole}.{rest:09d}".rstrip("0").rstrip(".")
    return f"-{text}" if nanos < 0 else text


def parse_usd(text: str) -> int:
    """Read a decimal string of USD. Raise ``ValueError`` unless it is whole nano-dollars."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no amount; write USD as a decimal, such as 0.035")
    sign, whole, decimals = found.groups()
    decimals = (decimals or "").rstrip("0")
    if len(decimals) > 9:
        raise ValueError(f"{text!r} has more than 9 decimals; use `per` for a finer price")
    nanos = int(whole) * NANOS_PER_USD + int(decimals.ljust(9, "0"))
    if nanos > NANOS_MAX:
        raise ValueError(f"{text!r} is too large")
    return -nanos if sign else nanos


def _quantity(usage: Usage, unit: Unit) -> Fraction:
    name, parts = _MEASURES[unit]
    value: int = getattr(usage, name)
    if value < 0:
        raise ValueError(f"{name} is negative: {value}")
    # Most quantities of a usage are nothing, and making a fraction of that costs as much.
    return Fraction(value, parts) if value else _NOTHING


def _rate(component: Component) -> Fraction:
    return Fraction(component.amount_nanos, component.per)


def _component(price: Price, unit: Unit, attributes: Mapping[str, str]) -> Component | None:
    """The most specific component of a unit whose conditions all hold."""
    matching = [
        component
        for component in price.components
        if component.unit == unit
        and all(attributes.get(name) == value for name, value in component.when.items())
    ]
    return max(matching, key=lambda component: len(component.when), default=None)


def _open_components(price: Price, unit: Unit, attributes: Mapping[str, str]) -> list[Component]:
    """Components of a unit that a bill can come to choose, given what is already known.

    One is sure to match: the bill's own choice by the given attributes. Beside it only those can be
    chosen that depend on an attribute that is still open, and are no less specific.
    """
    sure = _component(price, unit, attributes)
    least = 0 if sure is None else len(sure.when)
    found = [
        component
        for component in price.components
        if component.unit == unit
        and len(component.when) >= least
        and not component.when.keys() <= attributes.keys()
        and all(attributes.get(name, value) == value for name, value in component.when.items())
    ]
    return found if sure is None else [sure, *found]


def _bill(chosen: Iterable[tuple[Component, Fraction]], minimum_nanos: int) -> Bill:
    """Round once: each line is the rounded-up running total less the one before it."""
    chosen = tuple(chosen)
    if not chosen and not minimum_nanos:
        raise UnpricedUsage("no component of the price applies")
    exact = Fraction(0)
    total = 0
    lines = []
    for component, quantity in chosen:
        exact += quantity * _rate(component)
        amount = -(-exact.numerator // exact.denominator) - total
        total += amount
        lines.append(
            Line(component.unit, _decimal(quantity), component.amount_nanos, component.per, amount)
        )
    if total < minimum_nanos:
        lines.append(Line("minimum", "1", minimum_nanos, 1, minimum_nanos - total))
        total = minimum_nanos
    if total > NANOS_MAX:
        raise Unbookable(f"a bill of {total} nano-dollars is beyond what can be booked")
    return Bill(total, tuple(lines))


def _decimal(quantity: Fraction) -> str:
    """Exact, because quantities are measured in decimal fractions of their unit."""
    if quantity.denominator == 1:
        return str(quantity.numerator)
    return format(Decimal(quantity.numerator) / Decimal(quantity.denominator), "f")

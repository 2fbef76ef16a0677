"""Prices, quotes and charges in nano-dollars: pure, exact, and the only place that rounds.

A price is a sum of components, each an amount per number of units. ``charge`` applies it to
measured usage, ``quote`` to the limits of a request. Both are the same exact sum, of integers over
the price's common denominator, rounded up once to the next nano-dollar. Knows no database, no
catalog and no clock.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from operator import attrgetter, itemgetter
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from workers.contract.jobs import Usage

NANOS_PER_USD: Final = 1_000_000_000
NANOS_PER_CENT: Final = NANOS_PER_USD // 100
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
"""Service classes, each with its own price: ``batch`` requests run when there is capacity."""
SERVICE_CLASSES: Final[tuple[ServiceClass, ...]] = get_args(ServiceClass)

_MEASURES: Final[Mapping[Unit, tuple[str, int]]] = {
    # The quantity of a usage that a unit counts, and how many of it make one unit.
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

UNBOUNDED_UNITS: Final = frozenset({"step", "gpu_second"})
"""Units that have no limit unless the request sets one; a price on them requires that limit."""


def measure_of(unit: Unit) -> tuple[str, int]:
    """Return the quantity of a usage that a unit counts, and how many of it make one unit."""
    return _MEASURES[unit]


class Unbookable(ValueError):
    """An amount that exceeds what the ledger can store."""


class UnpricedUsage(Exception):
    """The price does not cover this usage, so it must not run."""


@dataclass(frozen=True, slots=True)
class Component:
    """``amount_nanos`` per ``per`` units, if the usage's attributes match ``when``."""

    unit: Unit
    amount_nanos: int
    per: int = 1
    when: Mapping[str, str] = field(default_factory=dict)


class ComponentRate(NamedTuple):
    """A component, and the cost of one measured quantity, such as a millisecond, as the numerator
    over its price's denominator."""

    component: Component
    numerator: int


@dataclass(frozen=True, slots=True)
class Price:
    """An immutable price. A charge is at least ``minimum_nanos``."""

    components: tuple[Component, ...]
    minimum_nanos: int = 0
    denominator: int = field(init=False, repr=False, compare=False)
    """Common denominator of all rates."""
    rates: Mapping[Unit, Sequence[ComponentRate]] = field(init=False, repr=False, compare=False)
    """Rates by unit, in the order of the components."""

    def __post_init__(self) -> None:
        pers = [component.per * _MEASURES[component.unit][1] for component in self.components]
        denominator = math.lcm(*pers)
        rates: defaultdict[Unit, list[ComponentRate]] = defaultdict(list)
        for component, per in zip(self.components, pers, strict=True):
            numerator = component.amount_nanos * (denominator // per)
            rates[component.unit].append(ComponentRate(component, numerator))
        object.__setattr__(self, "denominator", denominator)
        object.__setattr__(self, "rates", dict(rates))


class Line(msgspec.Struct, frozen=True):
    """One line of a bill: ``quantity`` units at ``price_nanos`` per ``per`` units.

    ``quantity`` is a decimal string, because seconds are measured in fractions.
    """

    unit: str
    quantity: str
    price_nanos: int
    per: int
    amount_nanos: int


class Bill(msgspec.Struct, frozen=True):
    """The cost of a usage; the amounts of the lines sum exactly to the total."""

    total_nanos: int
    lines: tuple[Line, ...]


def charge(price: Price, usage: Usage) -> Bill:
    """Price a measured usage.

    Cached input tokens without their own price cost as much as input tokens. Raise
    ``UnpricedUsage`` if a unit is priced but not for these attributes, or if nothing is priced.
    """
    return _bill(price, _chosen(price, usage))


def charge_nanos(price: Price, usage: Usage) -> int:
    """Return the total of ``charge`` without its lines."""
    return _total(price, _chosen(price, usage))


def quote(price: Price, limits: Usage) -> Bill:
    """Return the maximum that a usage within the limits can cost.

    If all attributes that conditions depend on are known, each unit is priced by the component that
    ``charge`` will choose. If some are open, it is priced by the dearest one that ``charge`` can
    choose. An input token can turn out to be cached or not, so the dearer of the two prices counts.
    """
    chosen: list[tuple[ComponentRate, int]] = []
    for unit, (name, _) in _MEASURES.items():
        quantity: int = getattr(limits, name)
        if quantity < 0:
            raise ValueError(f"{name} is negative: {quantity}")
        rates = price.rates.get(unit)
        candidates = _possible(rates, limits.attributes) if rates else ()
        if candidates and not quantity and unit in UNBOUNDED_UNITS:
            raise UnpricedUsage(f"{unit} is priced, but the request has no limit on it")
        if unit == "input_token":
            quantity += limits.cached_input_tokens
            if cached := price.rates.get("cached_input_token"):
                candidates = (*candidates, *_possible(cached, limits.attributes))
        if quantity and candidates and unit != "cached_input_token":
            chosen.append((max(candidates, key=_NUMERATOR), quantity))
    return _bill(price, chosen)


def is_exact_quote(price: Price) -> bool:
    """Whether the charge of a completed request equals its quote: the price counts only requests
    and characters, without conditions. A price without components is that of a workflow's steps,
    of which only some may run."""
    return bool(price.components) and all(
        one.unit in ("request", "character") and not one.when for one in price.components
    )


def discounted(price: Price, discount: Fraction) -> Price:
    """Return a price reduced by a discount (0 < ``discount`` < 1).

    Exact: if an amount would be a fraction, ``per`` is increased instead. The minimum is rounded
    up. Raise ``Unbookable`` if an amount becomes too large.
    """
    if not 0 < discount < 1:
        raise ValueError(f"a discount is {discount}; it must be between 0 and 1")
    left = 1 - discount
    components = []
    for component in price.components:
        amount = component.amount_nanos * left
        if amount.numerator > NANOS_MAX:
            raise Unbookable(f"{component.unit}: {amount.numerator} nano-dollars is too large")
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
    """Reduce a usage to its limits; return it, and whether anything was reduced.

    Usage above a limit, or with other attributes than the limits specify, is our mistake and not
    charged to the customer. Attributes that the limits leave open are as measured. Device time and
    steps are unlimited unless the request sets a limit; in that case no price counts them.
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
    # Filling in an attribute that the worker did not report is not a reduction.
    reported = {**limits.attributes, **usage.attributes}
    return clipped, clipped != msgspec.structs.replace(usage, attributes=reported)


def device_cost(gpu_us: int, hour_nanos: int) -> int:
    """Return the operator's cost of device time, rounded up to the nano-dollar."""
    return -(-gpu_us * hour_nanos // 3_600_000_000)


def format_usd(nanos: int) -> str:
    """Format an amount as a decimal string of USD, without exponent or trailing zeros."""
    whole, rest = divmod(abs(nanos), NANOS_PER_USD)
    text = f"{whole}.{rest:09d}".rstrip("0").rstrip(".")
    return f"-{text}" if nanos < 0 else text


def parse_usd(text: str) -> int:
    """Parse a decimal string of USD. Raise ``ValueError`` unless it is a whole number of
    nano-dollars."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a valid amount; write USD as a decimal, such as 0.035")
    sign, whole, decimals = found.groups()
    decimals = (decimals or "").rstrip("0")
    if len(decimals) > 9:
        raise ValueError(f"{text!r} has more than 9 decimals; use `per` for a finer price")
    nanos = int(whole) * NANOS_PER_USD + int(decimals.ljust(9, "0"))
    if nanos > NANOS_MAX:
        raise ValueError(f"{text!r} is too large")
    return -nanos if sign else nanos


_NUMERATOR: Final = itemgetter(1)
_QUANTITIES: Final[Callable[[Usage], tuple[int, ...]]] = attrgetter(
    *(name for name, _ in _MEASURES.values())
)
"""Returns the quantities of a usage, in the order of the units."""


def _chosen(price: Price, usage: Usage) -> list[tuple[ComponentRate, int]]:
    """Return the rate of each unit that a usage has, with its quantity."""
    chosen: list[tuple[ComponentRate, int]] = []
    for unit, quantity in zip(UNITS, _QUANTITIES(usage), strict=True):
        if not quantity:
            continue
        if quantity < 0:
            raise ValueError(f"{_MEASURES[unit][0]} is negative: {quantity}")
        rates = price.rates.get(unit)
        rate = _most_specific(rates, usage.attributes) if rates else None
        if rate is None and unit == "cached_input_token":
            rate = _most_specific(price.rates.get("input_token", ()), usage.attributes)
        if rate is not None:
            chosen.append((rate, quantity))
        elif rates:
            raise UnpricedUsage(f"{unit} has no price for {dict(usage.attributes)}")
    return chosen


def _most_specific(
    rates: Sequence[ComponentRate], attributes: Mapping[str, str]
) -> ComponentRate | None:
    """Return the most specific rate of a unit whose conditions all hold."""
    found = None
    for rate in rates:
        when = rate.component.when
        if found is not None and len(when) <= len(found.component.when):
            continue
        if not when or all(attributes.get(name) == value for name, value in when.items()):
            found = rate
    return found


def _possible(
    rates: Sequence[ComponentRate], attributes: Mapping[str, str]
) -> Sequence[ComponentRate]:
    """Return the rates of a unit that ``charge`` can choose, given the known attributes.

    The rate chosen by the known attributes alone always matches. Others can be chosen only if they
    depend on an open attribute and are at least as specific.
    """
    if len(rates) == 1 and not rates[0].component.when:
        return rates
    sure = _most_specific(rates, attributes)
    least = 0 if sure is None else len(sure.component.when)
    found = [
        rate
        for rate in rates
        if len(when := rate.component.when) >= least
        and not when.keys() <= attributes.keys()
        and all(attributes.get(name, value) == value for name, value in when.items())
    ]
    return found if sure is None else [sure, *found]


def _total(price: Price, chosen: Sequence[tuple[ComponentRate, int]]) -> int:
    """Round the exact sum once, up to the next nano-dollar, and to the price's minimum."""
    if not chosen and not price.minimum_nanos:
        raise UnpricedUsage("no component of the price applies")
    exact = 0
    for rate, quantity in chosen:
        exact += quantity * rate.numerator
    total = max(_rounded(exact, price), price.minimum_nanos)
    if total > NANOS_MAX:
        raise Unbookable(f"a bill of {total} nano-dollars exceeds what can be booked")
    return total


def _bill(price: Price, chosen: Sequence[tuple[ComponentRate, int]]) -> Bill:
    """Each line is the rounded-up running total less the one before it."""
    total = _total(price, chosen)
    exact = before = 0
    lines = []
    for (component, numerator), quantity in chosen:
        exact += quantity * numerator
        amount = _rounded(exact, price) - before
        before += amount
        parts = _MEASURES[component.unit][1]
        units = str(quantity) if parts == 1 else _decimal(quantity, parts)
        lines.append(Line(component.unit, units, component.amount_nanos, component.per, amount))
    if before < total:
        lines.append(Line("minimum", "1", price.minimum_nanos, 1, total - before))
    return Bill(total, tuple(lines))


def _rounded(exact: int, price: Price) -> int:
    """Round a sum over the price's denominator up to the next nano-dollar."""
    return -(-exact // price.denominator)


def _decimal(quantity: int, parts: int) -> str:
    """Format a quantity in units of ``parts``, a power of ten."""
    whole, rest = divmod(quantity, parts)
    return f"{whole}.{rest:0{len(str(parts)) - 1}d}".rstrip("0").rstrip(".")

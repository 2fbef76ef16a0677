"""Prices of models for an order of one's own: sizes, the calculator, history, comparisons. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any, Final

from gateway.catalog.listing import order_view
from gateway.catalog.picking.filters import route_of
from gateway.catalog.picking.typical import SIZES, Find, typical_nanos
from gateway.catalog.schema import CatalogEntry
from gateway.console.queries import Query
from gateway.console.views.models import PriceVersion, order_text, price_texts
from gateway.console.views.prices import texts_of
from gateway.errors import InvalidRequest
from gateway.ledger.prices import PricePeriod
from gateway.pricing import Bill, Unbookable, UnpricedUsage, charge, discounted, measure_of
from workers.contract.jobs import Usage

SIZE_MAX: Final = 1_000_000_000
SIZE_LABELS: Final[Mapping[str, str]] = {
    "input_tokens": "Tokens in",
    "output_tokens": "Tokens out",
    "images": "Pictures",
    "video_seconds": "Seconds of video",
    "audio_seconds": "Seconds of audio",
    "characters": "Characters",
}
UNIT_LABELS: Final[Mapping[str, str]] = {
    "request": "Requests",
    "input_token": "Tokens in",
    "cached_input_token": "Cached tokens in",
    "output_token": "Tokens out",
    "image": "Pictures",
    "video_second": "Seconds of video",
    "audio_second": "Seconds of audio",
    "character": "Characters",
    "step": "Steps",
    "gpu_second": "GPU seconds",
}
COMPARED_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Quantity:
    """A field of the calculator."""

    name: str
    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Calculation:
    """What some quantities cost: the lines of a bill, and the same in a batch."""

    quantities: Sequence[Quantity]
    attributes: Mapping[str, Sequence[str]]
    """Values that the price depends on."""
    bill: Bill | None
    batch_nanos: int | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version of a price with its lines, and the price of a usual order at it."""

    version: PriceVersion
    lines: Sequence[str]
    typical_nanos: int | None
    is_drawn: bool
    """Whether it is in the chart: of the list price, and not cancelled."""


def read_sizes(query: Query) -> dict[str, int]:
    """Read the sizes of an order. Raise ``InvalidRequest``."""
    return {name: size for name in SIZES if (size := read_quantity(query, name)) is not None}


def read_quantity(query: Query, name: str, *, least: int = 1) -> int | None:
    text = query.text(name)
    if text is None:
        return None
    plain = "".join(text.replace(",", "").split())
    if not plain.isascii() or not plain.isdecimal() or not least <= int(plain) <= SIZE_MAX:
        raise InvalidRequest(
            "invalid_value",
            f"{name} is {text!r}; send a whole number from {least} to {SIZE_MAX:,}.",
            param=name,
        )
    return int(plain)


def calculate(entry: CatalogEntry, query: Query) -> Calculation | None:
    """Price the quantities of an address, by default those of a usual order; None if the price is
    the sum of steps."""
    if not entry.price:
        return None
    units = list(dict.fromkeys(line.unit for line in entry.price))
    usual = order_view(entry, entry.task)["quantities"]
    usage: dict[str, int] = {"requests": 1}
    quantities, problem = [], None
    for unit in units:
        name, parts = measure_of(unit)
        field = f"n_{unit}"
        try:
            given = read_quantity(query, field, least=0)
        except InvalidRequest as error:
            given, problem = None, error.message
        number = given if given is not None else _usual(unit, usual)
        usage[name] = number * parts
        quantities.append(Quantity(field, UNIT_LABELS[unit], query.text(field) or str(number)))
    accepted = _attributes(entry)
    attributes = {
        name: query.one_of(name, values) or values[0] for name, values in accepted.items()
    }
    bill, batch = None, None
    if problem is None:
        try:
            wanted = Usage(**usage, attributes=attributes)
            bill = charge(entry.selling_price, wanted)
            batch = _in_batch(entry, wanted)
        except (UnpricedUsage, Unbookable, ValueError) as error:
            problem = f"This cannot be priced: {error}."
    return Calculation(quantities, accepted, bill, batch, problem)


def _usual(unit: str, usual: Mapping[str, float]) -> int:
    return 0 if unit == "cached_input_token" else max(1, round(usual.get(f"{unit}s", 1)))


def _attributes(entry: CatalogEntry) -> dict[str, list[str]]:
    """Return the values of what a price depends on, with one that no line names."""
    found: dict[str, list[str]] = {}
    known = {
        "size": [*entry.sizes],
        "quality": [*entry.qualities],
        "resolution": [*entry.resolutions],
        "control": ["none", *entry.known_controls],
        "reference": ["none", *entry.known_references],
    }
    for line in entry.price:
        for name, value in line.when.items():
            values = found.setdefault(name, list(known.get(name, ())))
            if value not in values:
                values.append(value)
    return found


def _in_batch(entry: CatalogEntry, usage: Usage) -> int | None:
    if entry.discount is None:
        return None
    return charge(discounted(entry.selling_price, Fraction(entry.discount)), usage).total_nanos


def version_rows(
    entry: CatalogEntry | None,
    find: Find,
    versions: Sequence[PriceVersion],
    periods: Sequence[PricePeriod],
    price_at: Callable[[int], Any],
) -> list[VersionRow]:
    """Return the history of a price, newest first, with what a usual order costs at each; that is
    not known of a model that is no longer sold."""
    known = {(each.effective_from, each.account_id): each for each in periods}
    rows = []
    for version in versions:
        period = known[version.starts_at, version.account_id or 0]
        price = None if period.price_id is None else price_at(period.price_id)
        at = None if entry is None or price is None else entry.at(price)
        rows.append(
            VersionRow(
                version=version,
                lines=[] if price is None else texts_of(price),
                typical_nanos=None if at is None else typical_nanos(at, find),
                is_drawn=at is not None and not version.cancelled and not version.account_id,
            )
        )
    return rows


def drawn_until(rows: Sequence[VersionRow], now: datetime) -> datetime:
    """Return the end of the chart: now, or a little after the last version that is set."""
    last = max((row.version.starts_at for row in rows if row.is_drawn), default=now)
    return now if last <= now else last + max(timedelta(hours=1), (last - now) / 4)


@dataclass(frozen=True, slots=True)
class Compared:
    """A model beside others; ``facts`` are texts by the names of rows."""

    name: str
    typical_nanos: int | None
    available: bool
    reason: str | None
    facts: Mapping[str, str]


def compared(
    entry: CatalogEntry,
    find: Find,
    *,
    sizes: Mapping[str, int],
    available: bool,
    reason: str | None,
    measured: str,
) -> Compared:
    limits = entry.limits
    slo = entry.slo.model_dump(exclude_none=True) if entry.slo else {}
    facts = {
        "Tasks": ", ".join((entry.task, *entry.also)),
        "Order": order_text(order_view(entry, entry.task, sizes)),
        "Price": "; ".join(price_texts(entry)) or "the sum of its steps",
        "In batches": f"{float(entry.discount) * 100:g} % less" if entry.discount else "not sold",
        "Measured": measured,
        "Promise": ", ".join(
            f"{name.removesuffix('_ms')} {value} ms" for name, value in slo.items()
        ),
        "Runs": route_of(entry),
        "Context": f"{limits.context_tokens:,} tokens" if limits.context_tokens else "",
        "Answer": f"{limits.output_tokens:,} tokens" if limits.output_tokens else "",
        "Longest": f"{limits.seconds:g} s" if limits.seconds else "",
        "Sizes": ", ".join(entry.sizes or entry.resolutions),
        "Voices": f"{len(entry.known_voices)}" if entry.known_voices else "",
        "Languages": ", ".join(entry.known_languages),
        "Good for": ", ".join(entry.good_for),
        "Tier": entry.tier or "",
        "Vendor": entry.vendor or "",
        "Licence": entry.license or "",
    }
    return Compared(entry.name, typical_nanos(entry, find, None, sizes), available, reason, facts)


def rows_of(models: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    """Return the rows of a comparison in which at least one model has something."""
    names = models[0].facts if models else ()
    found = [(name, [one.facts[name] for one in models]) for name in names]
    return [(name, texts) for name, texts in found if any(texts)]

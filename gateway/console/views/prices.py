"""Prices as lists and forms show them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from gateway.billing.charged import ChargedRequest
from gateway.catalog.picking.typical import typical_usage
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.selling.terms import OwnPrices
from gateway.console.views.formats import count, share
from gateway.console.views.models import line_text, price_texts
from gateway.console.views.money import SumRow
from gateway.errors import InvalidRequest
from gateway.ledger.prices import LIST, PriceCache, PricePeriod
from gateway.pricing import Price, Unbookable, UnpricedUsage, charge, format_usd, quote
from workers.contract.jobs import Usage

BLANK_LINES: Final = 2


class UsedPeriod(NamedTuple):
    """The span in which a price was in force; ``ends_at`` is None if it still is."""

    starts_at: datetime
    ends_at: datetime | None
    is_own: bool


def used_period(
    periods: Sequence[PricePeriod], price_id: int, accepted_at: datetime
) -> UsedPeriod | None:
    """Return the period of the price that a request was accepted at; None if it is not known.

    ``periods`` are list prices, then those of the account that made the request.
    """
    used = [
        each
        for each in periods
        if each.price_id == price_id
        and each.effective_from <= accepted_at
        and each.cancelled is None
    ]
    if not used:
        return None
    own = used[-1]
    later = [
        each.effective_from
        for each in periods
        if each.account_id == own.account_id
        and each.effective_from > own.effective_from
        and each.cancelled is None
    ]
    return UsedPeriod(own.effective_from, min(later, default=None), own.account_id != LIST)


LINE_FIELDS: Final = ("unit", "amount", "per", "when")
_EXAMPLES: Final = ("a cheap request", "a usual request", "a dear request")
_QUANTITIES: Final[Mapping[str, tuple[str, int]]] = {
    "input_tokens": ("input tokens", 1),
    "cached_input_tokens": ("cached input tokens", 1),
    "output_tokens": ("output tokens", 1),
    "images": ("images", 1),
    "video_ms": ("s of video", 1000),
    "audio_ms": ("s of audio", 1000),
    "characters": ("characters", 1),
    "steps": ("steps", 1),
}


@dataclass(frozen=True, slots=True)
class PriceLineFields:
    """One line of a price, as it is entered; ``when`` is ``name=value`` with commas between."""

    unit: str
    amount: str
    per: str
    when: str

    @property
    def component(self) -> dict[str, Any]:
        """Return the line as the API reads it. Raise ``InvalidRequest``."""
        found: dict[str, Any] = {"unit": self.unit, "amount": self.amount.removeprefix("$")}
        if self.per:
            digits = "".join(self.per.replace(",", "").split())
            if not digits.isascii() or not digits.isdecimal():
                raise _no_price(f"{self.unit}: per is {self.per!r}, which is not a whole number")
            found["per"] = int(digits)
        conditions = [part.strip() for part in self.when.split(",") if part.strip()]
        if conditions:
            pairs = [part.partition("=") for part in conditions]
            if not all(name and equal and value for name, equal, value in pairs):
                raise _no_price(
                    f"{self.unit}: when is {self.when!r}; write name=value, with commas between"
                )
            found["when"] = {name.strip(): value.strip() for name, _, value in pairs}
        return found


NO_LINE: Final = PriceLineFields("", "", "", "")


@dataclass(frozen=True, slots=True)
class PriceRow:
    """A model in the list of prices, with what it earned."""

    name: str
    prices: Sequence[str]
    since: datetime
    next_at: datetime | None
    discount: str | None
    own: int
    """Accounts with a price of their own, now or soon."""
    earned: SumRow


@dataclass(frozen=True, slots=True)
class ExampleRow:
    """What a request costs at the price in force, and at another one; None: not priced."""

    name: str
    usage: str
    old_nanos: int | None
    new_nanos: int | None


def read_lines(columns: Sequence[Sequence[Any]]) -> list[PriceLineFields]:
    """Return the lines of which the fields were entered; those without an amount are left out."""
    rows = zip(*columns, strict=False)
    return [
        PriceLineFields(*(str(each).strip() for each in row)) for row in rows if str(row[1]).strip()
    ]


def lines_of(price: Price) -> list[PriceLineFields]:
    """Return the lines of a price, to be changed."""
    return [
        PriceLineFields(
            part.unit,
            format_usd(part.amount_nanos),
            str(part.per) if part.per > 1 else "",
            ", ".join(f"{name}={value}" for name, value in part.when.items()),
        )
        for part in price.components
    ]


def texts_of(price: Price) -> list[str]:
    """Return the lines of a price in words, its minimum last."""
    lines = [
        line_text(part.unit, part.amount_nanos, part.per, part.when) for part in price.components
    ]
    if price.minimum_nanos:
        lines.append(f"at least ${format_usd(price.minimum_nanos)} a request")
    return lines


def price_rows(
    entries: Iterable[CatalogEntry],
    own: Mapping[str, OwnPrices],
    earned: Mapping[str, SumRow],
    *,
    since: Mapping[str, datetime],
) -> list[PriceRow]:
    """Return the models by what they earned; those that earned nothing by name."""
    rows = [
        PriceRow(
            name=entry.name,
            prices=price_texts(entry),
            since=since[entry.name],
            next_at=own[entry.name].next_at,
            discount=entry.discount,
            own=own[entry.name].accounts,
            earned=earned.get(entry.name) or SumRow({}, 0, 0, 0, {}, 0, 0),
        )
        for entry in entries
    ]
    return sorted(rows, key=lambda row: (-row.earned.net_nanos, row.name))


def own_accounts(periods: Sequence[PricePeriod], now: datetime) -> set[int]:
    """Return the accounts with a price of their own in force."""
    latest = {
        each.account_id: each.price_id
        for each in periods
        if each.cancelled is None and each.effective_from <= now and each.account_id != LIST
    }
    return {account_id for account_id, price_id in latest.items() if price_id is not None}


def period_prices(periods: Sequence[PricePeriod], cache: PriceCache) -> dict[int, list[str]]:
    """Return the lines of the prices of periods in words, by their ids."""
    ids = {each.price_id for each in periods if each.price_id is not None}
    return {id: texts_of(cache[id]) for id in ids if id in cache}


def example_rows(
    entry: CatalogEntry, requests: Sequence[ChargedRequest], old: Price, new: Price
) -> list[ExampleRow]:
    """Return what three real requests would cost, or typical orders if there is none."""
    if requests:
        names = _EXAMPLES if len(requests) == len(_EXAMPLES) else _EXAMPLES[-len(requests) :]
        return [
            ExampleRow(name, usage_text(each.usage), *_both(charge, old, new, each.usage))
            for name, each in zip(names, requests, strict=True)
        ]
    orders = [(task, typical_usage(entry, task)) for task in (entry.task, *entry.also)][:3]
    return [
        ExampleRow(f"a typical {task}", usage_text(usage), *_both(quote, old, new, usage))
        for task, usage in orders
    ]


def usage_text(usage: Usage) -> str:
    """Return a usage in words: ``180 input tokens, 240 output tokens``."""
    parts = []
    for name, (label, parts_of_one) in _QUANTITIES.items():
        if quantity := getattr(usage, name):
            number = count(quantity) if parts_of_one == 1 else f"{quantity / parts_of_one:g}"
            parts.append(f"{number} {label}")
    return ", ".join([*parts, *usage.attributes.values()]) or "1 request"


def change_text(old: int, new: int) -> str:
    """Return a change in percent; a dash without an old amount."""
    sign = "+" if new > old else ""
    return f"{sign}{share(new - old, old)}" if old else share(0, 0)


def _both(price_usage: Any, old: Price, new: Price, usage: Usage) -> list[int | None]:
    found: list[int | None] = []
    for price in (old, new):
        try:
            found.append(price_usage(price, usage).total_nanos)
        except (UnpricedUsage, Unbookable, ValueError):
            found.append(None)
    return found


def _no_price(text: str) -> InvalidRequest:
    return InvalidRequest("invalid_price", f"{text}.", param="price")

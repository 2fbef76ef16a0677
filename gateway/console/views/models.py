"""Models as lists and pages show them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from typing import Final

from gateway.catalog.listing import entry_view, order_view
from gateway.catalog.picking.typical import Find, typical_nanos, typical_usage
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Modality
from gateway.catalog.views import EntryView, TypicalOrderView
from gateway.console.views.formats import count, usd
from gateway.ledger.prices import LIST, PricePeriod
from gateway.performance import RecentSpeed, StatsView
from gateway.pricing import Unbookable, UnpricedUsage, discounted, quote
from workers.contract.announcements import Announcement

ICONS: Final[Mapping[Modality, str]] = {
    "text": "text",
    "image": "image",
    "video": "film",
    "audio": "sound",
    "embedding": "vector",
    "ranking": "vector",
    "transcript": "text",
}
_UNITS: Final[Mapping[str, str]] = {
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "images": "image",
    "video_seconds": "s of video",
    "audio_seconds": "s of audio",
    "characters": "characters",
}


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model in a list. ``typical_nanos`` is the price of an order as it is usually made, and
    ``batch_nanos`` that of the same in a batch. ``available`` is None while it is unknown."""

    name: str
    icon: str
    task: str
    also: Sequence[str]
    typical_nanos: int | None
    typical: str
    batch_nanos: int | None
    prices: Sequence[str]
    available: bool | None
    reason: str | None
    recent: RecentSpeed | None
    context: int | None
    vendor: str | None
    license: str | None
    good_for: Sequence[str]
    has_own_price: bool

    @property
    def median_s(self) -> float | None:
        return self.recent.median_s if self.recent else None

    @property
    def p95_s(self) -> float | None:
        return self.recent.p95_s if self.recent else None

    @property
    def success(self) -> float | None:
        return self.recent.success if self.recent else None


@dataclass(frozen=True, slots=True)
class PriceVersion:
    """A price of a model in its history, newest first."""

    starts_at: datetime
    price_id: int | None
    account_id: int | None
    source: str
    actor: str
    reason: str
    cancelled: bool
    state: str


def model_row(
    entry: CatalogEntry,
    announcements: Sequence[Announcement],
    *,
    find: Find,
    for_operator: bool,
    recent: RecentSpeed | None,
    has_own_price: bool,
    healthy: bool,
    sizes: Mapping[str, int] | None = None,
) -> ModelRow:
    """``healthy``: whether the announcements are those of now. ``sizes`` replace those of a usual
    order."""
    view = entry_view(entry, announcements, find=find, for_operator=for_operator)
    return ModelRow(
        name=entry.name,
        icon=ICONS[TASKS[entry.task].makes],
        task=entry.task,
        also=entry.also,
        typical_nanos=typical_nanos(entry, find, None, sizes),
        typical=order_text(order_view(entry, entry.task, sizes)),
        batch_nanos=_batch_nanos(entry, sizes),
        prices=price_texts(entry),
        available=view["available"] if healthy else None,
        reason=reason_of(view) if healthy else None,
        recent=recent,
        context=entry.limits.context_tokens,
        vendor=entry.vendor,
        license=entry.license,
        good_for=entry.good_for,
        has_own_price=has_own_price,
    )


def _batch_nanos(entry: CatalogEntry, sizes: Mapping[str, int] | None) -> int | None:
    """Return the price of a typical order in a batch; None if it is not sold or not known."""
    if entry.discount is None:
        return None
    try:
        price = discounted(entry.selling_price, Fraction(entry.discount))
        return quote(price, typical_usage(entry, entry.task, sizes)).total_nanos
    except (Unbookable, UnpricedUsage):
        return None


def reason_of(view: EntryView) -> str | None:
    """Return why a model is not available, for operators with its cause."""
    return view.get("reason_detail") or view["reason"]


def price_texts(entry: CatalogEntry) -> list[str]:
    """Return the lines of a price, such as ``$0.02 / 1,000,000 input tokens``."""
    return [line_text(line.unit, line.amount, line.per, line.when) for line in entry.price]


def line_text(unit: str, nanos: int, per: int, when: Mapping[str, str]) -> str:
    """Return a line of a price in words."""
    many, plural = ("", "") if per == 1 else (f"{count(per)} ", "s")
    only = ", ".join(f"{name} {value}" for name, value in when.items())
    return f"{usd(nanos)} / {many}{unit.replace('_', ' ')}{plural}{f' ({only})' if only else ''}"


def order_text(order: TypicalOrderView) -> str:
    """Return an order in words: ``1 image, 1024x1024``."""
    parts = []
    for name, quantity in order["quantities"].items():
        plural = "s" if name == "images" and quantity != 1 else ""
        parts.append(f"{quantity:g} {_UNITS[name]}{plural}")
    return ", ".join([*parts, *order["attributes"].values()])


def shell_json(value: object) -> str:
    """Encode a value as JSON between the single quotes of a shell."""
    return json.dumps(value, ensure_ascii=False).replace("'", "'\\''")


def price_versions(periods: Sequence[PricePeriod], now: datetime) -> list[PriceVersion]:
    """Return the history of a model's prices, newest first."""
    begun = [each for each in periods if each.effective_from <= now and each.cancelled is None]
    current = {each.account_id: each for each in begun}
    return [
        PriceVersion(
            starts_at=each.effective_from,
            price_id=each.price_id,
            account_id=None if each.account_id == LIST else each.account_id,
            source=each.source,
            actor=each.actor,
            reason=each.reason,
            cancelled=each.cancelled is not None,
            state=_state(each, current.get(each.account_id), now),
        )
        for each in sorted(periods, key=lambda each: each.effective_from, reverse=True)
    ]


def _state(period: PricePeriod, current: PricePeriod | None, now: datetime) -> str:
    if period.cancelled is not None:
        return "cancelled"
    if period.effective_from > now:
        return "begins later"
    return "in force" if period is current else "ended"


SPEEDS: Final = (
    ("ttft_ms", "Time to first token"),
    ("tpot_ms", "Time per token"),
    ("first_audio_ms", "Time to first audio"),
    ("longest_gap_ms", "Longest gap"),
    ("step_ms", "Step"),
    ("queue_ms", "Queue"),
    ("forward_ms", "Forward"),
    ("total_ms", "Total"),
)


def speed_rows(stats: StatsView) -> list[tuple[str, Mapping[str, float]]]:
    """Return the measured percentiles in milliseconds, by name."""
    values: Mapping[str, object] = {**stats}
    found: list[tuple[str, Mapping[str, float]]] = []
    for name, label in SPEEDS:
        value = values.get(name)
        if isinstance(value, dict):
            found.append((label, value))
    return found

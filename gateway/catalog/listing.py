"""The JSON of the catalog: OpenAI's list with OpenRouter's prices, and our own entries. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias

from gateway.catalog.availability import availability
from gateway.catalog.schema import AUDIO_TASKS, IMAGE_TASKS, VIDEO_TASKS, Entry
from gateway.pricing import NANOS_PER_USD, format_usd
from workers.contract.streams import Announcement

Sort: TypeAlias = Literal["name", "price", "-price"]

_OPENROUTER_KEYS: Final = {
    "input_token": "prompt",
    "output_token": "completion",
    "request": "request",
    "image": "image_output",
    "cached_input_token": "input_cache_read",
}
_READS: Final = {
    "image-to-image": ("text", "image"),
    "image-edit": ("text", "image"),
    "image-relight": ("text", "image"),
    "image-restyle": ("text", "image"),
    "image-blend": ("text", "image"),
    "image-to-video": ("text", "image"),
    "video-upscale": ("video",),
    "talking-head": ("text", "image"),
    "voice-clone": ("text", "audio"),
}
_CHAT_PARAMETERS: Final = (
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "n",
    "logprobs",
    "top_logprobs",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)


def entry_view(entry: Entry, announcements: Sequence[Announcement]) -> dict[str, Any]:
    """Everything about one entry, as ``GET /v1/catalog/{name}`` shows it."""
    missing = availability(entry, announcements)
    return {
        "name": entry.name,
        "object": "catalog.entry",
        "task": entry.task,
        "also": list(entry.also),
        "available": missing is None,
        "reason": None if missing is None else missing.reason,
        "price": price_view(entry),
        "minimum": format_usd(entry.minimum) if entry.minimum else None,
        "from_price": _decimal(from_price(entry)),
        "family": entry.family,
        "vendor": entry.vendor,
        "description": entry.description,
        "license": entry.license,
        "route": entry.engine or "upstream",
        "context": entry.limits.context_tokens,
        "limits": entry.limits.model_dump(exclude_none=True),
        "default_parameters": dict(entry.default_parameters),
        "resolutions": list(entry.resolutions),
        "voices": list(entry.voices),
        "languages": list(entry.languages),
        "good_for": list(entry.good_for),
    }


def model_view(entry: Entry, announcements: Sequence[Announcement], created: int) -> dict[str, Any]:
    """One model in OpenAI's list; pricing and architecture as OpenRouter names them."""
    writes = _writes(entry)
    return {
        "id": entry.name,
        "object": "model",
        "created": created,
        "owned_by": entry.vendor or "tollgate",
        "name": entry.name,
        "description": entry.description,
        "context_length": entry.limits.context_tokens,
        "architecture": {
            "input_modalities": list(_READS.get(entry.task, ("text",))),
            "output_modalities": [writes],
            "modality": f"{'+'.join(_READS.get(entry.task, ('text',)))}->{writes}",
        },
        "pricing": _openrouter_pricing(entry),
        "top_provider": {
            "context_length": entry.limits.context_tokens,
            "max_completion_tokens": entry.limits.output_tokens,
            "is_moderated": False,
        },
        "supported_parameters": list(_CHAT_PARAMETERS) if writes == "text" else [],
        "default_parameters": dict(entry.default_parameters),
        "available": availability(entry, announcements) is None,
        "price": price_view(entry),
    }


def price_view(entry: Entry) -> list[dict[str, Any]]:
    return [
        {
            "unit": line.unit,
            "amount": format_usd(line.amount),
            "per": line.per,
            "when": dict(line.when) or None,
        }
        for line in entry.price
    ]


def choose(
    entries: Sequence[Entry],
    announcements: Sequence[Announcement],
    *,
    task: str | None = None,
    max_price: Decimal | None = None,
    available: bool | None = None,
    good_for: str | None = None,
    sort: Sort = "name",
) -> list[Entry]:
    """Filter and sort entries. ``max_price`` and ``price`` go by ``from_price``."""
    chosen = [
        entry
        for entry in entries
        if (task is None or task == entry.task or task in entry.also)
        and (max_price is None or from_price(entry) <= Fraction(max_price))
        and (available is None or available == (availability(entry, announcements) is None))
        and (good_for is None or good_for in entry.good_for)
    ]
    if sort == "name":
        return sorted(chosen, key=lambda entry: entry.name.lower())
    return sorted(chosen, key=from_price, reverse=sort == "-price")


def from_price(entry: Entry) -> Fraction:
    """USD for a single one of what the entry's price names first, at its cheapest."""
    first = entry.price[0].unit
    return min(
        Fraction(line.amount, line.per * NANOS_PER_USD)
        for line in entry.price
        if line.unit == first
    )


def _openrouter_pricing(entry: Entry) -> Mapping[str, str]:
    """USD strings for single units, for what OpenRouter has a name; conditions are left out."""
    pricing = {"prompt": "0", "completion": "0", "request": "0"}
    for line in entry.price:
        key = _OPENROUTER_KEYS.get(line.unit)
        if key is not None and not line.when:
            pricing[key] = _decimal(Fraction(line.amount, line.per * NANOS_PER_USD))
    return pricing


def _writes(entry: Entry) -> str:
    if entry.task in IMAGE_TASKS:
        return "image"
    if entry.task in VIDEO_TASKS:
        return "video"
    return "audio" if entry.task in AUDIO_TASKS else "text"


def _decimal(value: Fraction) -> str:
    """A decimal without exponent; 18 digits are enough for a nano-dollar per thousand million."""
    number = Decimal(value.numerator) / Decimal(value.denominator)
    text = format(round(number, 18), "f")
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"

"""The catalog as JSON: OpenAI's list with OpenRouter's prices, and native entries. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, cast

from gateway.catalog.availability import availability
from gateway.catalog.derived import once_per_entry
from gateway.catalog.market.contract import Contract, contract_of
from gateway.catalog.picking.typical import Find, typical_nanos, typical_usage
from gateway.catalog.picking.words import strengths_of
from gateway.catalog.schema import CatalogEntry, PriceLine, Vocabulary
from gateway.catalog.tasks import TASKS, Modality, Task
from gateway.catalog.views import (
    BatchPriceView,
    ContractView,
    EntryView,
    ModelView,
    PriceLineView,
    ProvidersView,
    ProviderView,
    TypicalOrderView,
    WorkflowView,
)
from gateway.pricing import NANOS_PER_USD, Unbookable, Unit, discounted, format_usd
from workers.contract.announcements import Announcement

PROVIDER: Final = "tollgate"
"""The only provider; OpenRouter lists several."""
_OPENROUTER_NAMES: Final[Mapping[Unit, str]] = {
    "input_token": "prompt",
    "output_token": "completion",
    "request": "request",
    "image": "image",
    "cached_input_token": "input_cache_read",
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
    "response_format",
    "structured_outputs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
)


def entry_view(
    entry: CatalogEntry,
    announcements: Sequence[Announcement],
    *,
    find: Find,
    for_operator: bool = False,
) -> EntryView:
    """Return an entry for ``GET /v1/catalog/{name}``. ``find`` finds the models of a workflow."""
    missing = availability(entry, announcements)
    view = cast("EntryView", {**_fixed_view(entry)})
    view["available"] = missing is None
    view["reason"] = None if missing is None else missing.reason
    if (typical := typical_nanos(entry, find)) is not None:
        view["typical_price"] = format_usd(typical)
    if for_operator:
        view["reason_detail"] = missing.detail if missing else None
        if entry.canary:
            view["canary"] = dict(entry.canary)
    return view


@once_per_entry
def _fixed_view(entry: CatalogEntry) -> EntryView:
    """Return what depends on the entry alone; the rest is null."""
    return {
        "name": entry.name,
        "object": "catalog.entry",
        "aliases": list(entry.aliases),
        "task": entry.task,
        "also": list(entry.also),
        "available": False,
        "reason": None,
        "typical_price": None,
        "typical_order": order_view(entry, entry.task),
        "price": price_view(entry),
        "minimum": format_usd(entry.minimum) if entry.minimum else None,
        "from_price": None if (least := from_price(entry)) is None else decimal(least),
        "family": entry.family,
        "vendor": entry.vendor,
        "description": entry.description,
        "license": entry.license,
        "route": "workflow" if entry.workflow else entry.engine or "upstream",
        "workflow": _workflow_view(entry) if entry.workflow else None,
        "context": entry.limits.context_tokens,
        "limits": entry.limits.model_dump(exclude_none=True),
        "default_parameters": entry.default_parameters.model_dump(exclude_none=True),
        "slo": entry.slo.model_dump(exclude_none=True) if entry.slo else None,
        "sizes": list(entry.sizes),
        "qualities": {
            name: quality.model_dump(exclude_none=True) for name, quality in entry.qualities.items()
        },
        "schedulers": list(entry.schedulers),
        "resolutions": list(entry.resolutions),
        "adapters": {
            name: {"scale": one.scale, "scale_max": one.scale_max}
            for name, one in entry.known_adapters.items()
        },
        "controls": {name: one._asdict() for name, one in entry.known_controls.items()},
        "reference": one._asdict() if (one := entry.known_references.get("image")) else None,
        "voices": list(entry.known_voices),
        "languages": list(entry.known_languages),
        "good_for": list(entry.good_for),
        "tier": entry.tier,
        "roles": list(entry.roles),
        "why": entry.why,
        "strengths": list(strengths_of(entry)),
        "vocabulary": _vocabulary_view(entry.vocabulary) if entry.vocabulary else None,
        "examples": examples_of(entry),
        "contract": _contract_view(found) if (found := contract_of(entry)) else None,
    }


def _vocabulary_view(vocabulary: Vocabulary) -> list[str]:
    return list(vocabulary.characters or vocabulary.words)


def examples_of(entry: CatalogEntry) -> list[dict[str, Any]]:
    """Return inputs that work: the entry's own, or that of its contract."""
    if entry.examples:
        return list(entry.examples)
    contract = contract_of(entry)
    return [contract.example] if contract is not None else []


def order_view(
    entry: CatalogEntry, task: Task, sizes: Mapping[str, int] | None = None
) -> TypicalOrderView:
    """Return the order that ``typical_price`` is for, or one of other sizes."""
    usage = typical_usage(entry, task, sizes)
    quantities: Mapping[str, float] = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "images": usage.images,
        "video_seconds": usage.video_ms / 1000,
        "audio_seconds": usage.audio_ms / 1000,
        "characters": usage.characters,
    }
    given = {name: quantity for name, quantity in quantities.items() if quantity}
    return {"task": task, "quantities": given, "attributes": usage.attributes}


def _contract_view(contract: Contract) -> ContractView:
    expected = contract.expected_seconds
    return {
        "is_complete": contract.is_complete,
        "expected_seconds": {
            "least": expected.least,
            "most": expected.most,
            "is_guess": not {"calls", "docs"} & {*expected.evidence},
        },
        "strengths": list(contract.strengths),
        "notes": list(contract.notes),
        "parameters": [
            {
                "name": parameter.name,
                "vendor_name": parameter.sent_as,
                "type": parameter.type,
                "required": parameter.required,
                "options": [*(parameter.values or parameter.options)],
                "min": parameter.min,
                "max": parameter.max,
                "pixels": list(parameter.pixels) if parameter.pixels else None,
                "default": parameter.default,
                "guesses": parameter.guessed(),
                "description": parameter.description,
            }
            for parameter in contract.parameters
        ],
        "forbidden": [dict(combination) for combination in contract.forbidden],
        "example": contract.example,
    }


def _workflow_view(entry: CatalogEntry) -> WorkflowView:
    """Return a workflow's inputs and steps; without a price of its own, it is priced by steps."""
    assert entry.workflow is not None
    return {
        "inputs": {
            name: {
                "type": given.type,
                "required": given.required,
                "default": given.default,
                "description": given.description,
            }
            for name, given in entry.workflow.inputs.items()
        },
        "steps": [
            {
                "name": step.name,
                "model": step.model,
                "task": step.task,
                "retries": step.retries,
                "when": step.when,
            }
            for step in entry.workflow.run_steps
        ],
        "priced_by": "workflow" if entry.price else "steps",
    }


def model_view(
    entry: CatalogEntry, announcements: Sequence[Announcement], created: int
) -> ModelView:
    """Return a model for OpenAI's list, with OpenRouter's ``pricing`` and ``architecture``."""
    reads, makes = modalities(entry)
    missing = availability(entry, announcements)
    return {
        "id": entry.name,
        "object": "model",
        "created": created,
        "owned_by": entry.vendor or "tollgate",
        "canonical_slug": entry.name,
        "aliases": list(entry.aliases),
        "name": entry.name,
        "description": entry.description,
        "context_length": entry.limits.context_tokens,
        "architecture": {
            "input_modalities": reads,
            "output_modalities": makes,
            "modality": f"{'+'.join(reads)}->{'+'.join(makes)}",
            "tokenizer": "Other",
            "instruct_type": None,
        },
        "pricing": openrouter_pricing(entry),
        "top_provider": {
            "context_length": entry.limits.context_tokens,
            "max_completion_tokens": entry.limits.output_tokens,
            "is_moderated": False,
        },
        "per_request_limits": None,
        "links": {"details": f"/v1/catalog/{entry.name}"},
        "supported_parameters": list(_CHAT_PARAMETERS) if "text" in makes else [],
        "supported_voices": list(entry.known_voices) or None,
        "supported_adapters": list(entry.known_adapters) or None,
        "default_parameters": entry.default_parameters.model_dump(exclude_none=True),
        "task": entry.task,
        "available": missing is None,
        "reason": None if missing is None else missing.reason,
        "price": price_view(entry),
    }


def providers_view(entry: CatalogEntry, model: ModelView) -> ProvidersView:
    """Return a model with its only provider, as OpenRouter lists the endpoints of a model.

    OpenRouter's client rejects an endpoint that lacks any of these fields, or whose
    ``context_length`` is null.
    """
    calls_tools = "tool_choice" in model["supported_parameters"]
    endpoint: ProviderView = {
        "name": f"{PROVIDER} | {model['id']}",
        "model_id": model["id"],
        "model_name": model["name"],
        "provider_name": PROVIDER,
        "tag": PROVIDER,
        "context_length": model["context_length"] or 0,
        "max_completion_tokens": model["top_provider"]["max_completion_tokens"],
        "max_prompt_tokens": None,
        "pricing": model["pricing"],
        "quantization": None,
        "status": 0 if model["available"] else -1,
        "supported_parameters": model["supported_parameters"],
        "supports_implicit_caching": True,
        "supports_tool_choice": {
            "auto": calls_tools,
            "function": calls_tools,
            "none": calls_tools,
            "required": calls_tools,
        },
        "supports_voice_cloning": "voice-clone" in (entry.task, *entry.also),
        "latency_last_30m": None,
        "throughput_last_30m": None,
        "uptime_last_5m": None,
        "uptime_last_30m": None,
        "uptime_last_1d": None,
    }
    return {
        "id": model["id"],
        "name": model["name"],
        "created": model["created"],
        "description": model["description"],
        "architecture": model["architecture"],
        "endpoints": [endpoint],
    }


def batch_view(entry: CatalogEntry) -> BatchPriceView | None:
    """Return an entry's price in batches, or None if it is not sold in batches."""
    if entry.discount is None:
        return None
    try:
        sold = entry.at(discounted(entry.selling_price, Fraction(entry.discount)))
    except Unbookable:
        return None
    return {
        "discount": entry.discount,
        "price": price_view(sold),
        "minimum": format_usd(sold.minimum) if sold.minimum else None,
    }


def price_view(entry: CatalogEntry) -> list[PriceLineView]:
    """Return the exact price: amounts as decimal strings of USD without exponent."""
    return [
        {
            "unit": line.unit,
            "amount": format_usd(line.amount),
            "per": line.per,
            "when": dict(line.when) or None,
        }
        for line in entry.price
    ]


def from_price(entry: CatalogEntry) -> Fraction | None:
    """Return the lowest price in USD per single unit of the entry's first priced unit.

    None for a workflow that is priced by its steps.
    """
    if not entry.price:
        return None
    first = entry.price[0].unit
    return min(_rate(line) for line in entry.price if line.unit == first)


def decimal(value: Fraction) -> str:
    """Format a number without exponent, rounded to 18 decimals: enough for a nano-dollar per
    thousand million units."""
    scaled = round(value * 10**18)
    text = f"{scaled // 10**18}.{scaled % 10**18:018d}"
    return text.rstrip("0").rstrip(".")


def openrouter_pricing(entry: CatalogEntry) -> Mapping[str, str]:
    """Return USD per single unit for the units that OpenRouter names; the highest price if it is
    conditional."""
    dearest: dict[str, Fraction] = dict.fromkeys(("prompt", "completion", "request"), Fraction(0))
    for line in entry.price:
        name = _OPENROUTER_NAMES.get(line.unit)
        if name is not None:
            dearest[name] = max(dearest.get(name, Fraction(0)), _rate(line))
    return {name: decimal(rate) for name, rate in dearest.items()}


def _rate(line: PriceLine) -> Fraction:
    return Fraction(line.amount, line.per * NANOS_PER_USD)


def modalities(entry: CatalogEntry) -> tuple[list[Modality], list[Modality]]:
    """Return the input and output modalities of an entry, over all its tasks."""
    kinds = [TASKS[task] for task in (entry.task, *entry.also)]
    reads: dict[Modality, None] = dict.fromkeys(read for kind in kinds for read in kind.reads)
    reads |= dict.fromkeys(entry.input)
    return list(reads), list(dict.fromkeys(kind.makes for kind in kinds))

"""What a new catalog changes for customers: prices, models, limits, choices, workflows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from gateway.catalog.picking.typical import Find, typical_nanos
from gateway.catalog.schema import CatalogEntry
from gateway.pricing import format_usd

Effect: TypeAlias = Literal["worse", "better", "other"]
"""``worse``: a request costs more, is refused, or ends otherwise than before."""

_NOT_LIMITS: Final = frozenset({"template_tokens", "side_step", "dimensions"})
"""Limits of which less is not tighter."""
_CHOICES: Final[Mapping[str, str]] = {
    "sizes": "size",
    "qualities": "quality",
    "schedulers": "scheduler",
    "resolutions": "resolution",
    "known_adapters": "adapter",
    "known_controls": "control",
    "known_references": "reference",
    "known_voices": "voice",
    "known_languages": "language",
}
_FREE: Final = frozenset({"sizes"})
"""Choices of which none listed means that all are accepted."""
_BEHIND: Final[Mapping[str, str]] = {
    "engine": "It runs on another engine; results can differ.",
    "checkpoint": "It runs from another checkpoint; results can differ.",
    "upstream": "Its upstream changes.",
    "options": "Its options change; results can differ.",
    "canary": "The versions that share its requests change.",
    "default_parameters": "Defaults change; results of requests that rely on them can differ.",
    "slo": "The speed that it promises changes.",
}
_ORDER: Final[Mapping[Effect, int]] = {"worse": 0, "other": 1, "better": 2}


@dataclass(frozen=True, slots=True)
class CatalogChange:
    """A difference for the customers of a model, as a sentence; ``field`` is what changes."""

    model: str
    field: str
    effect: Effect
    sentence: str


def compare(
    old: Sequence[CatalogEntry], new: Sequence[CatalogEntry], *, in_force: Find | None = None
) -> list[CatalogChange]:
    """Return what changes for customers, worst first, then by model.

    ``in_force`` finds an entry at the list price of this moment, which an operator may have set: a
    changed price replaces that.
    """
    before = {entry.name: entry for entry in old}
    after = {entry.name: entry for entry in new}
    found = [
        *_gone(before, after),
        *(
            CatalogChange(name, "model", "better", f"New, at {price_text(entry)}.")
            for name, entry in after.items()
            if name not in before
        ),
    ]
    for name in before.keys() & after.keys():
        one, other = before[name], after[name]
        found += _price_changes(one, other, before, after, in_force)
        found += _entry_changes(one, other)
    return sorted(found, key=lambda each: (_ORDER[each.effect], each.model, each.field))


def price_text(entry: CatalogEntry) -> str:
    """Return a price in one line, such as ``$0.02 per 1,000,000 input_token``."""
    if not entry.price:
        return "the sum of its steps"
    parts = []
    for line in entry.price:
        per = "" if line.per == 1 else f"{line.per:,} "
        when = ", ".join(f"{name} {value}" for name, value in line.when.items())
        parts.append(f"${format_usd(line.amount)} per {per}{line.unit}{f' ({when})' * bool(when)}")
    least = f", at least ${format_usd(entry.minimum)}" if entry.minimum else ""
    return "; ".join(parts) + least


def _gone(
    before: Mapping[str, CatalogEntry], after: Mapping[str, CatalogEntry]
) -> Iterator[CatalogChange]:
    served = {alias: entry.name for entry in after.values() for alias in entry.aliases}
    for name, entry in before.items():
        if name not in after:
            yield _lost_name(name, "model", "No longer on sale", served)
        for alias in entry.aliases:
            if alias not in served and alias not in after:
                yield CatalogChange(
                    name, "aliases", "worse", f"Requests for its alias {alias} are refused."
                )


def _lost_name(name: str, field: str, what: str, served: Mapping[str, str]) -> CatalogChange:
    if name in served:
        sentence = f"{what}; {served[name]} serves requests for it, at its own price."
        return CatalogChange(name, field, "other", sentence)
    return CatalogChange(name, field, "worse", f"{what}: requests for it are refused.")


def _price_changes(
    old: CatalogEntry,
    new: CatalogEntry,
    before: Mapping[str, CatalogEntry],
    after: Mapping[str, CatalogEntry],
    in_force: Find | None,
) -> Iterator[CatalogChange]:
    typical = typical_nanos(old, before.get), typical_nanos(new, after.get)
    if old.selling_price != new.selling_price:
        known = (in_force(old.name) if in_force is not None else None) or old
        if known.selling_price == new.selling_price:
            return
        typical = typical_nanos(known, before.get), typical[1]
        sentence = f"{price_text(known)} becomes {price_text(new)}"
        yield CatalogChange(
            old.name, "price", _rise(*typical), f"{sentence}{_typical_text(*typical)}."
        )
    elif old.workflow is not None and typical[0] != typical[1]:
        what = "The price of its steps changes"
        yield CatalogChange(old.name, "price", _rise(*typical), f"{what}{_typical_text(*typical)}.")
    if old.discount != new.discount:
        yield _discount_change(old, new)


def _discount_change(old: CatalogEntry, new: CatalogEntry) -> CatalogChange:
    if new.discount is None:
        return CatalogChange(old.name, "batch", "worse", "No longer sold in batches.")
    if old.discount is None:
        return CatalogChange(
            old.name, "batch", "better", f"Sold in batches, with a discount of {new.discount}."
        )
    effect: Effect = "worse" if float(new.discount) < float(old.discount) else "better"
    sentence = f"The discount in batches is {new.discount}, not {old.discount}."
    return CatalogChange(old.name, "batch_discount", effect, sentence)


def _rise(before: int | None, after: int | None) -> Effect:
    if before is None or after is None or before == after:
        return "other"
    return "worse" if after > before else "better"


def _typical_text(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return ""
    if before == after:
        return f"; a usual order still costs ${format_usd(after)}"
    share = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
    return f"; a usual order costs ${format_usd(after)}, not ${format_usd(before)}{share}"


def _entry_changes(old: CatalogEntry, new: CatalogEntry) -> Iterator[CatalogChange]:
    name = old.name
    if old.task != new.task:
        yield CatalogChange(name, "task", "worse", f"Its task is {new.task}, not {old.task}.")
    yield from _choice_changes(name, "also", "task", old.also, new.also)
    yield from _limit_changes(name, old.limits.model_dump(), new.limits.model_dump())
    for field, singular in _CHOICES.items():
        was, now = list(getattr(old, field)), list(getattr(new, field))
        if field in _FREE and not was and now:
            sentence = f"Only these are accepted: {', '.join(now)}."
            yield CatalogChange(name, field, "worse", sentence)
        elif field in _FREE and was and not now:
            yield CatalogChange(name, field, "better", f"Any {singular} is accepted.")
        else:
            yield from _choice_changes(name, field.removeprefix("known_"), singular, was, now)
    if not old.contract and new.contract:
        sentence = "Requests are checked against the contract of its vendor."
        yield CatalogChange(name, "contract", "other", sentence)
    for field, sentence in _BEHIND.items():
        if getattr(old, field) != getattr(new, field):
            yield CatalogChange(name, field, "other", sentence)
    yield from _workflow_changes(old, new)


def _choice_changes(
    model: str, field: str, singular: str, old: Sequence[str], new: Sequence[str]
) -> Iterator[CatalogChange]:
    lost = [each for each in old if each not in new]
    added = [each for each in new if each not in old]
    if lost:
        sentence = f"No longer accepted as {singular}: {', '.join(lost)}."
        yield CatalogChange(model, field, "worse", sentence)
    if added:
        sentence = f"Also accepted as {singular}: {', '.join(added)}."
        yield CatalogChange(model, field, "better", sentence)


def _limit_changes(
    model: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[CatalogChange]:
    for name, before in old.items():
        after = new[name]
        if before == after:
            continue
        field = f"limits.{name}"
        if after is None:
            yield CatalogChange(model, field, "better", f"The limit of {before:g} is lifted.")
            continue
        tighter = before is None or after < before
        effect: Effect = "worse" if tighter else "better"
        was = "" if before is None else f", not {before:g}"
        yield CatalogChange(
            model, field, "other" if name in _NOT_LIMITS else effect, f"It is {after:g}{was}."
        )


def _workflow_changes(old: CatalogEntry, new: CatalogEntry) -> Iterator[CatalogChange]:
    if (old.workflow is None) != (new.workflow is None):
        what = "is one model" if new.workflow is None else "is a workflow"
        yield CatalogChange(old.name, "workflow", "worse", f"It {what} now; its inputs differ.")
    if old.workflow is None or new.workflow is None or old.workflow == new.workflow:
        return
    was, now = old.workflow.inputs, new.workflow.inputs
    for name in was.keys() - now.keys():
        sentence = f"The input {name} is gone: requests with it are refused."
        yield CatalogChange(old.name, f"workflow.inputs.{name}", "worse", sentence)
    for name, input in now.items():
        field, before = f"workflow.inputs.{name}", was.get(name)
        if before is not None and before.type != input.type:
            sentence = f"The input {name} is {input.type}, not {before.type}."
            yield CatalogChange(old.name, field, "worse", sentence)
        elif input.required and (before is None or not before.required):
            sentence = f"The input {name} is required: requests without it are refused."
            yield CatalogChange(old.name, field, "worse", sentence)
        elif before is None:
            yield CatalogChange(old.name, field, "better", f"The input {name} is accepted.")
    if old.workflow.steps != new.workflow.steps:
        models = ", ".join(dict.fromkeys(step.model for step in new.workflow.steps))
        sentence = f"Its steps change; they use {models}."
        yield CatalogChange(old.name, "workflow.steps", "other", sentence)

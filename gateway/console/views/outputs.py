"""Outputs of requests, as an account's own people see them. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from gateway.api.http.media_views import media_of
from gateway.ledger.closed import ClosedRequest
from workers.contract.media import Medium

TEXT_MAX: Final = 4_000
"""Characters of a text that a page shows; the whole is fetched by the API."""


@dataclass(frozen=True, slots=True)
class ShownMedium:
    """An image, a video or audio; ``position`` is its place among the outputs."""

    position: int
    kind: str
    stored: bool
    facts: str
    error: str | None


@dataclass(frozen=True, slots=True)
class ShownOutput:
    texts: Sequence[str]
    media: Sequence[ShownMedium]
    value: str
    """Everything but texts and media, as JSON; empty if there is nothing else."""
    cut: bool
    kept_until: datetime | None


def shown_output(closed: ClosedRequest) -> ShownOutput | None:
    """Return what a page shows of an output; None if it was deleted or there is none."""
    if closed.output is None:
        return None
    value = dict(closed.output.value)
    media = [_medium(position, one) for position, one in enumerate(media_of(closed))]
    value.pop("media", None)
    texts = [_text(choice) for choice in value.pop("choices", ())]
    rest = json.dumps(value, ensure_ascii=False, indent=2) if value else ""
    return ShownOutput(
        texts=[text[:TEXT_MAX] for text in texts],
        media=media,
        value=rest[:TEXT_MAX],
        cut=any(len(text) > TEXT_MAX for text in (*texts, rest)),
        kept_until=closed.kept_until,
    )


def _text(choice: object) -> str:
    """Return the text of a choice, otherwise the choice as JSON: it called tools."""
    if isinstance(choice, dict) and isinstance(text := choice.get("text"), str) and text:
        return text
    return json.dumps(choice, ensure_ascii=False, indent=2)


def _medium(position: int, one: Medium) -> ShownMedium:
    fields = msgspec.to_builtins(one)
    facts = []
    if fields.get("width"):
        facts.append(f"{fields['width']} \N{MULTIPLICATION SIGN} {fields['height']}")
    if fields.get("duration_ms"):
        facts.append(f"{fields['duration_ms'] / 1000:g} s")
    if fields.get("seed") is not None:
        facts.append(f"seed {fields['seed']}")
    return ShownMedium(
        position=position,
        kind=one.kind,
        stored=one.blob is not None,
        facts=" · ".join(facts),
        error=fields.get("error") or None,
    )

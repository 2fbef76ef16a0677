"""Outputs of requests, as an account's own people see them. Pure."""

from __future__ import annotations

import itertools
import json
import math
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from gateway.api.http.media_views import blob_of, media_of
from gateway.ledger.closed import ClosedRequest
from workers.contract.media import Medium

TEXT_MAX: Final = 4_000
"""Characters of a text that a page shows; the whole is fetched by the API."""
SHOWN: Final = 6
"""Numbers of an embedding that a page shows."""
COMPARED_MAX: Final = 6
"""Embeddings that are compared with each other."""


@dataclass(frozen=True, slots=True)
class ShownMedium:
    """An image, a video, audio or a score, which browsers do not play; ``position`` is its place
    among the outputs."""

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
    """Vectors, and everything else as JSON; empty if there is nothing else."""
    cut: bool
    kept_until: datetime | None


def shown_output(closed: ClosedRequest) -> ShownOutput | None:
    """Return what a page shows of an output; None if it was deleted or there is none."""
    if closed.output is None:
        return None
    value = dict(closed.output.value)
    media = [_medium(position, one, closed) for position, one in enumerate(media_of(closed))]
    value.pop("media", None)
    texts = [_text(choice) for choice in value.pop("choices", ())]
    vectors = vectors_text(value.pop("vectors", ()))
    rest = vectors + (json.dumps(value, ensure_ascii=False, indent=2) if value else "")
    return ShownOutput(
        texts=[text[:TEXT_MAX] for text in texts],
        media=media,
        value=rest[:TEXT_MAX],
        cut=any(len(text) > TEXT_MAX for text in (*texts, rest)),
        kept_until=closed.kept_until,
    )


def vectors_text(vectors: Sequence[bytes]) -> str:
    """Return how embeddings begin, and how alike the first of them are to each other."""
    numbers = [struct.unpack(f"<{len(vector) // 4}f", vector) for vector in vectors]
    lines = [
        f"{place}: {len(each)} numbers, " + "".join(f"{one:.4f}, " for one in each[:SHOWN]) + "…"
        for place, each in enumerate(numbers, start=1)
    ]
    pairs = itertools.combinations(enumerate(numbers[:COMPARED_MAX], start=1), 2)
    lines += [f"cosine of {a} and {b}: {_cosine(one, other):.4f}" for (a, one), (b, other) in pairs]
    return "".join(f"{line}\n" for line in lines)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(operator.mul, one, other)) / lengths if lengths else 0.0


def _text(choice: object) -> str:
    """Return the text of a choice, otherwise the choice as JSON: it called tools."""
    if isinstance(choice, dict) and isinstance(text := choice.get("text"), str) and text:
        return text
    return json.dumps(choice, ensure_ascii=False, indent=2)


def _medium(position: int, one: Medium, closed: ClosedRequest) -> ShownMedium:
    fields = msgspec.to_builtins(one)
    facts = []
    if fields.get("width"):
        facts.append(f"{fields['width']} \N{MULTIPLICATION SIGN} {fields['height']}")
    if fields.get("duration_ms"):
        facts.append(f"{fields['duration_ms'] / 1000:g} s")
    if fields.get("seed") is not None:
        facts.append(f"seed {fields['seed']}")
    blob = blob_of(closed, one)
    is_score = blob is not None and blob.content_type == "audio/midi"
    if is_score:
        facts.insert(0, "score, MIDI")
    return ShownMedium(
        position=position,
        kind="score" if is_score else one.kind,
        stored=one.blob is not None,
        facts=" · ".join(facts),
        error=fields.get("error") or None,
    )

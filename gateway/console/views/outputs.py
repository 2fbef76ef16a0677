"""Outputs of requests, as an account's own people see them. Pure."""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import msgspec

from gateway.api.http.media_views import blob_of, media_of
from gateway.console.views.tokens import ShownTokens, shown_tokens
from gateway.ledger.closed import ClosedRequest
from workers.contract.media import Medium, Transcript

TEXT_MAX: Final = 4_000
"""Characters of a text that a page shows; the whole is fetched by the API."""
SHOWN: Final = 6
"""Numbers of an embedding that a page shows."""
COMPARED_MAX: Final = 6
"""Embeddings that are compared with each other."""


STILLS: Final[Mapping[str, str]] = {"thumbnail": "first picture", "spritesheet": "sheet of frames"}
"""Roles of the pictures of a video, with their names."""


@dataclass(frozen=True, slots=True)
class Still:
    """A picture of a video; ``position`` is its place among the outputs."""

    position: int
    label: str


@dataclass(frozen=True, slots=True)
class ShownMedium:
    """An image, a video, audio or a score, which browsers do not play; ``position`` is its place
    among the outputs."""

    position: int
    kind: str
    role: str
    stored: bool
    facts: str
    seed: int | None
    error: str | None
    poster: int | None = None
    """Position of the picture that a video shows before it plays."""
    stills: Sequence[Still] = ()


@dataclass(frozen=True, slots=True)
class ShownOutput:
    texts: Sequence[str]
    media: Sequence[ShownMedium]
    """In order; the pictures of a video that can be played are its ``stills``."""
    value: str
    """Vectors, scores and transcripts as lines, and everything else as JSON; empty if there is
    nothing else."""
    tokens: Sequence[ShownTokens]
    """Log probabilities of each text, if they were asked for."""
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
    readable = "".join(show(value.pop(name)) for name, show in _READABLE.items() if name in value)
    rest = readable + (json.dumps(value, ensure_ascii=False, indent=2) if value else "")
    return ShownOutput(
        texts=[text[:TEXT_MAX] for text in texts],
        media=media,
        value=rest[:TEXT_MAX],
        tokens=shown_tokens(closed),
        cut=any(len(text) > TEXT_MAX for text in (*texts, rest)),
        kept_until=closed.kept_until,
    )


def output_file(closed: ClosedRequest) -> bytes:
    """Return a whole output as JSON, with vectors as numbers. Media are files of their own."""
    value = dict(closed.output.value) if closed.output is not None else {}
    value.pop("media", None)
    if "vectors" in value:
        value["vectors"] = [_numbers(vector) for vector in value["vectors"]]
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def vectors_text(vectors: Sequence[bytes]) -> str:
    """Return how embeddings begin, their norms, and a table of the cosines of the first ones.

    Once it is longer than ``TEXT_MAX``, nothing more is added.
    """
    lines, length = [], 0
    for place, vector in enumerate(vectors, start=1):
        each = _numbers(vector)
        beginning = "".join(f"{one:.4f}, " for one in each[:SHOWN])
        lines.append(f"{place}: {len(each)} numbers, norm {math.hypot(*each):.4f}: {beginning}…")
        length += len(lines[-1]) + 1
        if length > TEXT_MAX:
            return "".join(f"{line}\n" for line in lines)
    compared = [_numbers(vector) for vector in vectors[:COMPARED_MAX]]
    if len(compared) > 1:
        lines.append("cosine" + "".join(f"{place:>9}" for place in range(1, len(compared) + 1)))
    for place, one in enumerate(compared if len(compared) > 1 else (), start=1):
        cosines = (_cosine(one, other) for other in compared)
        lines.append(f"{place:>6}" + "".join(f"{cosine:>9.4f}" for cosine in cosines))
    return "".join(f"{line}\n" for line in lines)


def scores_text(scores: Sequence[float]) -> str:
    """Return the scores of documents, the best first, with the places of the documents."""
    ordered = sorted(enumerate(scores, start=1), key=lambda each: -each[1])
    return "".join(f"{score:.4f}  document {place}\n" for place, score in ordered)


def transcript_text(transcript: Mapping[str, Any]) -> str:
    """Return the segments of a transcript and its words, with the seconds of their speech."""
    found = msgspec.convert(transcript, Transcript)
    about = f"{found.duration_ms / 1000:g} s" + (f", {found.language}" if found.language else "")
    timed = [
        f"{one.start_ms / 1000:7.2f} to {one.end_ms / 1000:.2f}  {one.text.strip()}"
        for part in (found.segments, found.words)
        for one in part
    ]
    return "".join(f"{line}\n" for line in (about, *timed))


_READABLE: Final[Mapping[str, Callable[[Any], str]]] = {
    "vectors": vectors_text,
    "scores": scores_text,
    "transcript": transcript_text,
}
"""Values of outputs that a page shows as lines and not as JSON."""


def _numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


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
        role=one.role,
        stored=one.blob is not None,
        facts=" · ".join(facts),
        seed=fields.get("seed"),
        error=fields.get("error") or None,
    )


def with_stills(media: Sequence[ShownMedium]) -> list[ShownMedium]:
    """Move pictures of videos into the videos that they are of: in order if each video has one, or
    else all of them into each."""
    videos = [one for one in media if one.kind == "video" and one.stored]
    if not videos:
        return list(media)
    by_role = {role: [one for one in media if one.role == role and one.stored] for role in STILLS}
    shown = []
    for one in media:
        if one in videos:
            place = videos.index(one)
            own = {
                role: [some[place]] if len(some) == len(videos) else some
                for role, some in by_role.items()
            }
            stills = [Still(each.position, STILLS[role]) for role in own for each in own[role]]
            poster = own["thumbnail"][0].position if own["thumbnail"] else None
            shown.append(replace(one, poster=poster, stills=stills))
        elif one.role not in STILLS:
            shown.append(one)
    return shown

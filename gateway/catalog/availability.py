"""Whether a model can be had now, from what the living workers say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.catalog.schema import Entry
from workers.contract.streams import Announcement


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why not: a code for programs and a sentence for people."""

    code: Literal["upstream_not_configured", "no_worker"]
    reason: str


def availability(entry: Entry, announcements: Sequence[Announcement]) -> Unavailable | None:
    """None if a worker serves the model and takes jobs."""
    reasons = []
    for worker in announcements:
        if entry.name in worker.models and not worker.draining:
            return None
        if entry.name in worker.unavailable:
            reasons.append(worker.unavailable[entry.name])
    if entry.upstream is None:
        return Unavailable("no_worker", reasons[0] if reasons else "no worker serves it now")
    hint = "no worker serves it now"
    if entry.upstream.credential is not None:
        hint = f"set {entry.upstream.credential} in the worker's environment"
    return Unavailable("upstream_not_configured", reasons[0] if reasons else hint)

"""Notes about a job's request at an upstream, so that another worker can take it over.

An intent is stored before the request is sent, and its number as soon as it is known. A worker that
takes over the job polls that number. With an intent but no number it is unknown whether the
upstream accepted the request, so it is not sent again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec


async def _keep_nothing(note: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes of one job."""

    found: str = ""
    """Note of an earlier holder of the job."""
    keep: Callable[[str], Awaitable[bool]] = _keep_nothing
    """Replace the note; returns False if another worker holds the job now."""


NO_NOTES: Final = Notes()


class UpstreamNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request at an endpoint; without a number it is only an intent."""

    endpoint: str
    model: str
    number: str = ""


def write_note(noted: UpstreamNote) -> str:
    return msgspec.json.encode(noted).decode()


def read_note(note: str) -> UpstreamNote | None:
    """Decode a note; None if it is empty. A malformed note counts as an intent."""
    if not note:
        return None
    try:
        return msgspec.json.decode(note, type=UpstreamNote)
    except msgspec.DecodeError:
        return UpstreamNote("", "")

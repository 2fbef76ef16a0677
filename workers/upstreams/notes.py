"""What is kept with a job about its order at an upstream, so that another worker can follow it.

An intent is kept before an order is sent, and its number as soon as it is known. Who takes the job
over follows the number. An intent without one means that nobody knows whether the order was taken:
it is not sent again.
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
    """Kept by an earlier holder of the job."""
    keep: Callable[[str], Awaitable[bool]] = _keep_nothing
    """Replace the note; False if another worker holds the job by now."""


NO_NOTES: Final = Notes()


class UpstreamNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """An order at an endpoint; without a number it was about to be sent."""

    endpoint: str
    model: str
    number: str = ""


def write_note(noted: UpstreamNote) -> str:
    return msgspec.json.encode(noted).decode()


def read_note(note: str) -> UpstreamNote | None:
    """Read what was kept; None if nothing was. A note that cannot be read is an intent."""
    if not note:
        return None
    try:
        return msgspec.json.decode(note, type=UpstreamNote)
    except msgspec.DecodeError:
        return UpstreamNote("", "")

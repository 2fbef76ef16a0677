"""What a worker reports about an attempt for the operator alone; customers never see it.

As with all messages between gateway and workers, unknown fields are ignored and a new field has a
default.
"""

from __future__ import annotations

from typing import Final

import msgspec

UNREAD_CHARS_MAX: Final = 32_000
"""Maximum length of ``UnreadResult.body``."""


class RunDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where and how a job ran; empty if it is unknown."""

    device: str = ""
    """Name of the device, such as ``NVIDIA H200`` or ``cpu``."""
    dtype: str = ""
    """Precision of the weights, such as ``bfloat16``."""
    rows: int = 0
    """Most requests that shared a step with this one, itself included."""
    endpoint: str = ""
    """Host of the upstream's endpoint."""
    served_by: str = ""
    """The endpoint that was chosen of several, by its model."""


class UnreadResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """A result that an upstream charges, but of which nothing, or only a part, could be read."""

    reason: str
    """Empty until it is known that a result was not read or stored."""
    number: str = ""
    """Number of the request at the upstream, under which the result may still be available."""
    model: str = ""
    """The upstream's name of the model."""
    endpoint: str = ""
    body: str = ""
    """The upstream's result as JSON. Long strings in it are shortened."""

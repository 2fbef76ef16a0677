"""What differs by the surface that was called, known by its path: the shape of an error, and the
header that brings a key.

Also what never reached a handler (no key, no such path, too large a body) has a path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gateway.errors import TollgateError, render_detail, render_openai, render_text

Renderer: TypeAlias = Callable[[TollgateError], Mapping[str, Any]]

GMI: Final = "/api/v1/ie/requestqueue/apikey"
"""Below it lies GMI Cloud's request queue."""
ELEVENLABS: Final = "/elevenlabs"
"""Below it lies what ElevenLabs' clients call."""


@dataclass(frozen=True, slots=True)
class Dialect:
    prefix: str
    render: Renderer
    key_header: str | None = None
    """Where a key is sent instead of as ``Authorization: Bearer``, which is taken everywhere."""


_OPENAI: Final = Dialect("", render_openai)
_OTHERS: Final = (
    Dialect(GMI, render_text),
    Dialect(ELEVENLABS, render_detail, key_header="xi-api-key"),
)
"""Whatever lies elsewhere is as OpenAI's."""


def dialect_of(path: str) -> Dialect:
    return next((one for one in _OTHERS if path.startswith(one.prefix)), _OPENAI)

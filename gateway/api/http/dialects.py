"""The dialect of a path: the shape of its errors, and the header that carries the key.

This is not the list of dialects: each is a folder in ``gateway/api``, connected in
``gateway/app.py``. One is named here only if its errors or its key header differ from OpenAI's.
Errors before a handler is reached (no key, unknown path, body too large) have a path, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gateway.errors import TollgateError, render_detail, render_openai, render_text

Renderer: TypeAlias = Callable[[TollgateError], Mapping[str, Any]]

GMI: Final = "/api/v1/ie/requestqueue/apikey"
"""Prefix of GMI Cloud's request queue."""
ELEVENLABS: Final = "/elevenlabs"
"""Prefix of ElevenLabs' API."""


@dataclass(frozen=True, slots=True)
class Dialect:
    prefix: str
    render: Renderer
    key_header: str | None = None
    """Header for the key, besides ``Authorization: Bearer``, which every dialect accepts."""


_OPENAI: Final = Dialect("", render_openai)
_OTHERS: Final = (
    Dialect(GMI, render_text),
    Dialect(ELEVENLABS, render_detail, key_header="xi-api-key"),
)


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path; OpenAI's for any other prefix."""
    return next((one for one in _OTHERS if path.startswith(one.prefix)), _OPENAI)

"""In which shape an error is told: that of the surface that was called, known by its path.

Also what never reached a handler (no key, no such path, too large a body) has a path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from gateway.errors import TollgateError, render_openai, render_text

Renderer: TypeAlias = Callable[[TollgateError], dict[str, Any]]

GMI: Final = "/api/v1/ie/requestqueue/apikey"
"""Below it lies GMI Cloud's request queue."""
_OTHERS: Final[tuple[tuple[str, Renderer], ...]] = ((GMI, render_text),)
"""Whatever is not named here has OpenAI's errors."""


def render(path: str, error: TollgateError) -> dict[str, Any]:
    """The body of an error in the dialect of a path."""
    for prefix, renderer in _OTHERS:
        if path.startswith(prefix):
            return renderer(error)
    return render_openai(error)

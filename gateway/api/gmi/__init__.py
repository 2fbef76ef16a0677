"""GMI Cloud's request queue, for its clients."""

from __future__ import annotations

from typing import Final

from litestar.types import ControllerRouterHandler

from gateway.api.gmi.requests import GmiController

MEDIA_HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (GmiController,)
"""Their bodies may hold files."""

"""GMI Cloud's request queue."""

from __future__ import annotations

from typing import Final

from litestar.types import ControllerRouterHandler

from gateway.api.gmi.requests import GmiController

MEDIA_HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (GmiController,)
"""Handlers whose bodies can contain files."""

"""OpenRouter's API: generations, credits, keys, routing and price caps."""

from __future__ import annotations

from typing import Final

from litestar.types import ControllerRouterHandler

from gateway.api.openrouter.handlers import OpenRouterController

HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (OpenRouterController,)

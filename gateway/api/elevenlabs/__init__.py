"""ElevenLabs' API: speech, music and voices."""

from __future__ import annotations

from typing import Final

from litestar.types import ControllerRouterHandler

from gateway.api.elevenlabs.speech import ElevenLabsController
from gateway.api.elevenlabs.voices import ElevenLabsVoicesController

MEDIA_HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (
    ElevenLabsController,
    ElevenLabsVoicesController,
)
"""Handlers whose bodies can contain files."""

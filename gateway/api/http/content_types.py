"""Content types that handlers declare for the OpenAPI document."""

from __future__ import annotations

from typing import Final

from workers.contract.kinds import EXTENSIONS

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
BYTES: Final = "application/octet-stream"
AUDIO: Final = (*(kind for kind in EXTENSIONS if kind.startswith("audio/")), BYTES)
MEDIA: Final = (*EXTENSIONS, BYTES)

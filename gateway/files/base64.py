"""Outputs that are part of an answer: read whole, as base64."""

from __future__ import annotations

import asyncio
import base64
from typing import Final

from workers.contract.blobs import Blobs
from workers.contract.jobs import BlobRef

INLINE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of all outputs of one answer that has them within it."""


async def as_base64(blobs: Blobs, blob: BlobRef) -> str:
    """Read an output. Raise ``BlobError``."""
    data = await blobs.get(blob)
    # Of megabytes that takes its time.
    return (await asyncio.to_thread(base64.b64encode, data)).decode()

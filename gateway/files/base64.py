"""Outputs embedded in an answer as base64."""

from __future__ import annotations

import asyncio
import base64
from typing import Final

from workers.contract.blobs import Blobs
from workers.contract.jobs import BlobRef

INLINE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum size of all outputs embedded in one answer, in bytes."""


async def as_base64(blobs: Blobs, blob: BlobRef) -> str:
    """Read an output as base64. Raise ``BlobError``."""
    data = await blobs.get(blob)
    # In a thread: encoding megabytes would block the event loop.
    return (await asyncio.to_thread(base64.b64encode, data)).decode()

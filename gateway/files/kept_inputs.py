"""What was sent with a request, as long as it is kept: with its output, and deleted with it.

That of tasks that make images, video or audio is always kept; that of other tasks only if the
account wants it (``keep_inputs``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.files.retention import MediaStore
from workers.contract.jobs import BlobRef


@dataclass(frozen=True, slots=True)
class KeptInput:
    """``input`` has the fields of ``POST /v1/requests``; ``{"attachment": n}`` stands for a
    file, which is the n-th of ``attachments``."""

    model: str
    task: str
    input: Mapping[str, Any]
    attachments: Sequence[BlobRef]


async def kept_input(media: MediaStore, account_id: int, request_id: str) -> KeptInput | None:
    """Return what an account sent with a request; None if it is not kept, or not any more."""
    found = await media.find(account_id, request_id)
    if found is None or found.asked is None or found.asked.order is None:
        return None
    order = found.asked.order
    return KeptInput(order.model, order.task, order.input, found.asked.attachments)

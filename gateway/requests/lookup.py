"""Finds requests of one account, open or closed, one by one or in pages. Reads, never writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.requests.order import Closed, Open


@dataclass(frozen=True, slots=True)
class Page:
    """Requests, newest first, and the cursor of the page after this one if there is one."""

    items: Sequence[Open | Closed]
    next_cursor: str | None

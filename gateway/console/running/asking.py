"""Asks the queue server for what a page shows, without letting the page wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Final, TypeVar

from gateway.sql.outages import QUEUE_OUTAGE

log = logging.getLogger(__name__)

PATIENCE_S: Final = 2.0
FOLLOW_S: Final = 2
"""Interval at which pages follow what happens."""

T = TypeVar("T")


async def asked(call: Awaitable[T]) -> T | None:
    """Return the answer; None if the queue server does not respond in time."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await call
    except QUEUE_OUTAGE as error:
        log.warning("a page is shown without the queue server: %s", type(error).__name__)
        return None

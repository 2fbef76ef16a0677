"""Settles requests with large outputs, which go to the blob store, so that rows in SQL stay small.

The blob is written before the transaction that refers to it, after a row of ``media`` that is
responsible for it. It is deleted if that transaction does not commit. Where this is not known, the
row deletes the blob later, with everything else of the request. If the store does not respond, SQL
keeps the output, and the store is tried again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Final, Self

import msgspec

from gateway.errors import Unavailable
from gateway.files.retention import MediaStore
from gateway.ledger.settle import Closing, Settlement
from gateway.ledger.writer import LedgerWriter
from gateway.sql.outages import OUTAGE
from workers.contract.blobs import BlobError
from workers.contract.jobs import BlobRef, RequestId, pack_value

log = logging.getLogger(__name__)

STORE_S: Final = 5.0
"""Maximum time for which a settlement waits for the blob store."""
PAUSE_S: Final = 10.0
"""Time without attempts after the blob store did not respond."""
BATCHES_MAX: Final = 8
"""Maximum batches that are settled concurrently."""


class LargeOutputs:
    def __init__(self, media: MediaStore, ledger: LedgerWriter, *, row_bytes_max: int) -> None:
        self.row_bytes_max = row_bytes_max
        self._media = media
        self._ledger = ledger
        self._next_at = 0.0
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Cancel what was begun; its outcomes are delivered again."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def begin(self, closing: Coroutine[Any, Any, None]) -> None:
        """Settle a batch concurrently with others, so that small outputs do not wait for the blob
        store. Wait if too many batches are being settled."""

        async def close() -> None:
            try:
                await closing
            except OUTAGE as error:
                log.warning("outcomes wait, trying again: %s", type(error).__name__)
            except Exception:  # a boundary: the outcomes are delivered again
                log.exception("could not settle outcomes with large outputs")

        while len(self._running) >= BATCHES_MAX:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(close())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def settle(self, settlement: Settlement) -> Closing | None:
        """Settle a request, with its output in the blob store if that is large. None if it was
        closed before."""
        output = settlement.output
        if output is None or output.stored is not None:
            return await self._ledger.settle(settlement)
        data = pack_value(output.value)
        stored = None
        if len(data) > self.row_bytes_max:
            stored = await self._store(settlement.request_id, data)
        if stored is None:
            return await self._ledger.settle(settlement)
        # The value stays in memory, for the client that waits here.
        kept = msgspec.structs.replace(
            settlement, output=msgspec.structs.replace(output, stored=stored)
        )
        try:
            closing = await self._ledger.settle(kept)
        except (Unavailable, asyncio.CancelledError, *OUTAGE):
            raise  # It may have been committed.
        except Exception:
            await self._media.delete_output(stored)
            raise
        if closing is None or closing.closed.output is None:
            await self._media.delete_output(stored)
        return closing

    async def _store(self, request_id: RequestId, data: bytes) -> BlobRef | None:
        """Write an output; None if the request is closed, or the store does not respond."""
        if time.monotonic() < self._next_at:
            return None
        try:
            async with asyncio.timeout(STORE_S):
                return await self._media.store_output(request_id, data)
        except (BlobError, TimeoutError) as error:
            self._next_at = time.monotonic() + PAUSE_S
            log.warning("SQL keeps the output of %s: %s", request_id, type(error).__name__)
            return None

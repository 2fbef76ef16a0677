"""Stores the attachments and large inputs of requests, and discards them if none is accepted."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.catalog.tasks import TASKS, Task
from gateway.errors import Unavailable
from gateway.files.fetch import Fetcher
from gateway.files.retention import MediaStore, StoredInput
from gateway.tasks.prepared import Prepared
from workers.contract.blobs import BlobError
from workers.contract.jobs import BlobRef, Job, RequestId, pack_value

KEPT_TASKS: Final = frozenset(
    task for task, kind in TASKS.items() if kind.makes in ("image", "video", "audio")
)
"""Tasks whose outputs are blobs."""
QUEUED_BYTES_MAX: Final = 48 * 1024
"""Maximum size of a job in the queue; the input of a larger one is moved to the blob store."""
PLAIN_BYTES_MAX: Final = 256 * 1024
"""Maximum size of an input that always travels through the queue."""


class Attachments:
    def __init__(self, store: MediaStore, fetcher: Fetcher) -> None:
        self._store = store
        self._fetcher = fetcher

    async def ingest(
        self,
        account_id: int,
        request_id: RequestId,
        task: Task,
        prepared: Prepared,
        *,
        origin: str | None,
    ) -> tuple[BlobRef, ...]:
        """Store the attachments of a request, and its input beside them. Raise
        ``TollgateError``."""
        asked = StoredInput(prepared.input, origin=origin)
        sources = prepared.sources
        await self._store.register(account_id, request_id, task, None if sources else asked)
        if not sources:
            return ()
        attachments = await self._fetcher.fetch(account_id, request_id, sources)
        await self._store.describe(request_id, StoredInput(prepared.input, attachments, origin))
        return attachments

    async def store_input(self, job: Job) -> Job:
        """Move an input that is too large for the queue to the blob store. Raise
        ``Unavailable``."""
        try:
            stored = await self._store.store_input(job, pack_value(job.input))
        except BlobError:
            raise Unavailable(
                "blobs_unavailable", "The store of inputs does not answer.", retry_after_s=2
            ) from None
        return msgspec.structs.replace(job, input={}, stored_input=stored)

    async def discard(self, account_id: int, request_id: RequestId) -> None:
        """Delete the blobs of a request that was not accepted."""
        await self._store.discard(account_id, request_id)


def may_be_stored(task: Task) -> bool:
    """Whether a large input of a task is moved to the blob store. The input of an image is not,
    because it is returned with the image."""
    return TASKS[task].makes in ("text", "embedding")


def keeps_blobs(task: Task, prepared: Prepared) -> bool:
    """Whether a request has attachments or outputs in the blob store."""
    return bool(prepared.sources) or prepared.stores or task in KEPT_TASKS

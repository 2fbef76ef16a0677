"""What happens between a quote and its hold: what the request brings is taken in, or all of it is
discarded again."""

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
"""Of these there is something in the store."""
QUEUED_BYTES_MAX: Final = 48 * 1024
"""Size of a job that travels through the queue; the input of a larger one is stored."""
PLAIN_BYTES_MAX: Final = 256 * 1024
"""Size of an input that always travels through the queue."""


class Attachments:
    def __init__(self, store: MediaStore, fetcher: Fetcher) -> None:
        self._store = store
        self._fetcher = fetcher

    async def take_in(
        self,
        account_id: int,
        request_id: RequestId,
        task: Task,
        prepared: Prepared,
        *,
        origin: str | None,
    ) -> tuple[BlobRef, ...]:
        """Store what a request brings, and note what it asks. Raise ``TollgateError``."""
        if not keeps(task, prepared):
            return ()
        asked = StoredInput(prepared.input, origin=origin)
        sources = prepared.sources
        await self._store.register(account_id, request_id, task, None if sources else asked)
        if not sources:
            return ()
        attachments = await self._fetcher.fetch(account_id, request_id, sources)
        await self._store.describe(request_id, StoredInput(prepared.input, attachments, origin))
        return attachments

    async def shorten(self, job: Job) -> Job:
        """Store the input of a job that is too large for the queue. Raise ``Unavailable``."""
        try:
            stored = await self._store.store_input(job, pack_value(job.input))
        except BlobError:
            raise Unavailable(
                "blobs_unavailable", "The store of inputs does not answer.", retry_after_s=2
            ) from None
        return msgspec.structs.replace(job, input={}, stored_input=stored)

    async def discard_input(self, job: Job) -> None:
        """Leave nothing of a stored input whose request was not accepted."""
        if job.stored_input is not None:
            await self._store.discard(int(job.account_id), job.request_id)

    async def discard(
        self, account_id: int, request_id: RequestId, task: Task, prepared: Prepared
    ) -> None:
        """Leave nothing of a request that was not accepted."""
        if keeps(task, prepared):
            await self._store.discard(account_id, request_id)


def may_be_stored(task: Task) -> bool:
    """Whether a large input of a task goes by the blob store; what is asked of a picture does not,
    because it is shown with the picture."""
    return TASKS[task].makes in ("text", "embedding")


def keeps(task: Task, prepared: Prepared) -> bool:
    return bool(prepared.sources) or prepared.stores or task in KEPT_TASKS

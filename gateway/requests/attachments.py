"""Stores the attachments and large inputs of requests, and discards them if none is accepted."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from gateway.accounts.keys import KeyInfo
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.errors import Unavailable
from gateway.files.durations import duration_ms
from gateway.files.fetch import Fetcher
from gateway.files.retention import MediaStore, SentOrder, StoredInput
from gateway.tasks.prepared import Prepared
from gateway.tasks.sent import sent_input
from gateway.tasks.submission import Submission
from workers.contract.blobs import BlobError, Blobs
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
        submission: Submission,
    ) -> tuple[BlobRef, ...]:
        """Store the attachments of a request, and its input beside them. Raise
        ``TollgateError``."""
        origin, order = submission.origin, _order(submission, task, prepared)
        asked = StoredInput(prepared.input, origin=origin, order=order)
        sources = prepared.sources
        await self._store.register(account_id, request_id, task, None if sources else asked)
        if not sources:
            return ()
        attachments = await self._fetcher.fetch(account_id, request_id, sources)
        await self._store.describe(
            request_id, StoredInput(prepared.input, attachments, origin, order)
        )
        return attachments

    async def measure(self, prepared: Prepared, entry: CatalogEntry, blob: BlobRef) -> Prepared:
        """Bound an input by the duration that its stored attachment states. Raise
        ``TollgateError``."""
        if prepared.measured_by is None:
            return prepared
        try:
            duration_ms = await asyncio.to_thread(_duration_ms, self._store.blobs, blob)
        except BlobError:
            raise Unavailable(
                "blobs_unavailable", "The store of inputs does not answer.", retry_after_s=2
            ) from None
        return prepared.measured_by(entry, prepared, duration_ms)

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


def _duration_ms(blobs: Blobs, blob: BlobRef) -> int | None:
    return duration_ms(blobs.open(blob.key), blob.bytes)


def _order(submission: Submission, task: Task, prepared: Prepared) -> SentOrder | None:
    """Return what was sent; None if it is too large to be kept, or no row can represent it."""
    sent = sent_input(submission.input, prepared.sources, within=submission.within)
    order = SentOrder(submission.alias or submission.model, task, sent)
    try:
        return order if len(msgspec.msgpack.encode(order)) <= PLAIN_BYTES_MAX else None
    except (OverflowError, TypeError):
        return None


def may_be_stored(task: Task) -> bool:
    """Whether a large input of a task is moved to the blob store. The input of an image is not,
    because it is returned with the image."""
    return TASKS[task].makes in ("text", "embedding", "ranking")


def keeps_row(key: KeyInfo, submission: Submission, task: Task, prepared: Prepared) -> bool:
    """Whether a request has a row beside its output: for attachments or outputs in the blob store,
    or because its account keeps inputs. Those of a batch are in its file."""
    if key.keeps_inputs and submission.service_class != "batch":
        return True
    return bool(prepared.sources) or prepared.stores or task in KEPT_TASKS

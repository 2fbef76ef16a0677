"""What happens between a quote and its hold: what the request brings is taken in, or all of it is
discarded again."""

from __future__ import annotations

from typing import Final

from gateway.catalog.tasks import TASKS, Task
from gateway.media.fetch import Fetcher
from gateway.media.store import Asked, MediaStore
from gateway.requests.prepared import Prepared
from workers.contract.jobs import BlobRef, RequestId

KEPT_TASKS: Final = frozenset(
    task for task, kind in TASKS.items() if kind.makes in ("image", "video", "audio")
)
"""Of these there is something in the store."""


class Intake:
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
        asked = Asked(prepared.input, origin=origin)
        sources = prepared.sources
        await self._store.register(account_id, request_id, task, None if sources else asked)
        if not sources:
            return ()
        attachments = await self._fetcher.fetch(account_id, request_id, sources)
        await self._store.describe(request_id, Asked(prepared.input, attachments, origin))
        return attachments

    async def discard(
        self, account_id: int, request_id: RequestId, task: Task, prepared: Prepared
    ) -> None:
        """Leave nothing of a request that was not accepted."""
        if keeps(task, prepared):
            await self._store.discard(account_id, request_id)


def keeps(task: Task, prepared: Prepared) -> bool:
    return bool(prepared.sources) or prepared.stores or task in KEPT_TASKS

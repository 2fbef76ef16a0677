"""What requests have in the blob store: whose it is, what was asked, and when it goes.

All that a request was given and gave lies under one prefix of the store. It is kept while the
request is open and then for as long as its output is; a refused request leaves nothing. Whoever
clears deletes the blobs first and the row after, so nothing is ever left that no row answers for.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, RowMapping, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.ids import is_request_id
from gateway.sql.database import Database
from gateway.tables.core import holds, outputs, receipts
from gateway.tables.files import media
from workers.contract.blobs import BlobError, Blobs, blob_key
from workers.contract.jobs import BlobRef, Job, RequestId

log = logging.getLogger(__name__)

INPUT_PREFIX: Final = "in-"
"""What the nonce of sources begins with, which is given by the gateway."""
STORED: Final = "stored"
"""Stands for the task of a request of which only a large input or output is in the store."""
UNDECIDED: Final = timedelta(minutes=15)
"""A request that is neither held nor closed after this long was never accepted."""
GRACE: Final = timedelta(minutes=1)
"""Beyond its deadline a request has this long to be closed."""
RETRY_PAUSE: Final = timedelta(minutes=10)
"""Pause before blobs that could not be deleted are tried again."""
CHUNK: Final = 100


class StoredInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an accepted request was asked, as its job has it, with what was attached."""

    input: dict[str, Any]
    attachments: tuple[BlobRef, ...] = ()
    origin: str | None = None
    """The request that this one was made from."""


@dataclass(frozen=True, slots=True)
class Record:
    request_id: RequestId
    account_id: int
    task: str
    asked: StoredInput | None


class MediaStore:
    def __init__(self, database: Database, blobs: Blobs, *, retention: timedelta) -> None:
        self._database = database
        self._blobs = self.blobs = blobs
        self._retention = retention

    async def register(
        self, account_id: int, request_id: RequestId, task: str, asked: StoredInput | None
    ) -> None:
        """Answer for what a request that is about to be accepted will have in the store."""
        values = {
            "request_id": request_id,
            "account_id": account_id,
            "task": task,
            "asked": _encode(asked),
            "clear_at": datetime.now(UTC) + UNDECIDED,
        }
        await self._database.write(
            lambda connection: connection.execute(insert(media).values(values))
        )

    async def record_stored(self, stored: Sequence[BlobRef]) -> None:
        """Answer for outputs that workers stored, before the requests that refer to them close."""
        if not stored:
            return
        rows = []
        for blob in stored:
            account_id, request_id, *_ = blob.key.split("/")
            rows.append(
                {
                    "request_id": request_id,
                    "account_id": int(account_id),
                    "task": STORED,
                    "clear_at": datetime.now(UTC) + UNDECIDED,
                }
            )

        def write(connection: Connection) -> None:
            insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
            connection.execute(insert(media).on_conflict_do_nothing(), rows)

        await self._database.write(write)

    async def store_input(self, job: Job, data: bytes) -> BlobRef:
        """Store an input that is too large for the queue. Raise ``BlobError``."""
        await self.register(int(job.account_id), job.request_id, STORED, None)
        return await self._blobs.put(input_key(job.account_id, job.request_id), data)

    async def clear_input(self, account_id: int, request_id: str) -> None:
        """Delete the stored input of an ended request; what fails goes with the rest of it."""
        try:
            await self._blobs.delete([input_key(str(account_id), request_id)])
        except BlobError as error:
            log.warning("the input of %s is left: %s", request_id, type(error).__name__)

    async def describe(self, request_id: RequestId, asked: StoredInput) -> None:
        change = update(media).where(media.c.request_id == request_id)
        await self._database.write(
            lambda connection: connection.execute(change.values(asked=_encode(asked)))
        )

    async def owner(self, request_id: str) -> int | None:
        """The account whose request it is; None if nothing of it is kept (any more)."""
        query = select(media.c.account_id).where(
            media.c.request_id == request_id, media.c.forgotten.is_(False)
        )
        return await self._database.read(lambda connection: connection.execute(query).scalar())

    async def find(self, account_id: int, request_id: str) -> Record | None:
        """Look up what is kept of a request of an account."""
        if not is_request_id(request_id):
            return None
        query = select(media).where(
            media.c.request_id == request_id,
            media.c.account_id == account_id,
            media.c.forgotten.is_(False),
        )
        row = await self._database.read(
            lambda connection: connection.execute(query).mappings().first()
        )
        return _record(row) if row is not None else None

    async def list(
        self,
        account_id: int,
        tasks: Collection[str],
        *,
        limit: int,
        after: str | None = None,
        oldest_first: bool = False,
    ) -> Sequence[Record]:
        """List requests of some tasks of which something is kept, by their age."""
        id = media.c.request_id
        query = select(media).where(
            media.c.account_id == account_id,
            media.c.task.in_(tasks),
            media.c.forgotten.is_(False),
            media.c.asked.is_not(None),
        )
        if after is not None:
            query = query.where(id > after if oldest_first else id < after)
        query = query.order_by(id if oldest_first else id.desc()).limit(limit)
        rows = await self._database.report(
            lambda connection: connection.execute(query).mappings().all(), account_id=account_id
        )
        return [_record(row) for row in rows]

    async def forget(self, account_id: int, request_id: str) -> None:
        """Let nobody find a request's media from now on, and delete them once it has ended."""

        def write(connection: Connection) -> bool:
            change = (
                update(media)
                .where(media.c.request_id == request_id, media.c.account_id == account_id)
                .values(forgotten=True, clear_at=datetime.now(UTC))
            )
            changed = connection.execute(change).rowcount
            open_hold = select(holds.c.request_id).where(holds.c.request_id == request_id)
            # While it is open its worker may still write.
            return bool(changed) and connection.execute(open_hold).first() is None

        if await self._database.write(write):
            await self._clear(account_id, request_id)

    async def discard(self, account_id: int, request_id: str) -> None:
        """Clear away what a request left that was not accepted; what fails is tried again later."""
        await self._clear(account_id, request_id)

    async def clear_attempts(
        self, account_id: int, request_id: str, counts: Collection[BlobRef]
    ) -> None:
        """Clear away what attempts at an ended request left that died, where these blobs are of the
        one that counts; what fails goes with the rest of the request."""
        try:
            spare = {INPUT_PREFIX, *(f"{blob.key.split('/')[2]}/" for blob in counts)}
            await self._blobs.delete_request(str(account_id), request_id, spare=spare)
        except BlobError as error:
            log.warning("attempts at %s are left: %s", request_id, type(error).__name__)
        except Exception:  # a task that nobody awaits
            log.exception("attempts at %s are left", request_id)

    async def delete_ended(self) -> None:
        """Clear away whatever is not to be kept any longer."""
        now = datetime.now(UTC)
        cleared = CHUNK
        while cleared == CHUNK:
            due = await self._database.write(
                functools.partial(_due, now=now, retention=self._retention)
            )
            await asyncio.gather(*(self.clear_input(*row) for row in due.ended))
            done = await asyncio.gather(*(self._clear(*row) for row in due.over))
            # A store that deletes nothing at all is left alone until the next time.
            cleared = 0 if due.over and not any(done) else due.seen

    async def _clear(self, account_id: int, request_id: str) -> bool:
        try:
            await self._blobs.delete_request(str(account_id), request_id)
        except (BlobError, OSError, ValueError) as error:
            log.warning("%s is cleared away later: %s", request_id, type(error).__name__)
            # Behind the others, which it must not keep waiting.
            later = update(media).where(media.c.request_id == request_id)
            again = later.values(clear_at=datetime.now(UTC) + RETRY_PAUSE)
            await self._database.write(lambda connection: connection.execute(again))
            return False
        gone = delete(media).where(media.c.request_id == request_id)
        await self._database.write(lambda connection: connection.execute(gone))
        return True


@dataclass(frozen=True, slots=True)
class _Due:
    """Number of rows that were looked at, and account and request of those whose time is over, or
    that have ended with an input still stored."""

    seen: int
    over: Sequence[tuple[int, str]]
    ended: Sequence[tuple[int, str]]


def _due(connection: Connection, *, now: datetime, retention: timedelta) -> _Due:
    """Look at rows that are due; those to be kept are looked at again when that may change."""
    rows = connection.execute(
        select(
            media.c.request_id,
            media.c.account_id,
            media.c.task,
            media.c.forgotten,
            holds.c.deadline_at,
            receipts.c.settled_at,
            outputs.c.expires_at,
        )
        .outerjoin(holds, holds.c.request_id == media.c.request_id)
        .outerjoin(receipts, receipts.c.request_id == media.c.request_id)
        .outerjoin(outputs, outputs.c.request_id == media.c.request_id)
        .where(media.c.clear_at <= now)
        .order_by(media.c.clear_at)
        .limit(CHUNK)
    ).all()
    over, ended = [], []
    for row in rows:
        kept_until = row.expires_at
        if row.deadline_at is not None:
            kept_until = now + GRACE if row.forgotten else max(row.deadline_at, now) + GRACE
        elif row.settled_at is not None and kept_until is None:
            kept_until = row.settled_at + retention
        if row.forgotten and row.deadline_at is None:
            kept_until = None
        if kept_until is None or kept_until <= now:
            over.append((row.account_id, row.request_id))
        else:
            if row.task == STORED and row.settled_at is not None:
                ended.append((row.account_id, row.request_id))
            connection.execute(
                update(media)
                .where(media.c.request_id == row.request_id)
                .values(clear_at=kept_until)
            )
    return _Due(len(rows), over, ended)


def input_key(account: str, request_id: str) -> str:
    """Key of an input that is too large for the queue; there is one of a request."""
    return blob_key(account, request_id, f"{INPUT_PREFIX}job", 0)


def _encode(asked: StoredInput | None) -> bytes | None:
    return None if asked is None else msgspec.msgpack.encode(asked)


def _record(row: RowMapping) -> Record:
    return Record(
        request_id=RequestId(row["request_id"]),
        account_id=row["account_id"],
        task=row["task"],
        asked=msgspec.msgpack.decode(row["asked"], type=StoredInput) if row["asked"] else None,
    )

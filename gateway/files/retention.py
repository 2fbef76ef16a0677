"""Blobs of requests: their account, the request's input, and their deletion.

All blobs of a request, inputs and outputs, are under one prefix of the blob store. They are kept
while the request is open and then as long as its output; a refused request leaves none. Deletion
removes the blobs first and the row afterwards, so there is never a blob without a row.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import Connection, RowMapping, delete, insert, select, update

from gateway.group_commit import GroupCommit
from gateway.ids import is_request_id
from gateway.sql.database import Database, upsert
from gateway.sql.statements import CompiledStatement, any_of
from gateway.tables.core import holds, outputs, receipts
from gateway.tables.files import media
from workers.contract.blobs import BlobError, Blobs, blob_key
from workers.contract.jobs import VALUE_TYPE, BlobRef, Job, RequestId

log = logging.getLogger(__name__)

INPUT_PREFIX: Final = "in-"
OUTPUT_PREFIX: Final = "out-"
"""Prefixes of the nonces of inputs and outputs that the gateway stores; other nonces are those of
attempts."""
STORED: Final = "stored"
"""In place of the task, for a request that has only a large input or output as a blob."""
UNDECIDED: Final = timedelta(minutes=15)
"""Age at which a request that has neither a hold nor a receipt was never accepted."""
GRACE: Final = timedelta(minutes=1)
"""Time in which a request is closed after its deadline."""
RETRY_PAUSE: Final = timedelta(minutes=10)
"""Pause before a failed deletion is retried."""
CHUNK: Final = 100


class SentOrder(msgspec.Struct, frozen=True):
    """What was sent: ``input`` has the fields of ``POST /v1/requests``, without the files."""

    model: str
    task: str
    input: dict[str, Any]


class StoredInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of an accepted request, as in its job, with its attachments."""

    input: dict[str, Any]
    attachments: tuple[BlobRef, ...] = ()
    origin: str | None = None
    """Id of the request that this one is derived from."""
    order: SentOrder | None = None


class Cleared(NamedTuple):
    """Result of one bounded batch: number of rows cleared, and whether more can be due now."""

    rows: int
    more: bool


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

        async def begin(ids: Sequence[RequestId]) -> list[int | None]:
            # The settlements, which are committed later, make the rows durable.
            return await database.write(lambda each: _begin_outputs(each, ids), durable=False)

        self._begun: GroupCommit[RequestId, int | None] = GroupCommit(begin)

    async def register(
        self, account_id: int, request_id: RequestId, task: str, asked: StoredInput | None
    ) -> None:
        """Insert the row of a request that is about to be accepted, before its blobs are stored."""
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
        """Insert rows for outputs that workers stored, before the requests that refer to them are
        closed."""
        if not stored:
            return
        keys = (each.key.split("/") for each in stored)
        owners = [(int(account_id), id) for account_id, id, *_ in keys]
        await self._database.write(lambda connection: _insert_stored(connection, owners))

    async def store_output(self, request_id: RequestId, data: bytes) -> BlobRef | None:
        """Store the output of an open request that is about to be settled; None if it is closed.

        Each call has a key of its own, so that two settlers do not share a blob. Raise
        ``BlobError``.
        """
        account_id = await self._begun.submit(request_id)
        if account_id is None:
            return None
        nonce = f"{OUTPUT_PREFIX}{secrets.token_hex(8)}"
        key = blob_key(str(account_id), request_id, nonce, 0)
        return await self._blobs.put(key, data, content_type=VALUE_TYPE)

    async def delete_output(self, stored: BlobRef) -> None:
        """Delete an output that no row refers to, best effort: it is deleted with its request at
        the latest."""
        try:
            await self._blobs.delete([stored.key])
        except BlobError as error:
            log.warning("could not delete %s: %s", stored.key, type(error).__name__)

    async def store_input(self, job: Job, data: bytes) -> BlobRef:
        """Store an input that is too large for the queue. Raise ``BlobError``."""
        owner = int(job.account_id), job.request_id
        # What was sent may be kept in the row already.
        await self._database.write(lambda connection: _insert_stored(connection, [owner]))
        return await self._blobs.put(input_key(job.account_id, job.request_id), data)

    async def clear_input(self, account_id: int, request_id: str) -> None:
        """Delete the stored input of an ended request, best effort: it is deleted with the request
        at the latest."""
        try:
            await self._blobs.delete([input_key(str(account_id), request_id)])
        except BlobError as error:
            log.warning("could not delete the input of %s: %s", request_id, type(error).__name__)

    async def release_input(self, account_id: int, request_id: str, *, keeps: bool) -> None:
        """Delete the stored input of an ended request, and its row unless it ``keeps`` an output
        or what was sent. Best effort, as ``clear_input``."""
        query = select(media.c.asked.is_not(None)).where(media.c.request_id == request_id)
        if keeps or await self._database.read(lambda each: bool(each.execute(query).scalar())):
            await self.clear_input(account_id, request_id)
        else:
            await self.discard(account_id, request_id)

    async def describe(self, request_id: RequestId, asked: StoredInput) -> None:
        change = update(media).where(media.c.request_id == request_id)
        await self._database.write(
            lambda connection: connection.execute(change.values(asked=_encode(asked)))
        )

    async def owner(self, request_id: str) -> int | None:
        """Return the account of a request, or None if no blobs of it are kept."""
        query = select(media.c.account_id).where(
            media.c.request_id == request_id, media.c.forgotten.is_(False)
        )
        return await self._database.read(lambda connection: connection.execute(query).scalar())

    async def find(self, account_id: int, request_id: str) -> Record | None:
        """Return the record of an account's request, or None if nothing of it is kept."""
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
        """List an account's requests of some tasks that have blobs, by age."""
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
        """Hide a request's media immediately, and delete them once the request has ended."""

        def write(connection: Connection) -> bool:
            change = (
                update(media)
                .where(media.c.request_id == request_id, media.c.account_id == account_id)
                .values(forgotten=True, clear_at=datetime.now(UTC))
            )
            changed = connection.execute(change).rowcount
            open_hold = select(holds.c.request_id).where(holds.c.request_id == request_id)
            # While the request is open, its worker can still store blobs.
            return bool(changed) and connection.execute(open_hold).first() is None

        if await self._database.write(write):
            await self._clear(account_id, request_id)

    async def discard(self, account_id: int, request_id: str) -> None:
        """Delete the blobs of a request that was not accepted; failures are retried later."""
        await self._clear(account_id, request_id)

    async def clear_attempts(
        self, account_id: int, request_id: str, counts: Collection[BlobRef]
    ) -> None:
        """Delete blobs of failed attempts at an ended request, best effort.

        ``counts`` are blobs of the attempt that ended it, which are kept. Blobs that remain are
        deleted with the request.
        """
        try:
            spare = {INPUT_PREFIX, *(f"{blob.key.split('/')[2]}/" for blob in counts)}
            await self._blobs.delete_request(str(account_id), request_id, spare=spare)
        except BlobError as error:
            log.warning("could not delete attempts at %s: %s", request_id, type(error).__name__)
        except Exception:  # a background task, which is not awaited
            log.exception("could not delete attempts at %s", request_id)

    async def delete_ended(self) -> Cleared:
        """Delete some of the blobs whose retention has ended."""
        due = await self._database.write(
            functools.partial(_due, now=datetime.now(UTC), retention=self._retention)
        )
        await asyncio.gather(*(self.clear_input(*row) for row in due.ended))
        done = await asyncio.gather(*(self._clear(*row) for row in due.over))
        # If no deletion succeeded, wait for the next run.
        return Cleared(sum(done), due.seen == CHUNK and (any(done) or not due.over))

    async def _clear(self, account_id: int, request_id: str) -> bool:
        if not await delete_blobs(self._blobs, account_id, request_id):
            # Queued behind the others, so that it does not delay them.
            later = update(media).where(media.c.request_id == request_id)
            again = later.values(clear_at=datetime.now(UTC) + RETRY_PAUSE)
            await self._database.write(lambda connection: connection.execute(again))
            return False
        gone = delete(media).where(media.c.request_id == request_id)
        await self._database.write(lambda connection: connection.execute(gone))
        return True


async def delete_blobs(blobs: Blobs, account_id: int, id: str) -> bool:
    """Delete all blobs under the id of a request, a file or a voice.

    Return False, and log the error, if that failed: the caller keeps the row, to retry later.
    """
    try:
        await blobs.delete_request(str(account_id), id)
    except (BlobError, OSError, ValueError) as error:
        log.warning("could not delete %s, retrying later: %s", id, type(error).__name__)
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Due:
    """Number of rows that were checked; account and request of those whose retention is over, and
    of those that have ended and still have a stored input."""

    seen: int
    over: Sequence[tuple[int, str]]
    ended: Sequence[tuple[int, str]]


def _due(connection: Connection, *, now: datetime, retention: timedelta) -> _Due:
    """Check the rows that are due; those to keep become due again when that can change."""
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


_OWNERS: Final = CompiledStatement(
    select(holds.c.request_id, holds.c.account_id).where(any_of(holds.c.request_id, "ids"))
)


def _begin_outputs(connection: Connection, ids: Sequence[RequestId]) -> list[int | None]:
    """Insert the rows of open requests whose outputs will be stored; return their accounts."""
    owners = {row["request_id"]: row["account_id"] for row in _OWNERS.rows(connection, ids=ids)}
    if owners:
        _insert_stored(connection, [(account_id, id) for id, account_id in owners.items()])
    return [owners.get(id) for id in ids]


def _insert_stored(connection: Connection, requests: Sequence[tuple[int, str]]) -> None:
    """Insert the rows of requests, by account and id, that have only a large input or output."""
    due_at = datetime.now(UTC) + UNDECIDED
    rows = [
        {"request_id": id, "account_id": account_id, "task": STORED, "clear_at": due_at}
        for account_id, id in requests
    ]
    connection.execute(upsert(connection, media).on_conflict_do_nothing(), rows)


def input_key(account: str, request_id: str) -> str:
    """Return the key of an input that is too large for the queue; a request has one at most."""
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

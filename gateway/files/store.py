"""Files of accounts: their rows in SQL, their bytes in the blob store.

A file is visible to its account only, and no longer visible once it has expired or was deleted;
deleting sets its expiry to now, and a scheduled task deletes its bytes. The input of a batch cannot
be deleted before the batch has ended, and is kept until then even if it expires earlier.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias, get_args

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    delete,
    exists,
    insert,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from gateway.checks.entered import check_label
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.files.retention import Cleared, delete_blobs
from gateway.files.room import Room
from gateway.ids import is_id, new_id
from gateway.sql.database import Database
from gateway.sql.outages import OUTAGE
from gateway.tables.batches import batches, file_reservations, files
from workers.contract.blobs import Blobs, blob_key
from workers.contract.jobs import BlobRef

Purpose: TypeAlias = Literal["batch", "batch_output", "vision", "user_data"]
"""Use of a file: input of a batch, output of a batch, or (the last two) an attachment."""
SortOrder: TypeAlias = Literal["asc", "desc"]
PURPOSES: Final[tuple[Purpose, ...]] = get_args(Purpose)

NAME_MAX: Final = 255
CHUNK: Final = 100
"""Expired files deleted in one round."""


class FileGone(Exception):
    """A required file no longer exists."""


@dataclass(frozen=True, slots=True)
class File:
    id: str
    account_id: int
    purpose: Purpose
    filename: str
    blob: BlobRef
    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class FilePage:
    items: Sequence[File]
    more: bool


class Files:
    def __init__(self, database: Database, blobs: Blobs, room: Room | None = None) -> None:
        self._database = database
        self._blobs = blobs
        self._room = room

    async def create(
        self,
        account_id: int,
        *,
        purpose: Purpose,
        filename: str,
        chunks: AsyncIterator[bytes],
        kept_for: timedelta | None,
        content_type: str = "application/jsonl",
        file_id: str | None = None,
        size_max: int = 0,
    ) -> File:
        """Store a file of up to ``size_max`` bytes.

        With a ``file_id``, repeating the call with the same content returns the existing file.
        Raise ``BlobError``, ``Conflict`` if the id has other content, or another
        ``TollgateError`` if the account has no space for the file.
        """
        try:
            check_label(filename, "the name of the file", longest=NAME_MAX)
        except ValueError as error:
            raise InvalidRequest("invalid_value", f"{error}.", param="file") from None
        file_id = file_id or new_id("file-")
        if self._room is not None:
            await self._room.reserve(account_id, file_id, size=size_max)
        try:
            blob = await self.write(
                account_id, file_id, chunks, content_type=content_type, size_max=size_max
            )
        except BaseException:
            # If this fails, the reservation expires.
            if self._room is not None:
                with contextlib.suppress(*OUTAGE):
                    await self._room.release(file_id)
            raise
        now = datetime.now(UTC)
        made = File(
            id=file_id,
            account_id=account_id,
            purpose=purpose,
            filename=filename,
            blob=blob,
            created_at=now,
            expires_at=None if kept_for is None else now + kept_for,
        )
        try:
            await self._database.write(lambda connection: add_file(connection, made))
        except IntegrityError:
            await self._blobs.delete([blob.key])
            if self._room is not None:
                await self._room.release(file_id)
            found = await self.find(account_id, file_id)
            if found.blob.sha256 != blob.sha256:
                raise Conflict(
                    "file_exists",
                    f"{file_id} was already uploaded; request another upload URL.",
                ) from None
            return found
        return made

    async def write(
        self,
        account_id: int,
        file_id: str,
        chunks: AsyncIterator[bytes],
        *,
        content_type: str,
        size_max: int = 0,
    ) -> BlobRef:
        """Store the bytes of a file that has no row yet. Raise ``BlobError``, or ``Unavailable``
        if the disk has no space for them."""
        key = blob_key(str(account_id), file_id, secrets.token_hex(8), 0)
        with contextlib.ExitStack() as stack:
            if self._room is not None:
                await self._room.check_disk(size_max)
                stack.enter_context(self._room.arriving(size_max))
            return await self._blobs.put_stream(key, chunks, content_type=content_type)

    async def delete_bytes(self, account_id: int, file_id: str) -> None:
        """Delete all bytes stored under a file's id. Raise ``BlobError``."""
        await self._blobs.delete_request(str(account_id), file_id)

    async def find(self, account_id: int, file_id: str, *, param: str = "file_id") -> File:
        """Return a file. Raise ``NotFound`` if the account has no such file."""
        return await self._database.read(
            lambda connection: find_file(connection, account_id, file_id, param=param)
        )

    async def list(
        self,
        account_id: int,
        *,
        limit: int,
        after: str | None = None,
        order: SortOrder = "desc",
        purpose: str | None = None,
    ) -> FilePage:
        """List an account's files by age, from the file ``after`` on. Raise ``NotFound``."""
        now = datetime.now(UTC)

        def read(connection: Connection) -> FilePage:
            query = select(files).where(files.c.account_id == account_id, _visible(now))
            if purpose is not None:
                known = purpose if purpose in PURPOSES else ""
                query = query.where(files.c.purpose == known)
            if after is not None:
                find_file(connection, account_id, after, param="after")
                query = query.where(files.c.id > after if order == "asc" else files.c.id < after)
            query = query.order_by(files.c.id if order == "asc" else files.c.id.desc())
            rows = connection.execute(query.limit(limit + 1)).mappings().all()
            return FilePage([_file(row) for row in rows[:limit]], len(rows) > limit)

        return await self._database.report(read, account_id=account_id)

    def content(self, file: File) -> AsyncIterator[bytes]:
        """Read a file in chunks. Iterating can raise ``BlobError``."""
        return self._blobs.stream(file.blob)

    async def delete(self, account_id: int, file_id: str) -> None:
        """Delete a file. Raise ``NotFound``, or ``Conflict`` if an open batch needs it."""
        now = datetime.now(UTC)
        await self._database.write(
            lambda connection: expire_file(connection, account_id, file_id, now)
        )
        await self._clear(account_id, file_id)

    async def delete_ended(self) -> Cleared:
        """Delete some of the expired files."""
        ended = await self._database.read(
            lambda connection: expired_files(connection, datetime.now(UTC), limit=CHUNK)
        )
        cleared = sum(await asyncio.gather(*(self._clear(*file) for file in ended)))
        return Cleared(cleared, cleared == CHUNK)

    async def _clear(self, account_id: int, file_id: str) -> bool:
        """Delete an expired file's bytes, and then its row; failures are retried later."""
        if not await delete_blobs(self._blobs, account_id, file_id):
            return False
        await self._database.write(
            lambda connection: connection.execute(delete(files).where(files.c.id == file_id))
        )
        return True


def add_file(connection: Connection, file: File) -> None:
    """Insert a file's row and delete its reservation."""
    connection.execute(delete(file_reservations).where(file_reservations.c.file_id == file.id))
    connection.execute(
        insert(files).values(
            id=file.id,
            account_id=file.account_id,
            purpose=file.purpose,
            filename=file.filename,
            bytes=file.blob.bytes,
            blob_key=file.blob.key,
            sha256=file.blob.sha256,
            content_type=file.blob.content_type,
            created_at=file.created_at,
            expires_at=file.expires_at,
        )
    )


def find_file(
    connection: Connection,
    account_id: int,
    file_id: str,
    *,
    lock: bool = False,
    param: str = "file_id",
) -> File:
    """Return a file. Raise ``NotFound`` if the account has no such file."""
    query = select(files).where(
        files.c.id == file_id, files.c.account_id == account_id, _visible(datetime.now(UTC))
    )
    if lock:
        query = query.with_for_update()
    row = connection.execute(query).mappings().first() if is_id("file-", file_id) else None
    if row is None:
        raise NotFound("file_not_found", f"Unknown file {file_id!r}.", param=param)
    return _file(row)


def read_input(connection: Connection, file_id: str) -> File:
    """Return the input file of a batch, even if it has expired. Raise ``FileGone``."""
    row = connection.execute(select(files).where(files.c.id == file_id)).mappings().first()
    if row is None:
        raise FileGone(f"{file_id} was deleted")
    return _file(row)


def expire_file(connection: Connection, account_id: int, file_id: str, now: datetime) -> None:
    """Expire a file now. Raise ``NotFound``, or ``Conflict`` if an open batch needs it."""
    # Under the lock that creating a batch takes too.
    find_file(connection, account_id, file_id, lock=True)
    user = connection.execute(
        select(batches.c.id).where(batches.c.input_file_id == file_id, batches.c.ended_at.is_(None))
    ).scalar()
    if user is not None:
        raise Conflict(
            "file_in_use",
            f"{file_id} is the input of {user}, which has not ended; cancel it first.",
            should_retry=False,
        )
    connection.execute(update(files).where(files.c.id == file_id).values(expires_at=now))


def expired_files(connection: Connection, now: datetime, *, limit: int) -> list[tuple[int, str]]:
    """Return account and id of expired files that no open batch needs."""
    query = (
        select(files.c.account_id, files.c.id)
        .where(files.c.expires_at <= now, not_(in_use()))
        .order_by(files.c.expires_at)
        .limit(limit)
    )
    return [(row.account_id, row.id) for row in connection.execute(query)]


def in_use() -> ColumnElement[bool]:
    """Whether an open batch needs a file."""
    return exists().where(and_(batches.c.input_file_id == files.c.id, batches.c.ended_at.is_(None)))


def _visible(now: datetime) -> ColumnElement[bool]:
    return or_(files.c.expires_at.is_(None), files.c.expires_at > now)


def _file(row: RowMapping) -> File:
    return File(
        id=row["id"],
        account_id=row["account_id"],
        purpose=row["purpose"],
        filename=row["filename"],
        blob=BlobRef(row["blob_key"], row["bytes"], row["sha256"], row["content_type"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
    )

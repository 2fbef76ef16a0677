"""How many files an account can keep, and how many bytes: uploads, batches' files and voices.

A file's room is reserved under the account's lock before its first byte is stored, so that any
number of uploads at once stay within the bounds. The reservation ends with the file's row or, if
the gateway dies, by itself. Outputs of batches count but are never refused: they were paid for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, delete, func, insert, select, update

from gateway.accounts.locks import lock_accounts
from gateway.disk import has_room
from gateway.errors import Forbidden, PaymentRequired, TooLarge, Unavailable
from gateway.sql.database import Database
from gateway.tables.batches import file_reservations, files, storage_limits
from gateway.tables.core import accounts
from gateway.tables.voices import voice_recordings

RESERVED_FOR: Final = timedelta(hours=1)
"""Time in which a file must have arrived."""
COUNT_MAX: Final = 2**31 - 1
BYTES_MAX: Final = 2**62


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Bounds of one account's files."""

    files_max: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class StorageUse:
    """Files and bytes of an account, with those that are reserved."""

    files: int
    bytes: int


class Room:
    """Grants room for files, and refuses it to accounts that could not pay for anything."""

    def __init__(
        self,
        database: Database,
        defaults: StorageLimits,
        *,
        paths: Sequence[Path] = (),
        disk_reserve: int | None = None,
    ) -> None:
        """``paths`` lie on the disks that files are stored on."""
        self._database = database
        self._defaults = defaults
        self._paths = paths
        self._disk_reserve = disk_reserve
        self._arriving = 0
        """Bytes of files that are being stored by this process."""

    async def check(self, account_id: int, *, size: int) -> None:
        """Check that a file of up to ``size`` bytes could be stored. Raise ``TollgateError``."""
        await self.check_disk(size)
        await self._database.read(
            lambda connection: check_room(connection, account_id, self._defaults, size=size)
        )

    async def check_disk(self, size: int = 0) -> None:
        """Raise ``Unavailable`` if a file would use the reserve of a disk."""
        wanted = size + self._arriving
        for path in self._paths:
            if not await asyncio.to_thread(has_room, path, self._disk_reserve, size_bytes=wanted):
                raise Unavailable(
                    "storage_full",
                    "This server has no disk space left for files (TOLLGATE_DISK_RESERVE_BYTES is "
                    "kept free); requests without files are served.",
                    retry_after_s=60,
                )

    @contextlib.contextmanager
    def arriving(self, size: int) -> Iterator[None]:
        """Count a file that is being stored into what ``check_disk`` looks at."""
        self._arriving += size
        try:
            yield
        finally:
            self._arriving -= size

    async def reserve(self, account_id: int, file_id: str, *, size: int) -> None:
        """Reserve room for a file, or more time for one. Raise ``TollgateError``."""
        await self.check_disk(size)
        await self._database.write(
            lambda connection: reserve(connection, account_id, file_id, self._defaults, size=size)
        )

    def limits_of(self, connection: Connection, account_id: int) -> StorageLimits:
        return limits_of(connection, account_id, self._defaults)

    async def release(self, file_id: str) -> None:
        """Give back the room of a file that did not come."""
        gone = delete(file_reservations).where(file_reservations.c.file_id == file_id)
        await self._database.write(lambda connection: connection.execute(gone))


def check_standing(connection: Connection, account_id: int) -> None:
    """Check that an account may leave things here: it is active and could pay for a request.

    Raise ``Forbidden`` or ``PaymentRequired``.
    """
    row = connection.execute(
        select(
            accounts.c.status,
            (accounts.c.posted_nanos + accounts.c.credit_limit_nanos).label("own"),
        ).where(accounts.c.id == account_id)
    ).one()
    if row.status != "active":
        raise Forbidden("account_suspended", f"This account is {row.status}.")
    if row.own <= 0:
        raise PaymentRequired(
            "insufficient_credit",
            "This account has neither a balance nor a credit limit, so it cannot send files or "
            "large bodies; add credit first.",
        )


def check_room(
    connection: Connection,
    account_id: int,
    defaults: StorageLimits,
    *,
    size: int,
    of: str | None = None,
) -> None:
    """Check standing and bounds for one more file; ``of`` is the one that has a reservation."""
    check_standing(connection, account_id)
    limits = limits_of(connection, account_id, defaults)
    stored = measure(connection, account_id, but=of)
    if stored.files >= limits.files_max:
        raise TooLarge(
            "too_many_files",
            f"This account has {stored.files} files, and at most {limits.files_max} are kept; "
            "delete some.",
            details={"limit": limits.files_max, "unit": "files"},
        )
    if stored.bytes + size > limits.bytes_max:
        raise TooLarge(
            "account_storage_full",
            f"This account's files have {stored.bytes} bytes, and {size} more would be beyond its "
            f"limit of {limits.bytes_max}; delete some.",
            details={"limit": limits.bytes_max, "unit": "bytes"},
        )


def reserve(
    connection: Connection, account_id: int, file_id: str, defaults: StorageLimits, *, size: int
) -> None:
    """Reserve room under the account's lock. Raise ``TollgateError``."""
    now = datetime.now(UTC)
    lock_accounts(connection, [account_id])
    own = file_reservations.c.account_id == account_id
    connection.execute(delete(file_reservations).where(own, file_reservations.c.expires_at <= now))
    check_room(connection, account_id, defaults, size=size, of=file_id)
    values = {"bytes": size, "expires_at": now + RESERVED_FOR}
    changed = connection.execute(
        update(file_reservations).where(file_reservations.c.file_id == file_id).values(values)
    )
    if not changed.rowcount:
        connection.execute(
            insert(file_reservations).values(file_id=file_id, account_id=account_id, **values)
        )


def measure(connection: Connection, account_id: int, *, but: str | None = None) -> StorageUse:
    """Count what an account has here; deleted files count until their bytes are gone."""
    count, size = 0, 0
    for table, key in (
        (files, files.c.id),
        (file_reservations, file_reservations.c.file_id),
        (voice_recordings, voice_recordings.c.id),
    ):
        query = select(func.count(), func.coalesce(func.sum(table.c.bytes), 0)).where(
            table.c.account_id == account_id
        )
        if table is file_reservations:
            query = query.where(table.c.expires_at > datetime.now(UTC))
        if but is not None:
            query = query.where(key != but)
        found = connection.execute(query).one()
        # Voices have a bound of their own in number.
        count += found[0] if table is not voice_recordings else 0
        size += int(found[1])
    return StorageUse(count, size)


def limits_of(connection: Connection, account_id: int, defaults: StorageLimits) -> StorageLimits:
    """Read the bounds of an account: its own, or the installation's."""
    row = connection.execute(
        select(storage_limits).where(storage_limits.c.account_id == account_id)
    ).first()
    if row is None:
        return defaults
    return StorageLimits(
        defaults.files_max if row.files_max is None else row.files_max,
        defaults.bytes_max if row.bytes_max is None else row.bytes_max,
    )


def set_limits(
    connection: Connection, account_id: int, *, files_max: int | None, bytes_max: int | None
) -> None:
    """Replace an account's own bounds; without numbers the installation's are in force again.

    Raise ``LookupError`` for an unknown account, ``ValueError`` for a number out of range.
    """
    for number, largest in ((files_max, COUNT_MAX), (bytes_max, BYTES_MAX)):
        if number is not None and not 0 <= number <= largest:
            raise ValueError(f"a bound of storage is {number}, and must be from 0 to {largest}")
    if account_id not in lock_accounts(connection, [account_id]):
        raise LookupError(f"there is no account {account_id}")
    connection.execute(delete(storage_limits).where(storage_limits.c.account_id == account_id))
    if files_max is not None or bytes_max is not None:
        connection.execute(
            insert(storage_limits).values(
                account_id=account_id, files_max=files_max, bytes_max=bytes_max
            )
        )

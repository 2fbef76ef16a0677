"""Storage limits of accounts, in files and bytes: for uploads, files of batches, and voices.

Space for a file is reserved under the account's lock before its first byte is stored, so that
concurrent uploads stay within the limits. The reservation is replaced by the file's row or, if the
gateway crashes, expires. Outputs of batches count but are never refused, because they are paid for.
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
"""Maximum duration of an upload."""
COUNT_MAX: Final = 2**31 - 1
BYTES_MAX: Final = 2**62


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Limits of one account's files."""

    files_max: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class StorageUse:
    """Number and bytes of an account's files, including reservations."""

    files: int
    bytes: int


class Room:
    """Reserves storage for files, and refuses accounts that cannot pay for a request."""

    def __init__(
        self,
        database: Database,
        defaults: StorageLimits,
        *,
        paths: Sequence[Path] = (),
        disk_reserve: int | None = None,
    ) -> None:
        """``paths`` are on the disks that store files; ``disk_reserve`` is in bytes."""
        self._database = database
        self._defaults = defaults
        self._paths = paths
        self._disk_reserve = disk_reserve
        self._arriving = 0
        """Bytes of files that this process is storing now."""

    async def check(self, account_id: int, *, size: int) -> None:
        """Check that a file of up to ``size`` bytes can be stored. Raise ``TollgateError``."""
        await self.check_disk(size)
        await self._database.read(
            lambda connection: check_room(connection, account_id, self._defaults, size=size)
        )

    async def check_disk(self, size: int = 0) -> None:
        """Raise ``Unavailable`` if a file of ``size`` bytes would use the reserve of a disk."""
        wanted = size + self._arriving
        for path in self._paths:
            if not await asyncio.to_thread(has_room, path, self._disk_reserve, size_bytes=wanted):
                raise Unavailable(
                    "storage_full",
                    "This server has no disk space left for files "
                    "(TOLLGATE_DISK_RESERVE_BYTES stays free); requests without files are served.",
                    retry_after_s=60,
                )

    @contextlib.contextmanager
    def arriving(self, size: int) -> Iterator[None]:
        """Count a file as being stored, so that ``check_disk`` includes it."""
        self._arriving += size
        try:
            yield
        finally:
            self._arriving -= size

    async def reserve(self, account_id: int, file_id: str, *, size: int) -> None:
        """Reserve space for a file, or extend its reservation. Raise ``TollgateError``."""
        await self.check_disk(size)
        await self._database.write(
            lambda connection: reserve(connection, account_id, file_id, self._defaults, size=size)
        )

    def limits_of(self, connection: Connection, account_id: int) -> StorageLimits:
        return limits_of(connection, account_id, self._defaults)

    async def release(self, file_id: str) -> None:
        """Delete the reservation of a file that was not stored."""
        gone = delete(file_reservations).where(file_reservations.c.file_id == file_id)
        await self._database.write(lambda connection: connection.execute(gone))


def check_standing(connection: Connection, account_id: int) -> None:
    """Check that an account may store files: it is active and can pay for a request.

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
    """Check standing and limits for one more file. The reservation of ``of``, the file itself, is
    not counted."""
    check_standing(connection, account_id)
    limits = limits_of(connection, account_id, defaults)
    stored = measure(connection, account_id, but=of)
    if stored.files >= limits.files_max:
        raise TooLarge(
            "too_many_files",
            f"This account has {stored.files} files, and its limit is {limits.files_max}; "
            "delete some.",
            details={"limit": limits.files_max, "unit": "files"},
        )
    if stored.bytes + size > limits.bytes_max:
        raise TooLarge(
            "account_storage_full",
            f"This account's files have {stored.bytes} bytes, and {size} more would exceed its "
            f"limit of {limits.bytes_max}; delete some.",
            details={"limit": limits.bytes_max, "unit": "bytes"},
        )


def reserve(
    connection: Connection, account_id: int, file_id: str, defaults: StorageLimits, *, size: int
) -> None:
    """Reserve space under the account's lock. Raise ``TollgateError``."""
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
    """Measure an account's storage, without the file ``but``. Deleted files count until their bytes
    are deleted."""
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
        # The number of voices has a separate limit.
        count += found[0] if table is not voice_recordings else 0
        size += int(found[1])
    return StorageUse(count, size)


def limits_of(connection: Connection, account_id: int, defaults: StorageLimits) -> StorageLimits:
    """Read the limits of an account: its own, or the installation's defaults."""
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
    """Replace an account's own limits; None restores the installation's default.

    Raise ``LookupError`` if the account does not exist, ``ValueError`` if a number is out of range.
    """
    for number, largest in ((files_max, COUNT_MAX), (bytes_max, BYTES_MAX)):
        if number is not None and not 0 <= number <= largest:
            raise ValueError(f"storage limit is {number}; it must be between 0 and {largest}")
    if account_id not in lock_accounts(connection, [account_id]):
        raise LookupError(f"unknown account {account_id}")
    connection.execute(delete(storage_limits).where(storage_limits.c.account_id == account_id))
    if files_max is not None or bytes_max is not None:
        connection.execute(
            insert(storage_limits).values(
                account_id=account_id, files_max=files_max, bytes_max=bytes_max
            )
        )

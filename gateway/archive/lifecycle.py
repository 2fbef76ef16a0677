"""Archives a closed month, and restores it.

    writing ──▶ verified ──▶ removing ──▶ removed ──▶ restoring ──▶ (no archive)

Each state is committed before the next step begins, and each step can be repeated: a command that
was killed is completed by the next one. Nothing is removed before the files were read back and
compared with the database row by row, and with the seal of the month. One process at a time
archives; a lease that lapses while it is paused is harmless, because files have keys of their own
and each batch locks the archive's row.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec
import pyarrow as pa
from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import OperationalError

from gateway.archive.bounds import learn_bounds
from gateway.archive.bring_back import Rows, bring_back
from gateway.archive.files import (
    FILE_PAGES,
    PAGE_ROWS,
    PREFIX,
    TABLES,
    ArchiveDamaged,
    Totals,
    chunks,
    key_of,
    matching,
    read_file,
    read_page,
    write_file,
)
from gateway.archive.manifest import ArchiveFile, Manifest, Name
from gateway.archive.marks import Archive, find_archive, list_archives
from gateway.archive.obstacle import obstacle
from gateway.archive.remove import BATCH, Place, accounts_with_receipts, remove_batch
from gateway.archive.seal import seal_of_month
from gateway.audit_log import Act, Author, record
from gateway.checks.months import month_of
from gateway.failpoints import reach
from gateway.leases import Lease
from gateway.ledger.periods import span_of, utc_now
from gateway.pricing import format_usd
from gateway.sql.database import Database
from gateway.sql.partitions import (
    Partition,
    create_again,
    drop_empty,
    is_empty,
    list_partitions,
)
from gateway.tables.archives import (
    archived_charges,
    archived_spending,
    archived_windows,
    archives,
)
from gateway.tables.core import periods
from gateway.tables.settlement_time import month_bounds
from workers.contract.blobs import BlobError, Blobs

LEASE_S: Final = 60.0
"""How long another command is refused after one was killed."""


class CannotArchive(ValueError):
    """The month is not closed, or something of its close is missing, or another command runs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of a row group, row groups of a file, rows of a batch; tests use small ones."""

    page: int = PAGE_ROWS
    pages: int = FILE_PAGES
    batch: int = BATCH


SIZES: Final = Sizes()


class Archiver:
    """Moves months between a database and its blob store, as acts of an author."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        author: Author,
        *,
        metadata_expires: bool = False,
        sizes: Sizes = SIZES,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``metadata_expires``: metadata has a retention, so none of it goes into files.
        ``progress`` is called with the number of rows written, read, removed or put back so far."""
        self._metadata_expires = metadata_expires
        self._database = database
        self._blobs = blobs
        self._author = author
        self._sizes = sizes
        self._progress = progress
        self._rows = 0
        self._lease = Lease(database, "archive", held_s=LEASE_S)
        self._is_alone = False

    async def archive(self, month: str, *, keep: bool = False) -> Archive:
        """Write, verify and remove a closed month; with ``keep`` remove nothing.

        Raise ``CannotArchive`` before anything is written, ``ArchiveDamaged`` if the files do not
        contain what the database does; then nothing was removed.
        """
        async with self._alone():
            found = await self._database.write(self._begin(month))
            reach("archive_begun")
            await asyncio.to_thread(learn_bounds, self._database, month)
            if found.state == "writing":
                manifest = await self._write(found)
                reach("archive_written")
                await self._compare(found, manifest)
                await self._database.write(lambda c: self._verified(c, found, manifest))
                reach("archive_verified")
            if keep:
                return await self._find(month)
            await self._move(month, "removing")
            reach("archive_removing")
            await self._remove(month)
            await self._database.write(lambda connection: self._removed(connection, month))
            reach("archive_removed")
            await self._drop_partitions()
            # Files of attempts that were killed.
            await self._delete_files(month, spare=found.nonce)
            return await self._find(month)

    async def verify(self, month: str) -> Manifest:
        """Read all files of an archive; compare their digests, their sums and their seal.

        Raise ``LookupError`` if the month is not archived, ``ArchiveDamaged`` if they differ.
        """
        found = await self._find(month)
        if found.manifest is None:
            raise LookupError(f"the archive of {month} was never completed")
        await self._check(found, found.manifest)
        return found.manifest

    async def restore(self, month: str) -> int:
        """Put a month back into the database, delete its archive, and return the number of its
        receipts. Of an archive from which nothing was removed only the files are deleted.

        Raise ``LookupError`` if the month is not archived, ``ArchiveDamaged`` if its files are not
        what was archived; then nothing was changed.
        """
        async with self._alone():
            found = await self._find(month)
            if found.state in ("writing", "verified"):
                counts: Mapping[str, Any] = {"state": found.state}
                await self._database.write(lambda c: self._restored(c, month, counts))
                await self._delete_files(month)
                return 0
            manifest = await self.verify(month)
            await self._move(month, "restoring")
            reach("restore_begun")
            await self._create_partitions(month)
            await self._insert(month, manifest)
            reach("restore_inserted")
            await self._database.slow(lambda c: _check_complete(c, manifest))
            await self._database.write(lambda c: self._restored(c, month, _counts(manifest)))
            reach("restore_ended")
            await self._delete_files(month)
            return manifest.receipts

    async def _drop_partitions(self) -> None:
        """Drop the partitions of archived months that have become empty.

        A receipt is in the partition of the month in which it was sent, so a month's partition can
        become empty with the archive of the next one. One that is locked is dropped the next time.
        """
        for partition in await self._database.slow(_emptied):
            with contextlib.suppress(OperationalError):
                await self._database.slow_write(functools.partial(drop_empty, partition=partition))
                reach("archive_dropped")

    async def _create_partitions(self, month: str) -> None:
        """Create the partitions that were dropped. Without them, the default one takes the rows."""
        before = month_of(span_of(month).starts_at - timedelta(days=1))
        for each in (before, month):
            with contextlib.suppress(OperationalError):
                await self._database.slow_write(functools.partial(create_again, month=each))

    async def _delete_files(self, month: str, *, spare: str | None = None) -> None:
        """Delete the files of a month, except those of one attempt. Those that cannot be deleted
        are deleted by the next command."""
        with contextlib.suppress(BlobError):
            await self._blobs.delete_request(PREFIX, month, spare=[spare] if spare else [])

    def _begin(self, month: str) -> Callable[[Connection], Archive]:
        return lambda connection: _begin(connection, month, self._metadata_expires)

    async def _write(self, archive: Archive) -> Manifest:
        """Write the rows of a month as files, page by page."""
        totals, files = Totals(archive.month), list[ArchiveFile]()
        for name in TABLES:
            pages, after = list[pa.Table](), None
            while True:
                page = await self._page(archive.month, name, after, self._sizes.page)
                if page is not None:
                    totals.add(name, page)
                    self._did(page.num_rows)
                    pages.append(page)
                    after = key_of(name, page)
                if pages and (page is None or len(pages) == self._sizes.pages):
                    files.append(await self._put(archive, name, pages, len(files)))
                    pages = []
                if page is None:
                    break
        manifest = totals.manifest(files)
        data = msgspec.json.encode(manifest)
        await self._blobs.put(f"{_folder(archive)}/manifest.json", data)
        return manifest

    async def _put(
        self, archive: Archive, name: Name, pages: list[pa.Table], number: int
    ) -> ArchiveFile:
        key = f"{_folder(archive)}/{number}-{name}.parquet"
        data, file = await asyncio.to_thread(write_file, key, name, pages)
        ref = await self._blobs.put(key, data)
        await self._still_alone()
        return msgspec.structs.replace(file, sha256=ref.sha256)

    async def _page(
        self, month: str, name: Name, after: tuple[Any, ...] | None, rows: int
    ) -> pa.Table | None:
        return await self._database.slow(lambda each: read_page(each, month, name, after, rows))

    async def _compare(self, archive: Archive, manifest: Manifest) -> None:
        """Check the files, and that each of their rows is the one in the database."""
        after: dict[Name, tuple[Any, ...] | None] = dict.fromkeys(TABLES)

        async def compare(name: Name, group: pa.Table) -> None:
            page = await self._page(archive.month, name, after[name], group.num_rows)
            if page is None or not page.equals(group):
                raise ArchiveDamaged(f"the {name} in the files are not those in the database")
            after[name] = key_of(name, group)

        await self._check(archive, manifest, compare)
        for name in TABLES:
            if await self._page(archive.month, name, after[name], 1) is not None:
                raise ArchiveDamaged(f"the files have fewer {name} than the database")

    async def _check(
        self, archive: Archive, manifest: Manifest, compare: Callable[..., Any] | None = None
    ) -> None:
        """Read all files; compare their digests, sums and seal with the manifest and the period."""
        totals = Totals(archive.month)
        for file in manifest.files:
            try:
                groups = await read_file(self._blobs, file)
            except (BlobError, pa.ArrowInvalid) as error:
                raise ArchiveDamaged(str(error)) from error
            for group in groups:
                totals.add(file.table, group)
                self._did(group.num_rows)
                if compare is not None:
                    await compare(file.table, group)
            await self._still_alone()
        found = msgspec.structs.replace(totals.manifest(manifest.files), rewrites=manifest.rewrites)
        period = await self._database.slow(lambda c: _sealed(c, archive.month))
        sealed = (found.sha256, found.receipts, found.charge_nanos, found.transfer_count)
        if found != manifest or sealed != period or archive.sha256 != period[0]:
            raise ArchiveDamaged(
                f"the files of {archive.month} have {found.receipts} receipts, "
                f"${format_usd(found.charge_nanos)} charged, {found.transfer_count} transfers and "
                f"the seal {found.sha256}; the month was closed with {period[1]} receipts, "
                f"${format_usd(period[2])}, {period[3]} transfers and {period[0]}"
            )

    async def _remove(self, month: str) -> None:
        archive = await self._find(month)
        owners = await self._database.slow(lambda c: accounts_with_receipts(c, archive))
        for account_id in owners:
            place: Place | None = Place(account_id)
            while place is not None:
                place = await self._remove_batch(month, place)
                self._did(self._sizes.batch)
                await self._still_alone()
                reach("archive_batch")

    async def _remove_batch(self, month: str, place: Place) -> Place | None:
        return await self._database.slow_write(
            lambda c: remove_batch(c, month, place, self._sizes.batch)
        )

    async def _insert(self, month: str, manifest: Manifest) -> None:
        """Insert what was removed: charges first, because their receipts refer to them."""
        for file in manifest.of("transfers"):
            for group in await read_file(self._blobs, file):
                charges = matching(group, "kind", ["charge"])
                for part in chunks(charges, self._sizes.batch):
                    await self._bring_back(Rows(month, transfers=part))
        for file in manifest.of("receipts"):
            pages = [
                page
                for each in manifest.of("receipt_steps")
                if str(each.first) <= str(file.last) and str(file.first) <= str(each.last)
                for page in await read_file(self._blobs, each)
            ]
            for group in await read_file(self._blobs, file):
                for part in chunks(group.to_pylist(), self._sizes.batch):
                    ids = [row["request_id"] for row in part]
                    steps = [row for page in pages for row in matching(page, "request_id", ids)]
                    await self._bring_back(Rows(month, receipts=part, receipt_steps=steps))

    async def _bring_back(self, rows: Rows) -> None:
        await self._database.slow_write(lambda connection: bring_back(connection, rows))
        self._did(len(rows.receipts) + len(rows.transfers))
        await self._still_alone()
        reach("restore_batch")

    def _did(self, rows: int) -> None:
        self._rows += rows
        self._progress(self._rows)

    async def _find(self, month: str) -> Archive:
        found = await self._database.read(lambda connection: find_archive(connection, month))
        if found is None:
            raise LookupError(f"{month} is not archived")
        return found

    async def _move(self, month: str, state: str) -> None:
        await self._database.write(lambda connection: _set_state(connection, month, state))

    def _verified(self, connection: Connection, archive: Archive, manifest: Manifest) -> None:
        found = list(manifest.of("receipts"))
        connection.execute(
            update(archives)
            .where(archives.c.month == archive.month, archives.c.nonce == archive.nonce)
            .values(
                state="verified",
                manifest=msgspec.to_builtins(manifest),
                first_id=found[0].first if found else None,
                last_id=found[-1].last if found else None,
                changed_at=utc_now(),
            )
        )
        self._record(connection, "period.archive", manifest.month, {**_counts(manifest)})

    def _removed(self, connection: Connection, month: str) -> None:
        _set_state(connection, month, "removed")
        found = find_archive(connection, month)
        assert found is not None
        after = {
            "removed_receipts": found.removed_receipts,
            "removed_transfers": found.removed_transfers,
            "removed": format_usd(found.removed_nanos),
        }
        self._record(connection, "period.archive", month, after)

    def _restored(self, connection: Connection, month: str, counts: Mapping[str, Any]) -> None:
        for table in (archived_charges, archived_spending, archived_windows, archives):
            connection.execute(delete(table).where(table.c.month == month))
        self._record(connection, "period.restore", month, counts)

    def _record(
        self, connection: Connection, act: Act, month: str, after: Mapping[str, Any]
    ) -> None:
        record(connection, self._author, act, f"month {month}", after=after)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        if not await self._lease.acquire():
            raise CannotArchive(
                "another month is being archived or restored, or such a command was killed less "
                f"than {LEASE_S:.0f} s ago; try again then"
            )
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False
            await self._lease.release()

    async def _still_alone(self) -> None:
        # Reading needs no lease.
        if self._is_alone and not await self._lease.renew_if_needed():
            raise CannotArchive("another command archives or restores since this one was paused")


def _begin(connection: Connection, month: str, metadata_expires: bool) -> Archive:
    """Return the archive to continue, or begin a new one."""
    found = find_archive(connection, month, lock=True)
    if found is not None and found.state == "restoring":
        raise CannotArchive(
            f"{month} is being restored; complete that first: tollgate archive restore {month}"
        )
    if found is not None and found.state != "writing":
        return found
    reason = obstacle(connection, month, metadata_expires=metadata_expires)
    if reason is not None:
        raise CannotArchive(reason)
    values = {"nonce": secrets.token_hex(8), "changed_at": utc_now()}
    if found is None:
        sha256 = select(periods.c.sha256).where(periods.c.month == month).scalar_subquery()
        connection.execute(
            insert(archives).values(month=month, state="writing", sha256=sha256, **values)
        )
    else:
        connection.execute(update(archives).where(archives.c.month == month).values(values))
    made = find_archive(connection, month)
    assert made is not None
    return made


def _set_state(connection: Connection, month: str, state: str) -> None:
    if state == "removing":
        # SQLite numbers new transfers after the largest id that is left.
        connection.execute(update(month_bounds).values(later_transfer_id=0))
    connection.execute(
        update(archives)
        .where(archives.c.month == month, archives.c.state != state)
        .values(state=state, changed_at=utc_now())
    )


def _emptied(connection: Connection) -> list[Partition]:
    """List the partitions of archived months that have no rows."""
    months = {each.month for each in list_archives(connection) if each.state == "removed"}
    return [
        partition
        for partition in list_partitions(connection)
        if partition.attached and partition.month in months and is_empty(connection, partition)
    ]


def _sealed(connection: Connection, month: str) -> tuple[str, int, int, int]:
    row = connection.execute(select(periods).where(periods.c.month == month)).one()
    return (row.sha256, row.receipts, row.charge_nanos, row.transfers)


def _check_complete(connection: Connection, manifest: Manifest) -> None:
    """Check that a restored month has its seal again. Raise ``ArchiveDamaged``."""
    found = find_archive(connection, manifest.month)
    left = found is not None and (found.removed_receipts or found.removed_transfers)
    if left or seal_of_month(connection, manifest.month) != manifest.sha256:
        raise ArchiveDamaged(f"{manifest.month} does not have its seal after it was restored")


def _counts(manifest: Manifest) -> dict[str, Any]:
    return {
        "receipts": manifest.receipts,
        "charged": format_usd(manifest.charge_nanos),
        "transfers": manifest.transfer_count,
        "bytes": manifest.bytes,
        "sha256": manifest.sha256,
    }


def _folder(archive: Archive) -> str:
    return f"{PREFIX}/{archive.month}/{archive.nonce}"

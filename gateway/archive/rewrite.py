"""Erases what is personal in the files of archives: a new file beside the old one, then the switch.

A file is replaced in the manifest by one transaction, which also records when and why. Triggers of
``archives`` admit it only if the seal, the counts and the amounts stay and fewer rows are personal.
The old file is deleted afterwards, or by the next erasure if that was interrupted. Steps of a
request are erased before its receipt, because the receipt tells whose they are.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection, update

from gateway.archive.files import PREFIX, open_groups, read_verified, write_file
from gateway.archive.manifest import ArchiveFile, Manifest, Rewrite
from gateway.archive.marks import Archive, find_archive, list_archives
from gateway.checks.moments import moment_of, timestamp
from gateway.errors import Conflict, Unavailable
from gateway.failpoints import reach
from gateway.leases import Lease
from gateway.ledger.periods import utc_now
from gateway.sql.database import Database
from gateway.tables.archives import archives
from workers.contract.blobs import BlobError, Blobs

LEASE_S: Final = 60.0
_PERSONAL: Final = ("metadata", "error")


@dataclass(frozen=True, slots=True)
class Match:
    """Selects receipts of files; None selects all."""

    account_id: int | None = None
    request_id: str | None = None
    tag: tuple[str, str] | None = None

    def can_be_in(self, file: ArchiveFile) -> bool:
        id = self.request_id
        return id is None or str(file.first) <= id <= str(file.last)

    def of(self, page: pa.Table) -> Any:
        """Return which rows of a page match."""
        found = pa.repeat(True, page.num_rows)
        for name in ("account_id", "request_id"):
            value = getattr(self, name)
            if value is not None:
                found = pc.and_(found, pc.equal(page[name], value))
        if self.tag is not None:
            key, value = self.tag
            texts = page["metadata"].to_pylist()
            tagged = [
                text is not None and msgspec.json.decode(text).get(key) == value for text in texts
            ]
            found = pc.and_(found, pa.array(tagged, pa.bool_()))
        return found


class ArchivedRequest(NamedTuple):
    """A request that matches, in the columns by which its other rows are found."""

    request_id: str
    account_id: int
    accepted_at: datetime


@dataclass(frozen=True, slots=True)
class RewriteStep:
    """Requests that matched, receipts and steps that were erased, and the place of the next
    step."""

    requests: Sequence[ArchivedRequest] = ()
    receipts: int = 0
    steps: int = 0
    place: str | None = None


class ArchiveEraser:
    """Erases the metadata and errors of requests in archives, file by file."""

    def __init__(self, database: Database, blobs: Blobs) -> None:
        self._database = database
        self._blobs = blobs
        self._lease = Lease(database, "archive", held_s=LEASE_S)

    async def step(self, match: Match, after: str, *, reason: str, dry: bool) -> RewriteStep:
        """Erase what matches in the first file after a place.

        Raise ``Conflict`` while a month is archived or restored, ``Unavailable`` if a file cannot
        be read or written.
        """
        if dry:
            return await self._step(match, after, reason=None)
        if not await self._lease.acquire():
            raise Conflict(
                "archive_not_erasable",
                "A month is being archived or restored; erase again when that has ended.",
                should_retry=False,
            )
        try:
            if not after:
                for archive in await self._database.read(list_archives):
                    await self._delete_old(archive)
            return await self._step(match, after, reason=reason)
        except BlobError:
            raise Unavailable(
                "blobs_unavailable",
                "The blob store does not respond; run the same erasure again to complete it.",
                retry_after_s=30,
            ) from None
        finally:
            await self._lease.release()

    async def _step(self, match: Match, after: str, *, reason: str | None) -> RewriteStep:
        found = await self._database.read(list_archives)
        places = [place for place in _places(found, match) if place.name > after]
        if not places:
            return RewriteStep()
        place = places[0]
        groups = await asyncio.to_thread(self._groups, place.file)
        if place.file.table == "receipts":
            masks = [match.of(group) for group in groups]
            requests = [each for pair in zip(groups, masks, strict=True) for each in _listed(*pair)]
        else:
            ids = await asyncio.to_thread(self._ids, place, match)
            masks = [pc.is_in(group["request_id"], pa.array(ids, pa.string())) for group in groups]
            requests = []
        hits = [pc.and_(mask, _personal(group)) for group, mask in zip(groups, masks, strict=True)]
        number = sum(pc.sum(hit).as_py() or 0 for hit in hits)
        if number and reason is not None:
            cleared = [_cleared(*pair) for pair in zip(groups, hits, strict=True)]
            await self._replace(place, cleared, number, reason)
        is_receipts = place.file.table == "receipts"
        return RewriteStep(
            requests,
            receipts=number if is_receipts else 0,
            steps=0 if is_receipts else number,
            place=place.name if len(places) > 1 else None,
        )

    def _groups(self, file: ArchiveFile) -> list[pa.Table]:
        return open_groups(read_verified(self._blobs, file), file.table)

    def _ids(self, place: _Place, match: Match) -> list[str]:
        """Return the requests that match among those with steps in a file."""
        ids: list[str] = []
        for file in place.manifest.of("receipts"):
            if str(place.file.first) <= str(file.last) and str(file.first) <= str(place.file.last):
                for group in self._groups(file):
                    ids += group["request_id"].filter(match.of(group)).to_pylist()
        return ids

    async def _replace(
        self, place: _Place, groups: list[pa.Table], number: int, reason: str
    ) -> None:
        file, manifest = place.file, place.manifest
        stem, revision = file.key.partition(".")[0], secrets.token_hex(4)
        key = f"{stem}.{revision}.parquet"
        data, made = await asyncio.to_thread(write_file, key, file.table, groups)
        ref = await self._blobs.put(key, data)
        made = msgspec.structs.replace(made, sha256=ref.sha256)
        rewrite = Rewrite(timestamp(utc_now()), reason, number)
        rewritten = msgspec.structs.replace(
            manifest,
            personal=manifest.personal - number,
            files=tuple(made if each.key == file.key else each for each in manifest.files),
            rewrites=(*manifest.rewrites, rewrite),
        )
        folder = stem.rpartition("/")[0]
        await self._blobs.put(f"{folder}/manifest.{revision}.json", msgspec.json.encode(rewritten))
        reach("archive_rewritten")
        await self._database.write(lambda each: _switch(each, manifest, rewritten))
        reach("archive_switched")
        await self._delete_old(replace(place.archive, manifest=rewritten))

    async def _delete_old(self, archive: Archive) -> None:
        """Delete the files that an archive no longer has."""
        manifest = archive.manifest
        if manifest is None:
            return
        folder = f"{PREFIX}/{archive.month}/"
        kept = [file.key.removeprefix(folder) for file in manifest.files]
        # Copies of the manifest have nothing that is personal.
        kept.append(f"{archive.nonce}/manifest.")
        await self._blobs.delete_request(PREFIX, archive.month, spare=kept)


class _Place(NamedTuple):
    """A file of an archive, and its place among the files that are erased."""

    name: str
    archive: Archive
    manifest: Manifest
    file: ArchiveFile


def _places(found: Sequence[Archive], match: Match) -> Iterator[_Place]:
    for archive in found:
        manifest = archive.manifest
        if manifest is None or not manifest.personal:
            continue
        files = (*manifest.of("receipt_steps"), *manifest.of("receipts"))
        for number, file in enumerate(files):
            if match.can_be_in(file):
                yield _Place(f"{archive.month}:{number:06}", archive, manifest, file)


def _listed(page: pa.Table, mask: Any) -> Iterator[ArchivedRequest]:
    columns = page.select(["request_id", "account_id", "accepted_at"]).filter(mask).to_pydict()
    for id, account_id, accepted_us in zip(*columns.values(), strict=True):
        yield ArchivedRequest(id, account_id, moment_of(accepted_us))


def _personal(page: pa.Table) -> Any:
    found = pa.repeat(False, page.num_rows)
    for name in _PERSONAL:
        if name in page.column_names:
            found = pc.or_(found, page[name].is_valid())
    return found


def _cleared(page: pa.Table, hit: Any) -> pa.Table:
    """Return a page without the personal columns of some rows."""
    for name in _PERSONAL:
        if name in page.column_names:
            values = pc.if_else(hit, pa.scalar(None, pa.string()), page[name])
            page = page.set_column(page.schema.get_field_index(name), name, values)
    return page


def _switch(connection: Connection, before: Manifest, after: Manifest) -> None:
    """Replace the manifest. Raise ``Conflict`` if it has changed."""
    found = find_archive(connection, before.month, lock=True)
    if found is None or found.manifest != before:
        raise Conflict(
            "archive_not_erasable",
            f"The archive of {before.month} was changed meanwhile; erase again.",
            should_retry=False,
        )
    connection.execute(
        update(archives)
        .where(archives.c.month == before.month)
        .values(manifest=msgspec.to_builtins(after), changed_at=utc_now())
    )

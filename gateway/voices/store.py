"""Stored voices and consents of an account.

Both are visible to their account only, and kept until they are deleted. Each has one recording in
the blob store, under a separate id. A request that uses a voice refers to that blob without a copy,
so a deletion takes effect immediately, and a request that has not started by then fails without a
charge. Deleting a consent deletes the voices that were created with it. Recordings are fetched like
attachments of requests; their content is checked only when an engine decodes them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    delete,
    exists,
    func,
    insert,
    not_,
    or_,
    select,
    update,
)

from gateway.accounts.locks import lock_accounts
from gateway.checks.entered import check_label
from gateway.errors import Conflict, InvalidRequest, NotFound, TollgateError, Unavailable
from gateway.failpoints import reach
from gateway.files.fetch import Fetcher
from gateway.files.retention import Cleared, delete_blobs
from gateway.files.sources import Source
from gateway.ids import is_id, new_id
from gateway.sql.database import Database
from gateway.tables.voices import voice_recordings as recordings
from workers.contract.blobs import Blobs
from workers.contract.jobs import BlobRef, RequestId

T = TypeVar("T")
Kind: TypeAlias = Literal["voice", "consent"]

NAME_MAX: Final = 100
UNDECIDED: Final = timedelta(minutes=15)
"""Maximum time in which a recording must be stored."""
CHUNK: Final = 100

_PREFIX: Final[dict[Kind, str]] = {"voice": "voice_", "consent": "cons_"}
_CHILDREN: Final = recordings.alias("children")


@dataclass(frozen=True, slots=True)
class NewRecording:
    """A recording to store: a consent has a language, a voice the consent it is created with."""

    name: str
    language: str | None = None
    consent_id: str | None = None
    transcript: str = ""
    description: str = ""

    @property
    def kind(self) -> Kind:
        return "voice" if self.consent_id is not None else "consent"


@dataclass(frozen=True, slots=True)
class Recording:
    """A stored voice or consent."""

    id: str
    account_id: int
    name: str
    language: str | None
    consent_id: str | None
    transcript: str
    description: str
    blob: BlobRef
    created_at: datetime


@dataclass(frozen=True, slots=True)
class RecordingPage:
    items: Sequence[Recording]
    more: bool


def is_voice_id(text: str) -> bool:
    """Whether a name is the id of a stored voice, and not the name of a model's voice."""
    return is_id(_PREFIX["voice"], text)


class Voices:
    def __init__(
        self, database: Database, blobs: Blobs, fetcher: Fetcher, *, count_max: int, bytes_max: int
    ) -> None:
        """``count_max`` limits the voices of an account, and separately its consents; ``bytes_max``
        limits each recording."""
        self._database = database
        self._blobs = blobs
        self._fetcher = fetcher
        self._count_max = count_max
        self._bytes_max = bytes_max

    async def create(self, account_id: int, new: NewRecording, source: Source) -> Recording:
        """Store a recording of an account. If this raises ``TollgateError``, nothing is stored."""
        _check_name(new.name)
        id = new_id(_PREFIX[new.kind])
        reserve = functools.partial(
            _reserve, account_id=account_id, id=id, new=new, count_max=self._count_max
        )
        await self._write(account_id, reserve)
        try:
            bounded = replace(source, bytes_max=self._bytes_max)
            (blob,) = await self._fetcher.fetch(account_id, RequestId(id), [bounded])
            reach("voice_stored")
            keep = functools.partial(_store, account_id=account_id, id=id, new=new, blob=blob)
            return await self._write(account_id, keep)
        except TollgateError:
            await _clear(self._database, self._blobs, account_id, id)
            raise

    async def find(
        self, account_id: int, kind: Kind, id: str, *, param: str | None = None
    ) -> Recording:
        """Return a voice or consent. Raise ``NotFound`` if the account has no such one."""
        return await self._database.read(
            lambda connection: _find(connection, account_id, kind, id, param=param)
        )

    async def list(
        self, account_id: int, kind: Kind, *, limit: int, after: str | None = None
    ) -> RecordingPage:
        """List an account's voices or consents, newest first. Raise ``NotFound``."""

        def read(connection: Connection) -> RecordingPage:
            query = _stored(account_id, kind)
            if after is not None:
                _find(connection, account_id, kind, after, param="after")
                query = query.where(recordings.c.id < after)
            rows = connection.execute(_newest(query).limit(limit + 1)).mappings().all()
            return RecordingPage([_recording(row) for row in rows[:limit]], len(rows) > limit)

        return await self._database.report(read, account_id=account_id)

    async def rename(self, account_id: int, kind: Kind, id: str, name: str) -> Recording:
        """Rename a voice or consent. Raise ``NotFound``, ``InvalidRequest`` if the name is invalid,
        or ``Conflict`` if another voice has it."""
        _check_name(name)

        def write(connection: Connection) -> Recording:
            found = _find(connection, account_id, kind, id)
            if name != found.name:
                _check(connection, account_id, NewRecording(name, consent_id=found.consent_id))
            change = update(recordings).where(recordings.c.id == id)
            connection.execute(change.values(name=name))
            return replace(found, name=name)

        return await self._write(account_id, write)

    async def delete(self, account_id: int, kind: Kind, id: str) -> None:
        """Delete a voice, or a consent and all voices created with it. Raise ``NotFound``."""
        end = functools.partial(_mark_deleted, account_id=account_id, kind=kind, id=id)
        ended = await self._write(account_id, end)
        reach("voice_ended")
        # A consent's row is deleted after those that refer to it.
        clear = functools.partial(_clear, self._database, self._blobs, account_id)
        await asyncio.gather(*(clear(each) for each in ended if each != id))
        await clear(id)

    async def _write(self, account_id: int, function: Callable[[Connection], T]) -> T:
        """Run a transaction under the account's lock, so that its counts stay valid."""

        def write(connection: Connection) -> T:
            lock_accounts(connection, [account_id])
            return function(connection)

        return await self._database.write(write)


async def delete_ended_recordings(database: Database, blobs: Blobs) -> Cleared:
    """Delete some of the recordings that are marked as deleted or were never completed."""
    due = await database.read(_due)
    done = await asyncio.gather(*(_clear(database, blobs, *each) for each in due))
    # Consents are deleted in a batch after their voices.
    return Cleared(sum(done), bool(due) and all(done))


async def _clear(database: Database, blobs: Blobs, account_id: int, id: str) -> bool:
    """Delete a recording's bytes, and then its row; failures are retried later."""
    if not await delete_blobs(blobs, account_id, id):
        return False
    gone = delete(recordings).where(recordings.c.id == id, not_(_has_voices()))
    done = await database.write(lambda connection: connection.execute(gone).rowcount)
    return bool(done)


def _check_name(name: str) -> None:
    try:
        check_label(name, "the name", longest=NAME_MAX)
    except ValueError as error:
        raise InvalidRequest("invalid_value", f"{error}.", param="name") from None


def _reserve(
    connection: Connection, *, account_id: int, id: str, new: NewRecording, count_max: int
) -> None:
    """Insert the row of a recording before it is stored. Raise ``TollgateError``."""
    now = datetime.now(UTC)
    _check(connection, account_id, new)
    kept_or_coming = or_(recordings.c.clear_at.is_(None), recordings.c.clear_at > now)
    count = connection.execute(
        select(func.count())
        .select_from(recordings)
        .where(recordings.c.account_id == account_id, _is_kind(new.kind), kept_or_coming)
    ).scalar_one()
    if count >= count_max:
        raise InvalidRequest(
            f"too_many_{new.kind}s",
            f"This account has {count} {new.kind}s, and its limit is {count_max}; delete one.",
            details={"limit": count_max, "unit": f"{new.kind}s"},
        )
    connection.execute(
        insert(recordings).values(
            id=id,
            account_id=account_id,
            name=new.name,
            language=new.language,
            consent_id=new.consent_id,
            transcript=new.transcript,
            description=new.description,
            created_at=now,
            clear_at=now + UNDECIDED,
        )
    )


def _store(
    connection: Connection, *, account_id: int, id: str, new: NewRecording, blob: BlobRef
) -> Recording:
    """Make a stored recording visible. Raise ``TollgateError`` if it is no longer allowed."""
    _check(connection, account_id, new)
    row = connection.execute(
        update(recordings)
        .where(recordings.c.id == id)
        .values(
            blob_key=blob.key,
            bytes=blob.bytes,
            sha256=blob.sha256,
            content_type=blob.content_type,
            clear_at=None,
        )
        .returning(recordings)
    )
    found = row.mappings().first()
    if found is None:
        raise Unavailable(
            "storing_took_too_long", "The upload of the recording took too long; send it again."
        )
    return _recording(found)


def _check(connection: Connection, account_id: int, new: NewRecording) -> None:
    """Raise ``NotFound`` if the consent does not exist, ``Conflict`` if the name is taken."""
    if new.consent_id is None:
        return
    _find(connection, account_id, "consent", new.consent_id, param="consent")
    same = _stored(account_id, "voice").where(recordings.c.name == new.name)
    if connection.execute(same).first() is not None:
        raise Conflict(
            "voice_exists",
            f"This account already has a voice {new.name!r}; delete it, or choose another name.",
            param="name",
            should_retry=False,
        )


def _mark_deleted(connection: Connection, *, account_id: int, kind: Kind, id: str) -> list[str]:
    """Hide a recording and the voices created with it; return their ids. Raise ``NotFound``."""
    _find(connection, account_id, kind, id)
    change = (
        update(recordings)
        .where(
            or_(recordings.c.id == id, recordings.c.consent_id == id),
            recordings.c.clear_at.is_(None),
        )
        .values(clear_at=datetime.now(UTC))
    )
    return list(connection.execute(change.returning(recordings.c.id)).scalars())


def _find(
    connection: Connection, account_id: int, kind: Kind, id: str, *, param: str | None = None
) -> Recording:
    query = _stored(account_id, kind).where(recordings.c.id == id)
    known = is_id(_PREFIX[kind], id)
    row = connection.execute(query).mappings().first() if known else None
    if row is None:
        raise NotFound(f"{kind}_not_found", f"Unknown {kind} {id!r}.", param=param or f"{kind}_id")
    return _recording(row)


def _due(connection: Connection) -> list[tuple[int, str]]:
    """Return account and id of recordings that can be deleted: consents after their voices."""
    query = (
        select(recordings.c.account_id, recordings.c.id)
        .where(recordings.c.clear_at <= datetime.now(UTC), not_(_has_voices()))
        .order_by(recordings.c.clear_at)
        .limit(CHUNK)
    )
    return [(row.account_id, row.id) for row in connection.execute(query)]


def _stored(account_id: int, kind: Kind) -> Select[Any]:
    return select(recordings).where(
        recordings.c.account_id == account_id, _is_kind(kind), recordings.c.clear_at.is_(None)
    )


def _newest(query: Select[Any]) -> Select[Any]:
    return query.order_by(recordings.c.id.desc())


def _is_kind(kind: Kind) -> ColumnElement[bool]:
    consent = recordings.c.consent_id
    return consent.is_(None) if kind == "consent" else consent.is_not(None)


def _has_voices() -> ColumnElement[bool]:
    """SQL condition: voices that were created with the consent still exist."""
    return exists().where(_CHILDREN.c.consent_id == recordings.c.id)


def _recording(row: RowMapping) -> Recording:
    return Recording(
        id=row["id"],
        account_id=row["account_id"],
        name=row["name"],
        language=row["language"],
        consent_id=row["consent_id"],
        transcript=row["transcript"],
        description=row["description"],
        blob=BlobRef(row["blob_key"], row["bytes"], row["sha256"], row["content_type"]),
        created_at=row["created_at"],
    )

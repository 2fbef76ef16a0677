"""Voices and consents in SQL and in the blob store: visibility, deletion and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update

from gateway.accounts.accounts import create_account
from gateway.errors import InvalidRequest, NotFound, TooLarge, Unavailable
from gateway.files.fetch import Fetcher
from gateway.files.sources import SentSource, Source
from gateway.files.store import Files
from gateway.sql.database import Database
from gateway.tables.voices import voice_recordings
from gateway.voices.store import NewRecording, Recording, Voices, delete_ended_recordings
from tests.artist import wav
from workers.contract.blobs import Blobs


@dataclass
class Kept:
    voices: Voices
    account_id: int
    other_id: int
    database: Database
    folder: Path

    async def consent(self, name: str = "c") -> Recording:
        return await self.create(NewRecording(name, language="en"))

    async def voice(self, consent: Recording, name: str = "v") -> Recording:
        return await self.create(NewRecording(name, consent_id=consent.id))

    async def create(self, new: NewRecording) -> Recording:
        return await self.voices.create(self.account_id, new, source(wav(1000)))

    async def delete_ended(self) -> None:
        blobs = Blobs(self.folder.as_uri())
        while (await delete_ended_recordings(self.database, blobs)).more:
            pass

    def lying(self) -> set[str]:
        """Return the ids that have blobs."""
        return {path.parts[-3] for path in self.folder.rglob("*") if path.is_file()}

    def rows(self) -> set[str]:
        with self.database.transaction() as connection:
            return set(connection.execute(select(voice_recordings.c.id)).scalars())

    def age(self, by: timedelta) -> None:
        with self.database.transaction() as connection:
            for row in connection.execute(select(voice_recordings)).all():
                if row.clear_at is not None:
                    connection.execute(
                        update(voice_recordings)
                        .where(voice_recordings.c.id == row.id)
                        .values(clear_at=row.clear_at - by)
                    )


def source(data: bytes) -> Source:
    async def read() -> AsyncIterator[bytes]:
        yield data

    return Source("audio", SentSource(read), "recording")


@pytest.fixture
async def kept(database: Database, tmp_path: Path) -> AsyncIterator[Kept]:
    folder = tmp_path / "blobs"
    blobs = Blobs(folder.as_uri())
    with database.transaction() as connection:
        account_id, other_id = (create_account(connection, name).id for name in ("a", "b"))
    fetcher = Fetcher(
        blobs, Files(database, blobs), bytes_max=10**6, timeout_s=5, private_allowed=False
    )
    voices = Voices(database, blobs, fetcher, count_max=3, bytes_max=50_000)
    yield Kept(voices, account_id, other_id, database, folder)
    await fetcher.close()


async def test_voice_is_visible_to_its_account_only(kept: Kept) -> None:
    consent = await kept.consent()
    made = await kept.voice(consent, "Anna")

    assert await kept.voices.find(kept.account_id, "voice", made.id) == made
    assert (await kept.voices.list(kept.other_id, "voice", limit=9)).items == []
    for kind, id in (("voice", made.id), ("consent", consent.id)):
        for call in (kept.voices.find, kept.voices.delete):
            with pytest.raises(NotFound):
                await call(kept.other_id, kind, id)  # type: ignore[arg-type]  # by parameter
    for kind, id in (("consent", made.id), ("voice", consent.id), ("voice", "voice_x")):
        with pytest.raises(NotFound):
            await kept.voices.find(kept.account_id, kind, id)  # type: ignore[arg-type]  # as above


async def test_concurrent_creation_respects_the_limit_of_voices(kept: Kept) -> None:
    consent = await kept.consent()

    made = await asyncio.gather(
        *(kept.voice(consent, str(number)) for number in range(8)), return_exceptions=True
    )

    assert sum(isinstance(each, Recording) for each in made) == 3
    assert sum(isinstance(each, InvalidRequest) for each in made) == 5
    assert len(kept.lying()) == len(kept.rows()) == 4


async def test_concurrently_created_voices_cannot_share_a_name(kept: Kept) -> None:
    consent = await kept.consent()

    made = await asyncio.gather(
        *(kept.voice(consent, "Anna") for _ in range(3)), return_exceptions=True
    )

    kinds = [type(each).__name__ for each in made]
    assert sorted(kinds) == ["Conflict", "Conflict", "Recording"]
    assert len(kept.lying()) == len(kept.rows()) == 2


async def test_failed_upload_leaves_nothing(kept: Kept) -> None:
    consent = await kept.consent()

    with pytest.raises(TooLarge):
        await kept.voices.create(
            kept.account_id, NewRecording("v", consent_id=consent.id), source(wav(4000))
        )

    assert kept.rows() == kept.lying() == {consent.id}


async def test_consent_deleted_during_upload_leaves_no_voice(
    kept: Kept,
) -> None:
    consent = await kept.consent()

    async def read() -> AsyncIterator[bytes]:
        yield wav(1000)[:100]
        await kept.voices.delete(kept.account_id, "consent", consent.id)
        yield wav(1000)[100:]

    with pytest.raises(NotFound):
        await kept.voices.create(
            kept.account_id,
            NewRecording("v", consent_id=consent.id),
            Source("audio", SentSource(read), "x"),
        )

    await kept.delete_ended()
    assert kept.rows() == kept.lying() == set()


async def test_upload_that_takes_too_long_is_not_stored(kept: Kept) -> None:
    async def read() -> AsyncIterator[bytes]:
        yield wav(1000)[:100]
        kept.age(timedelta(minutes=16))
        await kept.delete_ended()
        yield wav(1000)[100:]

    with pytest.raises(Unavailable):
        await kept.voices.create(
            kept.account_id,
            NewRecording("c", language="en"),
            Source("audio", SentSource(read), "x"),
        )

    assert kept.rows() == kept.lying() == set()


async def test_failed_deletion_hides_the_voice_and_is_retried(kept: Kept) -> None:
    consent = await kept.consent()
    made = await kept.voice(consent)
    away = kept.folder.with_name("away")
    kept.folder.rename(away)
    kept.folder.write_bytes(b"in the way")

    await kept.voices.delete(kept.account_id, "consent", consent.id)

    for kind, id in (("voice", made.id), ("consent", consent.id)):
        with pytest.raises(NotFound):
            await kept.voices.find(kept.account_id, kind, id)  # type: ignore[arg-type]  # of two
    kept.folder.unlink()
    away.rename(kept.folder)
    assert kept.lying() == {made.id, consent.id}
    await kept.delete_ended()
    assert kept.rows() == kept.lying() == set()

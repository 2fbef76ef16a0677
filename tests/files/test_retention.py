"""Every stored blob has a row, and is deleted when its retention ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, select, update

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.files.retention import CHUNK, MediaStore, StoredInput
from gateway.ids import new_request_id
from gateway.ledger.prices import store_price
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from gateway.tables.core import holds
from gateway.tables.files import media
from workers.contract.blobs import Blobs, blob_key

ASKED = StoredInput({"prompt": "x"})


class Kept:
    """An account with a request that has blobs."""

    def __init__(self, database: Database, blobs: Blobs, folder: Path) -> None:
        self.database, self.blobs, self.folder = database, blobs, folder
        self.store = MediaStore(database, blobs, retention=timedelta(hours=24))
        self.request_id = new_request_id()
        with database.transaction() as connection:
            self.account_id = create_account(connection, "kept").id
            self.key_id = create_key(connection, self.account_id, pepper=b"p" * 16)[1].id
            price = Price((Component("image", 1),))
            self.price_id = store_price(connection, "m", price)

    async def put(self) -> None:
        await self.store.register(self.account_id, self.request_id, "text-to-image", ASKED)
        key = blob_key(str(self.account_id), self.request_id, "n", 0)
        await self.blobs.put(key, b"x")

    def hold(self) -> None:
        now = datetime.now(UTC)
        with self.database.transaction() as connection:
            connection.execute(
                insert(holds).values(
                    request_id=self.request_id,
                    account_id=self.account_id,
                    key_id=self.key_id,
                    model="m",
                    task="text-to-image",
                    price_id=self.price_id,
                    hold_nanos=1,
                    job=b"",
                    accepted_at=now,
                    deadline_at=now + timedelta(minutes=2),
                )
            )

    def end(self) -> None:
        with self.database.transaction() as connection:
            connection.execute(delete(holds))

    def age(self) -> None:
        """Let the time come at which it is looked at."""
        with self.database.transaction() as connection:
            connection.execute(update(media).values(clear_at=datetime.now(UTC)))

    @property
    def files(self) -> int:
        return len([path for path in self.folder.rglob("*") if path.is_file()])

    @property
    def rows(self) -> int:
        with self.database.transaction() as connection:
            return len(connection.execute(select(media)).all())


@pytest.fixture
async def kept(database: Database, tmp_path: Path) -> Kept:
    folder = tmp_path / "blobs"
    made = Kept(database, Blobs(f"file://{folder}"), folder)
    await made.put()
    return made


async def test_blobs_of_requests_never_accepted_are_deleted(kept: Kept) -> None:
    await kept.store.delete_ended()
    assert (kept.files, kept.rows) == (1, 1)

    kept.age()
    await kept.store.delete_ended()

    assert (kept.files, kept.rows) == (0, 0)


async def test_blobs_of_open_requests_are_kept(kept: Kept) -> None:
    kept.hold()
    kept.age()

    await kept.store.delete_ended()

    assert (kept.files, kept.rows) == (1, 1)
    assert await kept.store.owner(kept.request_id) == kept.account_id


async def test_forgotten_requests_are_not_found(kept: Kept) -> None:
    other = new_request_id()
    await kept.store.forget(kept.account_id + 1, kept.request_id)
    assert await kept.store.owner(kept.request_id) == kept.account_id

    await kept.store.forget(kept.account_id, kept.request_id)

    assert await kept.store.owner(kept.request_id) is None
    assert await kept.store.find(kept.account_id, kept.request_id) is None
    assert await kept.store.owner(other) is None
    assert (kept.files, kept.rows) == (0, 0)


async def test_request_forgotten_while_running_is_deleted_after_its_end(kept: Kept) -> None:
    kept.hold()

    await kept.store.forget(kept.account_id, kept.request_id)

    assert await kept.store.owner(kept.request_id) is None
    await kept.store.delete_ended()
    assert (kept.files, kept.rows) == (1, 1)
    kept.end()
    kept.age()
    await kept.store.delete_ended()
    assert (kept.files, kept.rows) == (0, 0)


async def test_lists_are_paged_and_limited_to_the_account(kept: Kept) -> None:
    more = sorted(new_request_id() for _ in range(4))
    for request_id in more:
        await kept.store.register(kept.account_id, request_id, "text-to-video", ASKED)

    async def page(after: str | None, *, oldest_first: bool) -> list[str]:
        found = await kept.store.list(
            kept.account_id, ["text-to-video"], limit=2, after=after, oldest_first=oldest_first
        )
        return [record.request_id for record in found]

    assert await page(None, oldest_first=True) == more[:2]
    assert await page(more[1], oldest_first=True) == more[2:]
    assert await page(None, oldest_first=False) == more[:1:-1]
    assert await kept.store.list(kept.account_id + 1, ["text-to-video"], limit=2) == []


async def test_failed_deletions_do_not_delay_others(kept: Kept) -> None:
    past = datetime.now(UTC) - timedelta(minutes=1)
    rows = [
        # Nothing in the store can have such a name, so deleting it fails.
        {"request_id": f"a bad name {number}", "account_id": kept.account_id, "clear_at": past}
        for number in range(CHUNK - 1)
    ]
    with kept.database.transaction() as connection:
        connection.execute(insert(media), [{**row, "task": "text-to-image"} for row in rows])
        connection.execute(
            update(media).where(media.c.request_id == kept.request_id).values(clear_at=past)
        )
        later = {**rows[0], "request_id": new_request_id(), "task": "text-to-image"}
        connection.execute(insert(media).values(later | {"clear_at": datetime.now(UTC)}))

    while (await kept.store.delete_ended()).more:
        pass

    assert (kept.files, kept.rows) == (0, CHUNK - 1)

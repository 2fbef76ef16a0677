"""Large outputs are blobs, whatever happens to the transaction that refers to them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError

from gateway.files.retention import MediaStore
from gateway.ledger.closed import Output
from gateway.ledger.holds import hold
from gateway.ledger.settle import Closing, Settlement
from gateway.requests.large_outputs import LargeOutputs
from gateway.requests.lookup import Lookup
from gateway.sql.database import Database
from gateway.tables.core import outputs
from gateway.tables.files import media
from tests.ledger.books import RETENTION, Books, done, open_books
from workers.contract.blobs import Blobs
from workers.contract.jobs import RequestId

LARGE = {"text": "x" * 5000}


class Requests:
    """Open requests of an account, and what settles them."""

    def __init__(self, books: Books, folder: Path) -> None:
        self.books, self.folder, self.blobs = books, folder, Blobs(f"file://{folder}")
        self.media = MediaStore(books.database, self.blobs, retention=RETENTION)

    def settler(self) -> LargeOutputs:
        return LargeOutputs(self.media, self.books.writer(), row_bytes_max=4096)

    def accept(self) -> RequestId:
        order = self.books.order()
        with self.books.database.transaction() as connection:
            hold(connection, [order])
        return order.request_id

    async def settle(self, request_id: RequestId, value: dict[str, Any]) -> Closing | None:
        return await self.settler().settle(ended(request_id, value))

    async def output(self, request_id: RequestId) -> dict[str, Any] | None:
        nothing: Any = None
        lookup = Lookup(self.books.database, nothing, self.blobs, {}, namespace="t")
        found = await lookup.closed(self.books.account.id, request_id)
        return found.output.value if found is not None and found.output is not None else None

    def stored(self) -> tuple[int, int]:
        """Return the number of blobs and of rows that are responsible for them."""
        with self.books.database.snapshot() as connection:
            rows = connection.execute(select(func.count()).select_from(media)).scalar_one()
        return sum(each.is_file() for each in self.folder.rglob("*")), rows


def ended(request_id: RequestId, value: dict[str, Any]) -> Settlement:
    settlement = done(request_id)
    return Settlement(
        request_id, "succeeded", "completed", billable=True,
        usage=settlement.usage, output=Output(value),
    )  # fmt: skip


@pytest.fixture
def requests(database: Database, tmp_path: Path) -> Requests:
    return Requests(open_books(database, credit=100_000), tmp_path / "blobs")


async def test_large_output_is_a_blob_until_its_retention_ends(requests: Requests) -> None:
    request_id, small = requests.accept(), requests.accept()

    closing = await requests.settle(request_id, LARGE)
    await requests.settle(small, {"text": "y"})

    assert closing is not None
    assert closing.closed.output is not None
    assert closing.closed.output.value == LARGE
    assert await requests.output(request_id) == LARGE
    assert await requests.output(small) == {"text": "y"}
    assert requests.stored() == (1, 1)
    with requests.books.database.transaction() as connection:
        longest = connection.execute(select(func.max(func.length(outputs.c.body)))).scalar_one()
        past = datetime.now(UTC) - timedelta(seconds=1)
        connection.execute(update(outputs).values(expires_at=past))
        connection.execute(update(media).values(clear_at=past))
    assert longest < 500
    await requests.media.delete_ended()
    assert requests.stored() == (0, 0)


async def test_settlers_that_race_keep_the_blob_of_the_one_that_committed(
    requests: Requests,
) -> None:
    request_id = requests.accept()

    closings = await asyncio.gather(*(requests.settle(request_id, LARGE) for _ in range(4)))

    assert sum(each is not None for each in closings) == 1
    assert await requests.output(request_id) == LARGE
    assert requests.stored() == (1, 1)
    assert await requests.settle(request_id, LARGE) is None
    assert requests.stored() == (1, 1)


async def test_sql_keeps_an_output_if_the_store_does_not_respond(requests: Requests) -> None:
    request_id = requests.accept()
    requests.folder.mkdir(exist_ok=True)
    (requests.folder / str(requests.books.account.id)).write_bytes(b"not a folder")

    assert await requests.settle(request_id, LARGE) is not None

    assert await requests.output(request_id) == LARGE


async def test_blob_of_a_settlement_that_cannot_be_booked_is_deleted(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id, settler = requests.accept(), requests.settler()

    async def refuse(_: Settlement) -> Closing:
        raise IntegrityError("", None, ValueError("refused"))

    monkeypatch.setattr(settler._ledger, "settle", refuse)
    with pytest.raises(IntegrityError):
        await settler.settle(ended(request_id, LARGE))

    # The row stays: the request is still open, and the row is cleared after its end.
    assert requests.stored() == (0, 1)

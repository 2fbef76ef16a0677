"""All files of a request as one archive."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from gateway.console.stored import downloads
from gateway.console.stored.downloads import Entry, check, zipped
from gateway.errors import Gone, TooLarge
from workers.contract.blobs import CHUNK_BYTES, Blobs

AT = datetime(2026, 3, 4, 5, 6, 8, tzinfo=UTC)


async def entries(blobs: Blobs) -> Sequence[Entry]:
    film = await blobs.put("1/req_1/a/0", bytes(3 * CHUNK_BYTES), content_type="video/mp4")
    return [Entry("0.mp4", film), Entry("output.json", b"{}")]


async def test_archive_comes_in_parts_and_is_whole() -> None:
    blobs = Blobs("memory:///")
    wanted = await entries(blobs)

    parts = [part async for part in zipped(blobs, wanted, AT)]

    assert len(parts) > 2
    with zipfile.ZipFile(io.BytesIO(b"".join(parts))) as archive:
        assert archive.testzip() is None
        film, output = archive.infolist()
        assert (film.filename, film.file_size, film.date_time) == (
            "0.mp4", 3 * CHUNK_BYTES, (2026, 3, 4, 5, 6, 8),
        )  # fmt: skip
        assert archive.read(output) == b"{}"


async def test_archive_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = Blobs("memory:///")
    wanted = await entries(blobs)
    await check(blobs, wanted)

    monkeypatch.setattr(downloads, "ARCHIVE_BYTES_MAX", 3 * CHUNK_BYTES)
    with pytest.raises(TooLarge, match="one by one"):
        await check(blobs, wanted)
    monkeypatch.undo()
    await blobs.delete_request("1", "req_1")
    with pytest.raises(Gone):
        await check(blobs, wanted)
    with pytest.raises(Gone):
        await check(blobs, [])

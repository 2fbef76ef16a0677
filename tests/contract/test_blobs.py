"""The blob store: directory and memory; S3 only as far as it needs no server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from workers.contract.blobs import (
    BlobDamaged,
    BlobMissing,
    Blobs,
    BlobTooLarge,
    BlobUnavailable,
    blob_key,
)
from workers.contract.jobs import BlobRef


@pytest.fixture(params=["directory", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return Blobs((tmp_path / "a place").as_uri() if request.param == "directory" else "memory:///")


async def test_written_blob_can_be_read(blobs: Blobs) -> None:
    key = blob_key("acc_1", "req_1", "c0ffee:1", 0)

    ref = await blobs.put(key, b"an image", content_type="image/png")

    assert (ref.key, ref.bytes, ref.content_type) == ("acc_1/req_1/c0ffee-1/0", 8, "image/png")
    assert ref.sha256 == hashlib.sha256(b"an image").hexdigest()
    assert await blobs.get(ref) == b"an image"


async def test_empty_and_large_blobs_can_be_read(blobs: Blobs) -> None:
    large = os.urandom(5_000_000)

    refs = [await blobs.put(f"a/r/n/{n}", data) for n, data in enumerate((b"", large))]

    assert [await blobs.get(ref) for ref in refs] == [b"", large]
    pieces = [piece async for piece in blobs.stream(refs[1])]
    assert b"".join(pieces) == large


async def test_deleted_blob_is_missing(blobs: Blobs) -> None:
    ref = await blobs.put("a/r/n/0", b"soon gone")
    await blobs.put("a/r/n/1", b"as well")
    await blobs.put("a/other/n/0", b"stays")

    deleted = await blobs.delete_request("a", "r")

    assert deleted == 2
    assert await blobs.delete_request("a", "r") == 0
    with pytest.raises(BlobMissing):
        await blobs.get(ref)
    stays = msgspec.structs.replace(ref, key="a/other/n/0", bytes=5)
    with pytest.raises(BlobDamaged):
        await blobs.get(stays)


async def test_modified_blob_is_never_returned(blobs: Blobs) -> None:
    ref = await blobs.put("a/r/n/0", b"what was written")
    await blobs.put("a/r/n/0", b"what was meddled")

    with pytest.raises(BlobDamaged, match="SHA-256"):
        await blobs.get(ref)


async def test_attempts_do_not_overwrite_each_other(blobs: Blobs) -> None:
    stale, winner = (blob_key("a", "r", nonce, 0) for nonce in ("old:1", "new:1"))

    refs = await asyncio.gather(blobs.put(stale, b"stale"), blobs.put(winner, b"winner"))

    assert [await blobs.get(ref) for ref in refs] == [b"stale", b"winner"]


async def test_blob_over_the_limit_is_not_written(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path.as_uri(), bytes_max=10)

    with pytest.raises(BlobTooLarge, match="11 bytes"):
        await blobs.put("a/r/n/0", b"eleven byte")

    with pytest.raises(BlobMissing):
        await blobs.get(BlobRef("a/r/n/0", 11, ""))


async def test_failing_store_is_unavailable(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path.as_uri())
    (tmp_path / "a").write_text("a file where a directory must be")

    with pytest.raises(BlobUnavailable):
        await blobs.put("a/r/n/0", b"lost")


@pytest.mark.parametrize("part", ["", "..", ".", "a/b", "a\\b", "ä", "x" * 129, "a b"])
def test_key_cannot_leave_its_directory(part: str) -> None:
    with pytest.raises(ValueError, match="part of a blob key"):
        blob_key("acc", part, "n", 0)


@pytest.mark.parametrize("url", ["ftp://host/x", "/a/directory", "http://host/x"])
def test_unsupported_scheme_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="s3://bucket/prefix"):
        Blobs(url)


async def test_only_s3_creates_presigned_urls(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "eu-central-1",
        "AWS_ENDPOINT_URL": "https://s3.example.com",
    }.items():
        monkeypatch.setenv(name, value)
    ref = await blobs.put("a/r/n/0", b"x")

    address = await Blobs("s3://bucket/prefix").sign(ref, valid_s=60)

    assert await blobs.sign(ref, valid_s=60) is None
    assert address is not None
    assert address.startswith("https://s3.example.com/bucket/prefix/a/r/n/0?")
    assert "X-Amz-Expires=60" in address
    assert "secret" not in address


async def test_blob_can_be_written_as_a_stream(blobs: Blobs) -> None:
    pieces = [os.urandom(700_000) for _ in range(9)]

    async def chunks() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    ref = await blobs.put_stream(blob_key("acc", "file", "n", 0), chunks(), content_type="a/b")

    content = b"".join(pieces)
    assert (ref.bytes, ref.content_type) == (len(content), "a/b")
    assert ref.sha256 == hashlib.sha256(content).hexdigest()
    assert await blobs.get(ref) == content


async def test_incomplete_or_too_long_stream_leaves_nothing_behind(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path.as_uri(), bytes_max=1_000_000)

    async def chunks(*, breaks: bool) -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 400_000
            if breaks:
                raise ValueError("the client has gone")

    for breaks, error in ((False, BlobTooLarge), (True, ValueError)):
        with pytest.raises(error):
            await blobs.put_stream(blob_key("acc", "file", "n", 0), chunks(breaks=breaks))

    assert [names for _, _, names in os.walk(tmp_path) if names] == []


@pytest.mark.parametrize("ends", [True, False])
async def test_cancelled_write_neither_follows_its_deletion_nor_reads_on(
    ends: bool, tmp_path: Path
) -> None:
    blobs = Blobs(tmp_path.as_uri())

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        if not ends:
            await asyncio.sleep(3600)

    for step in range(200):
        key = blob_key("7", f"req_{step}", "n", 0)
        write = asyncio.create_task(blobs.put_stream(key, chunks()))
        for _ in range(step % 8):
            await asyncio.sleep(0)
        write.cancel()
        await asyncio.wait([write])
        await blobs.delete_request("7", f"req_{step}")

    await asyncio.sleep(0.1)
    assert [names for _, _, names in os.walk(tmp_path) if names] == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelled_write_of_a_chunk_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store whose threads go on after a cancellation, as they do in a rename."""
    blobs = Blobs(tmp_path.as_uri())
    file = tmp_path / "late"

    def put_async(*_: object, **__: object) -> asyncio.Future[None]:
        def rename() -> None:
            time.sleep(0.2)
            file.write_bytes(b"x")

        return asyncio.get_running_loop().run_in_executor(None, rename)

    monkeypatch.setattr("obstore.put_async", put_async)
    write = asyncio.create_task(blobs.put(blob_key("7", "req_1", "n", 0), b"x"))
    await asyncio.sleep(0.05)
    write.cancel()
    await asyncio.wait([write])

    assert write.cancelled()
    assert file.exists()


WRITER = """
import asyncio, os, signal, sys
from workers.contract.blobs import Blobs

async def pieces():
    yield b"x" * 20_000_000
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(Blobs(sys.argv[1]).put_stream(sys.argv[2], pieces()))
"""


def test_unfinished_files_of_a_killed_process_are_deleted_with_the_request(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path.as_uri())
    for nonce in ("dead", "kept"):
        key = blob_key("7", "req_1", nonce, 0)
        command = [sys.executable, "-c", WRITER, tmp_path.as_uri(), key]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {"dead", "kept"}

    asyncio.run(blobs.delete_request("7", "req_1", spare=["kept"]))
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {"kept"}

    asyncio.run(blobs.delete_request("7", "req_1"))
    assert list((tmp_path / "7").iterdir()) == []

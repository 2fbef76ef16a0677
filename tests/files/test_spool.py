"""Files inside a JSON body are extracted from it, whatever the chunks in which it arrives."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.files.spool import INLINE_MAX, Extractor, Spool


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with ThreadPoolExecutor(1) as threads:
        made = Spool(tmp_path, threads, closed=lambda: None)
        yield made
        made.close()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def extract(spool: Spool, body: bytes, *, piece: int = 65_536) -> bytes:
    extractor = Extractor(spool)
    for start in range(0, len(body), piece):
        await extractor.feed(body[start : start + piece])
    return extractor.end()


async def content(spool: Spool, uri: str) -> bytes:
    part = spool.find(uri)
    assert part is not None
    return b"".join([chunk async for chunk in spool.read(part)])


@pytest.mark.parametrize("piece", [7, 1000, 65_536, 10**9])
async def test_long_files_are_extracted_and_the_rest_is_unchanged(spool: Spool, piece: int) -> None:
    first, second = random.randbytes(150_001), random.randbytes(1_300_000 if piece > 7 else 60_000)
    text = 'say "data:image/png;base64,' + "A" * 100_000 + '" \\ and \\"'
    body = {
        "prompt": data_uri(b"x" * 100_000),
        "metadata": {"note": text},
        "image": data_uri(first),
        "small": data_uri(b"y" * 100),
        "images": [{"url": data_uri(second, "video/mp4")}, "https://example.com/a.png"],
    }

    kept = json.loads(await extract(spool, json.dumps(body).encode(), piece=piece))

    assert len(spool.parts) == 2
    assert await content(spool, kept["image"]) == first
    assert await content(spool, kept["images"][0]["url"]) == second
    kept["image"], kept["images"][0]["url"] = body["image"], data_uri(second, "video/mp4")
    assert kept == body


@pytest.mark.parametrize("piece", [11, 65_536])
async def test_escapes_of_other_encoders_are_understood(spool: Spool, piece: int) -> None:
    data = random.randbytes(80_000)
    uri = data_uri(data)
    escaped = uri.replace("/", "\\/").replace("+", "\\u002B")

    kept = json.loads(await extract(spool, f'{{"image": "{escaped}"}}'.encode(), piece=piece))

    assert await content(spool, kept["image"]) == data


async def test_equal_bodies_stay_equal_and_others_differ(spool: Spool, tmp_path: Path) -> None:
    data = random.randbytes(100_000)
    body = json.dumps({"image": data_uri(data)}).encode()
    with ThreadPoolExecutor(1) as threads:
        other = Spool(tmp_path, threads, closed=lambda: None)
        again = await extract(other, body, piece=100)
        other.close()

    kept = await extract(spool, body)

    assert kept == again
    assert hashlib.sha256(data).hexdigest() in kept.decode()


async def test_invalid_base64_is_detected(spool: Spool) -> None:
    body = json.dumps({"image": "data:image/png;base64," + "*" * INLINE_MAX * 2}).encode()

    kept = json.loads(await extract(spool, body))

    part = spool.find(kept["image"])
    assert part is not None
    assert not part.valid


async def test_placeholder_of_another_request_is_ignored(spool: Spool) -> None:
    assert spool.find(f"data:image/png;spooled=0,{'0' * 64}") is None
    await extract(spool, json.dumps({"image": data_uri(random.randbytes(100_000))}).encode())
    assert spool.find(f"data:image/png;spooled=0,{'0' * 64}") is None


async def test_body_that_ends_within_a_file_is_not_json(spool: Spool) -> None:
    body = json.dumps({"image": data_uri(random.randbytes(100_000))}).encode()

    with pytest.raises(json.JSONDecodeError):
        json.loads(await extract(spool, body[:-10]))


async def test_spool_reports_its_end_once(tmp_path: Path) -> None:
    told = []
    with ThreadPoolExecutor(1) as threads:
        spool = Spool(tmp_path, threads, closed=lambda: told.append(1))
        await extract(spool, json.dumps({"image": data_uri(random.randbytes(100_000))}).encode())
        assert os.listdir(tmp_path) == []
        spool.close()
        spool.close()

    assert told == [1]

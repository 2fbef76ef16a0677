"""Result files of batches: outputs from the blob store, within limits and with exact numbers."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gateway.batches.stored import Form, StoredOutputs, place
from gateway.files import download_urls
from gateway.files.download_urls import UrlSigner
from workers.contract.blobs import Blobs
from workers.contract.jobs import BlobRef

LINKS = UrlSigner.make(b"pepper", valid_s=60, base="http://here")
KEY = f"1/req_{'0' * 32}/n/0"


async def written(blobs: Blobs, lines: list[list[tuple[BlobRef, Form | None]]], room: int) -> Any:
    """Write lines with images in each form; return the bodies in the file."""
    writer = StoredOutputs(blobs, LINKS, file_bytes_max=room).writer(datetime.now(UTC))
    shown = []
    for pictures in lines:
        body = {"id": "req_1", "data": [{**place(*each), "seed": 7} for each in pictures]}
        usage = b'{"cost": 0.000000100000000000000001}'
        line = {"custom_id": "a", "response": {"status_code": 200, "body": body}, "error": None}
        text = msgspec.json.encode(line).replace(b'"req_1"', b'"req_1","usage":' + usage)
        found = await writer.write(text)
        assert usage in found
        decoded = msgspec.json.decode(found)
        assert (decoded["custom_id"], decoded["error"]) == ("a", None)
        shown.append(decoded["response"]["body"]["data"])
    return shown


async def test_each_output_has_its_requested_form(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path.as_uri())
    blob = await blobs.put(KEY, b"abc", content_type="image/png")

    (data,) = await written(blobs, [[(blob, None), (blob, "url"), (blob, "b64_json")]], 1000)

    url = LINKS.link(blob).url
    text = base64.b64encode(b"abc").decode()
    assert data == [
        {"url": url, "b64_json": text, "seed": 7},
        {"url": url, "seed": 7},
        {"b64_json": text, "seed": 7},
    ]


async def test_outputs_beyond_the_files_limit_are_given_by_url(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path.as_uri())
    small = await blobs.put(KEY, bytes(3), content_type="image/png")
    large = await blobs.put(KEY.replace("n/0", "n/1"), bytes(300), content_type="image/png")

    found = await written(
        blobs,
        [[(large, None)], [(large, "b64_json")], [(small, "b64_json")], [(small, None)] * 2],
        405,
    )

    assert [[set(picture) for picture in data] for data in found] == [
        [{"url", "b64_json", "seed"}],
        [{"url", "seed"}],
        [{"b64_json", "seed"}],
        [{"url", "seed"}] * 2,
    ]


async def test_missing_or_damaged_outputs_are_given_by_url(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path.as_uri())
    blob = await blobs.put(KEY, b"abc", content_type="image/png")
    damaged = msgspec.structs.replace(blob, sha256="0" * 64)
    gone = msgspec.structs.replace(blob, key=KEY.replace("n/0", "n/9"))

    (data,) = await written(blobs, [[(damaged, "b64_json"), (gone, None)]], 1000)

    assert [set(picture) for picture in data] == [{"url", "seed"}] * 2


@pytest.mark.parametrize("second", [0.0, 30.5, 59.97])
def test_urls_are_valid_until_a_moment_and_at_least_the_minimum(
    monkeypatch: pytest.MonkeyPatch, second: float
) -> None:
    blob = BlobRef(KEY, 3, "0" * 64, "image/png")
    now = datetime(2026, 11, 29, 11, 17, tzinfo=UTC) + timedelta(seconds=second)
    clock = SimpleNamespace(time=now.timestamp)
    monkeypatch.setattr(download_urls, "time", clock)

    later = LINKS.until(now + timedelta(days=1)).link(blob).expires_at
    past = LINKS.until(now - timedelta(days=1)).link(blob).expires_at

    assert 0 <= later - (now + timedelta(days=1)).timestamp() <= 61
    assert 60 <= past - now.timestamp() <= 121

"""Presigned URLs that accept one file without a key."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.errors import Forbidden, Gone
from gateway.files import upload_urls as module
from gateway.files.sources import RemoteSource, UploadedSource, read_given
from gateway.files.upload_urls import UploadUrl, UploadUrls, uploaded_file_id

SLOTS = UploadUrls.make(b"a pepper of some length")


def parts(url: str) -> tuple[str, dict[str, str]]:
    split = urlsplit(url)
    return split.path.rpartition("/")[2], {k: v[0] for k, v in parse_qs(split.query).items()}


def test_upload_url_carries_account_and_content_type() -> None:
    upload_url, public_url = SLOTS.open(7, "jpg", base="https://gate.example/")
    name, query = parts(upload_url)

    slot = SLOTS.check(name, **query)

    assert upload_url.startswith(f"{public_url}?")
    assert slot == UploadUrl(7, name.removesuffix(".jpg"), "image/jpg")
    assert slot.kind == "image"
    with pytest.raises(Forbidden):
        UploadUrls.make(b"another server's pepper").check(name, **query)
    for wrong in ({"account": "8"}, {"account": None}, {"expires": "x"}, {"signature": None}):
        with pytest.raises(Forbidden):
            SLOTS.check(name, **{**query, **wrong})


def test_upload_url_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VALID_S", -1)
    name, query = parts(SLOTS.open(7, "png", base="https://gate.example")[0])

    with pytest.raises(Gone):
        SLOTS.check(name, **query)


def test_upload_url_is_read_as_an_upload_and_never_fetched() -> None:
    upload_url, public_url = SLOTS.open(7, "png", base="https://gate.example/below")
    file_id = parts(upload_url)[0].removesuffix(".png")

    assert uploaded_file_id(public_url) == uploaded_file_id(upload_url) == file_id
    assert read_given({"url": public_url}) == UploadedSource(file_id)
    for other in ("https://gate.example/a.png", "https://gate.example/v1/uploads/file-1.png"):
        assert read_given(other) == RemoteSource(other)
    assert uploaded_file_id("https://[broken") is None

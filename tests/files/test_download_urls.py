"""Signed URLs that open one output until they expire."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.errors import Forbidden, Gone, NotFound
from gateway.files.download_urls import PATH, UrlSigner
from workers.contract.jobs import BlobRef

LINKS = UrlSigner.make(b"a pepper of some length", valid_s=3600, base="https://gate.example/")
BLOB = BlobRef(f"7/req_{'0' * 32}/a-token_1/3", 10, "00", "video/mp4")


def parts(url: str) -> tuple[str, str, str]:
    split = urlsplit(url)
    query = parse_qs(split.query)
    return split.path.removeprefix(f"{PATH}/"), query["expires"][0], query["signature"][0]


def test_url_identifies_its_blob_without_the_account() -> None:
    link = LINKS.link(BLOB)
    path, expires, signature = parts(link.url)

    place = LINKS.check(path, expires=expires, signature=signature)

    assert link.url.startswith("https://gate.example/v1/blobs/req_0")
    assert not path.startswith("7/")
    assert place.key(7) == BLOB.key
    assert place.content_type == "video/mp4"


def test_expired_url_is_refused_as_gone() -> None:
    old = UrlSigner.make(b"a pepper of some length", valid_s=-7200, base="")
    path, expires, signature = parts(old.link(BLOB).url)

    with pytest.raises(Gone):
        LINKS.check(path, expires=expires, signature=signature)


@pytest.mark.parametrize("change", ["path", "expires", "signature", "none"])
def test_modified_url_is_refused(change: str) -> None:
    path, expires, signature = parts(LINKS.link(BLOB).url)
    path = path.replace("/3.", "/4.") if change == "path" else path
    expires = str(int(expires) + 1) if change == "expires" else expires
    changed = {"signature": signature[::-1], "none": None}.get(change, signature)

    with pytest.raises(Forbidden):
        LINKS.check(path, expires=expires, signature=changed)


def test_url_signed_with_another_secret_is_refused() -> None:
    other = UrlSigner.make(b"another pepper of some length", valid_s=3600, base="")
    path, expires, signature = parts(other.link(BLOB).url)

    with pytest.raises(Forbidden):
        LINKS.check(path, expires=expires, signature=signature)


@pytest.mark.parametrize("path", ["", "x", f"req_{'0' * 32}/../0.png", f"req_{'0' * 32}/a/0"])
def test_path_that_is_not_a_blob_is_not_found(path: str) -> None:
    with pytest.raises(NotFound):
        LINKS.check(path, expires="1", signature="x")

"""Pages are compressed, but not where their lengths could give something away."""

from __future__ import annotations

import re

import pytest

from tests.console.routes import pages_of
from tests.console.seeding import Seeded, seed
from tests.console.visiting import Browser, Installation

ZIP = {"Accept-Encoding": "gzip", "Sec-Fetch-Site": "same-origin"}
GOAL_BYTES = 25_000


@pytest.fixture(scope="module")
def seeded(installation: Installation) -> Seeded:
    return seed(installation.database, installation.settings.catalog)


def test_pages_are_compressed_and_small(installation: Installation, seeded: Seeded) -> None:
    for role in ("operator", "owner"):
        browser = installation.visitor(role, account="atlas")
        for path in pages_of(installation.client.app, role, seeded):
            answer = browser.get(path, **ZIP)
            assert answer.status_code == 200, path
            is_secret = answer.headers["cache-control"] == "no-store"
            assert answer.headers.get("content-encoding") == (None if is_secret else "gzip"), path
            assert int(answer.headers["content-length"]) <= GOAL_BYTES, path


def test_page_has_the_same_text_compressed_or_not(installation: Installation) -> None:
    browser = installation.visitor("owner")

    zipped = browser.get("/console/home", **ZIP)
    plain = browser.get("/console/home")

    assert zipped.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    for answer in (zipped, plain):
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "Sec-Fetch-Site" in answer.headers["vary"]
    assert without_what_is_new(zipped.text) == without_what_is_new(plain.text)


def without_what_is_new(text: str) -> str:
    """Remove the nonce, the token and times from a page."""
    text = re.sub(r'nonce="[^"]*"|[0-9a-f]{128}', "", text)
    return re.sub(r"\d\d(:|%3A)\d\d(:|%3A)\d\d[.\d]*|\d+ (s|min) ago", "", text)


@pytest.mark.parametrize("site", ["cross-site", "same-site", None])
def test_call_of_another_site_gets_no_compressed_page(
    installation: Installation, site: str | None
) -> None:
    browser = installation.visitor("owner")
    headers = {"Accept-Encoding": "gzip"} | ({"Sec-Fetch-Site": site} if site else {})

    for path in ("/console/home", "/console/requests?key=guess", "/console/nothing?guess"):
        answer = browser.get(path, **headers)
        assert "content-encoding" not in answer.headers, path


def test_page_that_shows_a_secret_is_not_compressed(installation: Installation) -> None:
    browser = installation.visitor("owner")
    accepting = {**ZIP, "Origin": "http://127.0.0.1:8000"}

    key = browser.post("/console/keys/new", {"name": "new", "read": "yes"}, headers=accepting)
    entrance = Browser(installation.client).get("/console/enter", **ZIP)

    assert 'id="secret"' in key.text
    assert (key.status_code, entrance.status_code) == (201, 200)
    for answer in (key, entrance):
        assert answer.headers["cache-control"] == "no-store"
        assert "content-encoding" not in answer.headers

"""The catalog file in the console: mistakes with their lines, what changes, save and reload."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import httpx
import pytest

from gateway.catalog.editing.files import KEPT, kept_texts
from gateway.catalog.reloads import digest_of
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases

FIELD = re.compile(r'<input type="hidden" name="(expected|checked)" value="(\w+)">')


@pytest.fixture
def own(tmp_path: Path, postgres: str, valkey: str) -> Iterator[Installation]:
    url = Databases("sqlite", tmp_path, postgres).make()
    with installed(tmp_path / "home", url, valkey) as made:
        yield made


def text_of(answer: httpx.Response) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.text)).split())


def check(browser: Browser, text: str) -> tuple[httpx.Response, dict[str, str]]:
    """Open the editor, check a text, and return the fields that its next form sends."""
    hidden = dict(FIELD.findall(browser.get("/console/catalog").text))
    sent = text.replace("\n", "\r\n")
    answer = browser.post("/console/catalog/check", {"text": sent, **hidden})
    return answer, {"text": sent, **dict(FIELD.findall(answer.text))}


def test_text_is_checked_compared_saved_and_in_force(own: Installation) -> None:
    browser, path = own.visitor("operator"), own.settings.catalog
    old = path.read_text()
    new = old.replace('"0.40"', '"0.50"').replace("output_tokens: 512", "output_tokens: 256", 1)

    checked, form = check(browser, new)
    assert checked.status_code == 200
    shown = text_of(checked)
    assert "$0.4 per request becomes $0.5 per request" in shown
    assert "It is 256, not 512." in shown
    assert "Save and reload" in shown
    assert path.read_text() == old

    saved = browser.post("/console/catalog/save", {**form, "reason": "contract 17"})
    assert saved.headers["location"] == "/console/catalog?saved=yes"
    assert path.read_text() == new
    price = text_of(browser.get("/console/models/Veo3"))
    assert "$0.5 / request" in price
    (event,) = own.events(act="catalog.save")
    assert event.before == {"sha256": digest_of(old.encode())}
    assert event.after is not None
    assert event.after["sha256"] == digest_of(new.encode())
    assert event.reason == "contract 17"

    (kept,) = kept_texts(own.settings.home / KEPT)
    back = browser.get(f"/console/catalog?kept={kept.name}")
    assert '"0.40"' in unescape(back.text)


def test_mistake_shows_its_line_and_changes_nothing(own: Installation) -> None:
    browser, path = own.visitor("operator"), own.settings.catalog
    old = path.read_text()
    wrong = old.replace('"0.40"', "0.40")
    line = next(at for at, each in enumerate(wrong.splitlines(), 1) if "0.40" in each)

    checked, form = check(browser, wrong)

    assert checked.status_code == 200
    assert f'data-line="{line}"' in checked.text
    assert f'id="line-{line}"' in checked.text
    assert "not in quotes" in text_of(checked)
    assert "Save and reload" not in text_of(checked)
    forced = browser.post("/console/catalog/save", {**form, "checked": digest_of(wrong.encode())})
    assert forced.status_code == 409
    assert path.read_text() == old


def test_file_that_was_changed_meanwhile_is_shown_beside_ours(own: Installation) -> None:
    browser, path = own.visitor("operator"), own.settings.catalog
    old = path.read_text()
    _, form = check(browser, old + "# ours\n")
    path.write_text(old + "# theirs\n")

    refused = browser.post("/console/catalog/save", form)

    assert refused.status_code == 409
    assert "Nothing was saved" in text_of(refused)
    assert "\N{MINUS SIGN} # theirs" in unescape(refused.text)
    assert "+ # ours" in unescape(refused.text)
    assert path.read_text() == old + "# theirs\n"
    again = {"text": form["text"], **dict(FIELD.findall(refused.text))}
    assert browser.post("/console/catalog/save", again).status_code == 303
    assert path.read_text() == old + "# ours\n"


def test_text_that_was_not_checked_is_checked_first(own: Installation) -> None:
    browser, path = own.visitor("operator"), own.settings.catalog
    old = path.read_text()
    _, form = check(browser, old + "# one\n")

    answer = browser.post("/console/catalog/save", {**form, "text": old.replace('"0.40"', '"9"')})

    assert answer.status_code == 200
    assert "becomes $9 per request" in text_of(answer)
    assert path.read_text() == old


def test_save_asks_for_a_recent_proof_and_keeps_the_text(own: Installation) -> None:
    browser, path = own.browser(), own.settings.catalog
    browser.enter(own.link(role="operator", name="ann"))
    long = path.read_text() + "# long\n" * 4000
    _, form = check(browser, long)
    own.forget_last_proof()

    answer = browser.post("/console/catalog/save", form)
    assert answer.headers["location"].startswith("/console/prove")
    assert "# long" not in path.read_text()

    code = own.link(role="operator", name="ann")["code"]
    proved = browser.post("/console/prove", {"secret": code})
    assert proved.headers["location"] == "/console/prove/again"
    page = browser.get("/console/prove/again").text
    kept = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page))
    sent = {name: unescape(value) for name, value in kept.items()}
    saved = browser.post("/console/catalog/save", sent, token=sent["csrf"])

    assert saved.headers["location"] == "/console/catalog?saved=yes"
    assert path.read_text() == long


def test_edited_file_waits_until_it_is_reloaded(own: Installation) -> None:
    browser, path = own.visitor("operator"), own.settings.catalog
    path.write_text(path.read_text().replace('"0.40"', '"0.60"'))

    shown = text_of(browser.get("/console/catalog"))
    assert "was edited and is not in force yet" in shown
    assert "becomes $0.6 per request" in shown
    assert browser.post("/console/catalog/reload").status_code == 303

    assert "not in force yet" not in text_of(browser.get("/console/catalog"))
    assert "$0.6 / request" in text_of(browser.get("/console/models/Veo3"))


def test_readers_see_the_text_with_its_lines_and_no_form(own: Installation) -> None:
    page = own.visitor("finance").get("/console/catalog")

    assert 'id="line-1"' in page.text
    assert "<textarea" not in page.text
    assert own.visitor("owner").get("/console/catalog").status_code == 404


def test_empty_file_begins_with_an_example_of_each_task(own: Installation) -> None:
    own.settings.catalog.write_text("")

    page = own.visitor("operator").get("/console/catalog").text

    assert "task: text-to-music" in page.partition("<textarea")[2]

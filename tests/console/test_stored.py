"""Batches, files and voices in the console: checked, quoted, run, used, saved, refused, deleted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape

import pytest
from sqlalchemy import update

from gateway.ledger.transfers import add_credit
from gateway.pricing import format_usd, parse_usd
from gateway.tables.batches import batches
from tests.artist import wav
from tests.console.test_money import text_of
from tests.console.visiting import FORM, ORIGIN, Browser, Installation
from tests.stack import wait_for

LINE = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}


def lines(*prompts: str) -> bytes:
    bodies = [
        {"model": "echo", "messages": [{"role": "user", "content": each}]} for each in prompts
    ]
    made = [{**LINE, "custom_id": str(n), "body": body} for n, body in enumerate(bodies)]
    return "\n".join(json.dumps(each) for each in made).encode()


@pytest.fixture(scope="module", autouse=True)
def _credit(installation: Installation) -> None:
    with installation.database.transaction() as connection:
        add_credit(
            connection, installation.acme.id, parse_usd("5"), kind="topup", key="topup:acme",
            actor="test", reason="test",
        )  # fmt: skip


@pytest.fixture(scope="module")
def owner(installation: Installation) -> Browser:
    return installation.visitor("owner")


@pytest.fixture(scope="module")
def api(installation: Installation) -> Iterator[dict[str, str]]:
    secret, _ = installation.key()
    return {"Authorization": f"Bearer {secret}"}


def send(browser: Browser, path: str, file: tuple[str, bytes], **fields: str) -> str:
    """Send a form with a file; return where it leads, or the page."""
    cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    browser._client.cookies.clear()
    answer = browser._client.post(
        f"{ORIGIN}{path}",
        data={"csrf": browser.token(), **fields},
        files={"file": file},
        headers={**FORM, "Cookie": cookie},
        follow_redirects=False,
    )
    return answer.headers.get("location") or answer.text


def test_mistakes_of_a_file_are_shown_with_their_lines(owner: Browser) -> None:
    good, bad = lines("one"), b'{"custom_id": "1"}\nnot json'

    page = unescape(send(owner, "/console/batches/check", ("x.jsonl", good + b"\n" + bad)))

    assert "2 mistakes in the file" in page
    rows = re.findall(r'<th scope="row" class="number">(\d+)</th>', page)
    assert rows == ["2", "3"]
    assert "The line is not a JSON object." in page
    assert "Start the batch" not in page
    unknown = send(owner, "/console/batches/check", ("x.jsonl", b'{"url": "/v1/nothing"}'))
    assert "url is &#39;/v1/nothing&#39;" in unknown
    assert "Choose" not in unknown
    empty = send(owner, "/console/batches/check", ("", b""), file_id="")
    assert "Unknown file" in unescape(empty)


def test_batch_is_quoted_run_and_cancelled(
    installation: Installation, owner: Browser, api: dict[str, str]
) -> None:
    http = installation.client
    page = send(owner, "/console/batches/check", ("run.jsonl", lines("one two", "three", "four")))
    file_id, endpoint = (
        re.findall(rf'name="{name}" value="([^"]+)"', page)[0] for name in ("file_id", "endpoint")
    )
    quotes = [
        http.post(
            "/v1/quote",
            json={
                "model": "echo",
                "messages": [{"role": "user", "content": each}],
                "service_class": "batch",
            },
            headers=api,
        ).json()["max_cost"]
        for each in ("one two", "three", "four")
    ]
    most = f"${format_usd(sum(parse_usd(each) for each in quotes))}"
    assert f"3 requests for at most {most}" in page

    sent = {"file_id": file_id, "endpoint": endpoint}
    path = owner.post("/console/batches", sent).headers["location"]
    assert owner.post("/console/batches", sent).headers["location"] == path

    wait_for(lambda: "0 of 3 requests done" in owner.get(path).text, "the check of the file")
    shown = owner.get(path).text
    assert most in shown
    batch_id = path.rpartition("/")[2]
    view = http.get(f"/v1/batches/{batch_id}", headers=api).json()
    assert (view["status"], view["request_counts"]["total"]) == ("in_progress", 3)
    refused = owner.post(f"/console/files/{file_id}/delete")
    assert refused.status_code == 409
    assert f'href="/console/batches/{batch_id}">Open the batch' in refused.text

    assert owner.post(f"{path}/cancel").status_code == 303
    wait_for(lambda: ">download</a>" in owner.get(path).text, "the end of the batch")
    ended = unescape(owner.get(path).text)
    assert "batch cancelled" in ended
    errors = re.findall(r'href="(/console/files/[^"]+/content)" download>download', ended)
    assert owner.get(errors[0]).text.count('"code":"batch_cancelled"') == 3
    ran = {"completed": 2, "failed": 1, "cost_nanos": 1_234, "output_tokens": 7}
    installation.execute(update(batches).where(batches.c.id == batch_id).values(ran))
    view = http.get(f"/v1/batches/{batch_id}", headers=api).json()
    counts = view["request_counts"]
    shown = " ".join(text_of(owner.get(path).text).split())
    for name, number in (("Succeeded", counts["completed"]), ("Failed", counts["failed"])):
        assert f"{name} {number} " in shown
    assert view["usage"]["cost"] == pytest.approx(1.234e-6)
    assert "Cost $0.000001234 " in shown
    assert owner.post(f"{path}/cancel").status_code in (303, 409)
    assert owner.post(f"/console/files/{file_id}/delete").status_code == 303
    assert owner.get(f"/console/files/{file_id}/content").status_code == 404


def test_files_and_batches_of_others_do_not_exist(
    installation: Installation, owner: Browser
) -> None:
    assert (
        send(owner, "/console/files", ("mine.wav", wav(1000)), purpose="user_data")
        == "/console/files"
    )
    page = owner.get("/console/files").text
    content = re.findall(r'href="(/console/files/file-\w+/content)"', page)[0]
    assert owner.get(content).content == wav(1000)
    stranger = installation.visitor("owner", account="other")

    assert stranger.get(content).status_code == 404
    assert "There is no file" in stranger.get("/console/files").text
    assert "There is no batch" in stranger.get("/console/batches").text
    assert "There is no voice" in stranger.get("/console/voices").text
    assert "Upload" not in installation.visitor("viewer").get("/console/files").text
    member = installation.visitor("member")
    assert member.post(content.replace("/content", "/delete")).status_code == 404
    for role in ("operator", "finance", "auditor"):
        for path in ("/console/files", "/console/batches", "/console/voices", content):
            assert installation.visitor(role).get(f"{path}?account=acme").status_code == 404
    wrong = send(owner, "/console/files", ("x.txt", b"no picture"), purpose="user_data")
    assert 'role="alert"' in wrong


def test_voices_are_heard_renamed_and_withdrawn(
    installation: Installation, owner: Browser, api: dict[str, str]
) -> None:
    http, sound = installation.client, wav(2000)
    consent = http.post(
        "/v1/audio/voice_consents", headers=api, data={"name": "Ann", "language": "en-US"},
        files={"recording": ("c.wav", sound, "audio/wav")},
    ).json()  # fmt: skip
    for name in ("calm", "loud"):
        made = http.post(
            "/v1/audio/voices", headers=api, data={"name": name, "consent": consent["id"]},
            files={"audio_sample": ("v.wav", sound, "audio/wav")},
        )  # fmt: skip
        assert made.status_code == 200, made.text
    voice = made.json()["id"]

    page = owner.get("/console/voices").text
    assert "2 voices of acme" in page
    assert page.count("<audio ") == 3
    heard = owner.get(f"/console/voices/{voice}/recording")
    assert heard.content == sound
    assert heard.headers["cross-origin-resource-policy"] == "same-origin"
    part = owner.get(f"/console/voices/{voice}/recording", Range="bytes=0-3")
    assert (part.status_code, part.content) == (206, b"RIFF")
    assert owner.post(f"/console/voices/{voice}/rename", {"name": "bold"}).status_code == 303
    taken = owner.post(f"/console/voices/{voice}/rename", {"name": "calm"})
    assert taken.status_code == 409
    member = installation.visitor("member")
    assert member.post(f"/console/voices/{voice}/delete").status_code == 404
    assert owner.post(f"/console/voices/{consent['id']}/delete").status_code == 303
    assert "There is no voice" in owner.get("/console/voices").text

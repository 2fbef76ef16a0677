"""Webhooks in the console: what receivers answered, sending again, and the signing secret."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from gateway.sql.database import Database
from tests.console.seeding import HOSTILE, Seeder
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.stack import CATALOG, wait_for

Received = list[tuple[dict[str, str], bytes]]
SECRET = re.compile(r'<code id="secret">(whsec_[^<]+)</code>')
ONCE = re.compile(r'name="once" value="(\w+)"')
PAGE = "/console/webhooks"


@pytest.fixture(scope="module")
def receiver() -> Iterator[tuple[str, Received]]:
    """A server that is gone at the first call, says so at length, and accepts every other."""
    received: Received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((dict(self.headers.items()), body))
            answer = f"gone \0 {HOSTILE} {'x' * 900}".encode() if len(received) == 1 else b""
            self.send_response(410 if answer else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module", params=[True, False], ids=["private", "public"])
def sending(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    postgres: str,
    valkey: str,
    receiver: tuple[str, Received],
) -> Iterator[tuple[Installation, str, bool]]:
    """An installation, a request with a webhook, and whether private addresses are called."""
    directory = tmp_path_factory.mktemp("webhooks")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    request_id = _ended_request(url, catalog, receiver[0])
    allowed = {"webhook_private_addresses": request.param}
    with installed(directory / "home", url, valkey, **allowed) as made:
        yield made, request_id, request.param


def _ended_request(url: str, catalog: Path, to: str) -> str:
    database = Database(url)
    with database.transaction() as connection:
        seeder = Seeder(connection, catalog)
        account, key = seeder.account("atlas", "25")
        at = datetime.now(UTC) - timedelta(seconds=3)
        made = seeder.request(account, key, at, entry=seeder.entry("text-generation"), webhook=to)
    database.dispose()
    return made


def last_answer(browser: Browser) -> str:
    found = re.search(r'data-label="Last answer">(.*?)</td>', browser.get(PAGE).text)
    return re.sub(r"<[^>]+>", "", found[1]) if found else ""


def test_webhook_is_sent_again_once_with_a_right_signature(
    sending: tuple[Installation, str, bool], receiver: tuple[str, Received]
) -> None:
    installation, request_id, allowed = sending
    owner = installation.visitor("owner", account="atlas")
    calls = len(receiver[1])
    resend = f"{PAGE}/{request_id}/resend"
    if not allowed:
        wait_for(lambda: "private address" in last_answer(owner), "an attempt")
        assert owner.post(resend).status_code == 303
        wait_for(lambda: "2 attempts" in owner.get(PAGE).text, "another attempt")
        assert len(receiver[1]) == calls
        return

    wait_for(lambda: "410" in last_answer(owner), "the first answer")
    shown = owner.get(PAGE).text
    answer = re.search(r'<code class="answer">([^<]*)</code>', shown)
    assert answer is not None
    assert answer[1].startswith("gone &lt;img src=x onerror=")
    assert HOSTILE not in shown
    assert owner.post(resend).headers["location"].endswith(f"{request_id}#webhook")
    wait_for(lambda: "200" in last_answer(owner), "the second answer")

    secret = SECRET.findall(owner.post(f"{PAGE}/secret").text)[0]
    assert len(receiver[1]) == 2
    for headers, body in receiver[1]:
        told = Webhook(secret).verify(body, headers)
        assert told["data"]["id"] == headers["webhook-id"] == request_id
    of_request = owner.get(f"/console/requests/{request_id}").text
    assert of_request.count('<code class="answer">') == 1
    assert [event.act for event in installation.events(subject=f"request {request_id}")] == [
        "webhook.resend"
    ]


def test_roles_and_other_accounts(sending: tuple[Installation, str, bool]) -> None:
    installation, request_id, _ = sending
    for role in ("owner", "member", "viewer", "operator", "auditor"):
        browser = installation.visitor(role, account="atlas")
        page = browser.get(PAGE).text
        assert request_id in page
        may_write = role in ("owner", "operator")
        assert (f"{PAGE}/secret" in browser.get(f"{PAGE}?account=atlas").text) == may_write
        if not may_write:
            assert browser.post(f"{PAGE}/{request_id}/resend").status_code == 404
            assert browser.post(f"{PAGE}/secret?account=atlas").status_code == 404
    stranger = installation.visitor("owner", account="other")
    assert "No webhook has been sent" in stranger.get(PAGE).text
    assert stranger.post(f"{PAGE}/{request_id}/resend").status_code == 404
    assert stranger.post(f"{PAGE}/secret?account=atlas").status_code == 404


def test_secret_asks_for_a_proof_and_is_shown_once_a_click(
    sending: tuple[Installation, str, bool],
) -> None:
    installation, _, _ = sending
    owner = installation.visitor("owner", account="atlas")
    installation.forget_last_proof()
    asked = owner.post(f"{PAGE}/secret")
    assert asked.headers["location"].startswith("/console/prove")

    owner = installation.visitor("owner", account="atlas")
    sent = {"once": ONCE.findall(owner.get(PAGE).text)[0]}
    shown, again = (owner.post(f"{PAGE}/secret", sent) for _ in range(2))

    assert SECRET.search(shown.text)
    assert shown.headers["cache-control"] == "no-store"
    assert again.status_code == 303
    assert len(installation.events(call_id=sent["once"], act="webhook.reveal")) == 1

"""Notices in the console: subscribe, confirm, test, remove, and what was sent with its answers."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator

import pytest

from gateway.accounts.accounts import create_account
from gateway.notices.confirmation import confirmation_token
from gateway.notices.kinds import ACCOUNT_KINDS, OPERATOR_KINDS
from tests.console.seeding import HOSTILE
from tests.console.test_pages import text_of
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.stack import PEPPER, wait_for

PAGE = "/console/notices"
NUMBER = re.compile(r'id="subscription-(\d+)"')
ONCE = re.compile(r'name="once" value="(\w+)"')


@pytest.fixture(scope="module")
def receiver() -> Iterator[str]:
    """A server that accepts every webhook, and answers with markup."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer = HOSTILE.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def told(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Installation]:
    directory = tmp_path_factory.mktemp("notices")
    url = Databases("sqlite", directory, postgres).make()
    more = {
        "webhook_private_addresses": True,
        "smtp_host": "127.0.0.1",
        "smtp_port": 1,
        "mail_from": "tollgate@example.com",
    }
    with installed(directory / "home", url, valkey, **more) as made:
        with made.database.transaction() as connection:
            create_account(connection, f"b{HOSTILE}")
        yield made


def words_of(browser: Browser, path: str) -> str:
    return " ".join(text_of(browser.get(path).text).split())


def numbers(browser: Browser, query: str = "") -> list[str]:
    return NUMBER.findall(browser.get(PAGE + query).text)


def test_owner_subscribes_tests_and_removes(told: Installation, receiver: str) -> None:
    owner, member = told.visitor("owner"), told.visitor("member")
    assert "Notices of acme go nowhere" in owner.get(PAGE).text

    sent = {"to": receiver, "kind": "budget.passed"}
    assert owner.post(PAGE, sent).status_code == 303
    (number,) = numbers(owner)
    again = owner.post(PAGE, sent)
    assert again.status_code == 409
    assert "already go to" in again.text
    assert owner.post(f"{PAGE}/{number}/test").headers["location"].endswith("#sent")
    wait_for(lambda: "delivered" in owner.get(PAGE).text, "the test")
    page = owner.get(PAGE).text
    assert "This is a test" in page
    assert HOSTILE not in page
    assert "&lt;img src=x" in page

    assert f"{PAGE}/{number}/remove" not in member.get(PAGE).text
    assert member.post(f"{PAGE}/{number}/remove").status_code == 404
    summary = words_of(owner, f"{PAGE}/{number}/remove")
    assert "It is the only one: afterwards acme is told nothing." in summary
    assert owner.post(f"{PAGE}/{number}/remove", {"reason": "moved"}).status_code == 303
    assert numbers(owner) == []
    assert [(each.act, each.reason) for each in told.events(subject=f"subscription {number}")] == [
        ("notice.unsubscribe", "moved"), ("notice.test", ""), ("notice.subscribe", ""),
    ]  # fmt: skip
    removed = told.events(act="notice.unsubscribe")[0]
    assert removed.actor.startswith("user ")
    assert removed.before == {"receiver": "127.0.0.1", "kinds": ["budget.passed"]}


def test_mail_of_an_owner_is_confirmed_with_its_token(told: Installation) -> None:
    owner = told.visitor("owner")
    assert owner.post(PAGE, {"to": "ann@example.com"}).status_code == 303
    (number,) = numbers(owner)
    assert "Token of the mail" in words_of(owner, PAGE)

    wrong = owner.post(f"{PAGE}/{number}/confirm", {"token": "guessed"})
    assert wrong.status_code == 400
    assert "This is not the token." in wrong.text
    assert told.events(act="notice.confirm") == []
    assert owner.post(f"{PAGE}/{number}/test").status_code == 400
    token = confirmation_token(PEPPER.encode(), told.acme.id, "mailto:ann@example.com")
    assert owner.post(f"{PAGE}/{number}/confirm", {"token": token}).status_code == 303
    assert "Token of the mail" not in words_of(owner, PAGE)
    assert owner.post(f"{PAGE}/{number}/remove").status_code == 303


def test_operator_subscribes_itself_and_accounts(told: Installation, receiver: str) -> None:
    operator = told.visitor("operator")
    once = ONCE.findall(operator.get(PAGE).text)[0]
    told.forget_last_proof()
    asked = operator.post(PAGE, {"to": receiver})
    assert asked.headers["location"].startswith("/console/prove")

    operator = told.visitor("operator")
    sent = {"to": f"{receiver}?own", "once": once}
    shown = operator.post(PAGE, sent)
    assert "whsec_" in shown.text
    assert shown.headers["cache-control"] == "no-store"
    assert operator.post(PAGE, sent).headers["location"] == f"{PAGE}?account=all"
    assert operator.post(f"{PAGE}?account=b{HOSTILE}", {"to": "bob@example.com"}).status_code == 303

    page = operator.get(PAGE).text
    assert "the operator" in page
    assert HOSTILE not in page
    own, other = numbers(operator)
    assert told.events(subject=f"subscription {own}")[0].account_id is None
    finance, auditor = told.visitor("finance"), told.visitor("auditor")
    assert f"{PAGE}/{own}/remove" in finance.get(PAGE).text
    assert f"{PAGE}/{own}/remove" not in auditor.get(PAGE).text
    for number in (own, other):
        assert finance.post(f"{PAGE}/{number}/remove").status_code == 303
    assert "No notice is sent to anybody" in operator.get(PAGE).text


def test_operator_is_subscribed_while_an_account_is_chosen(
    told: Installation, receiver: str
) -> None:
    link = told.link(role="operator", name="subscriber")
    operator = told.browser()
    operator.enter(link)
    assert operator.post("/console/preferences", {"account": "acme"}).status_code == 303
    form = operator.get(f"{PAGE}?account=all").text
    assert "Subscribe the operator" in form
    assert f'action="{PAGE}?account=all"' in form

    shown = operator.post(f"{PAGE}?account=all", {"to": receiver})
    assert "whsec_" in shown.text
    (number,) = numbers(operator, "?account=all")
    assert told.events(subject=f"subscription {number}")[0].account_id is None
    assert operator.post(f"{PAGE}/{number}/remove").status_code == 303
    told.forget_last_proof()
    asked = operator.post(f"{PAGE}?account=all", {"to": receiver})
    assert asked.headers["location"].startswith("/console/prove")
    assert numbers(operator, "?account=all") == []


def test_other_accounts_and_the_operator_are_out_of_reach(
    told: Installation, receiver: str
) -> None:
    operator, owner = told.visitor("operator"), told.visitor("owner")
    assert operator.post(f"{PAGE}?account=other", {"to": receiver}).status_code == 303
    assert operator.post(PAGE, {"to": receiver}).status_code == 201
    for number in numbers(operator):
        assert owner.get(f"{PAGE}/{number}/remove").status_code == 404
        for act in ("test", "remove", "confirm"):
            assert owner.post(f"{PAGE}/{number}/{act}").status_code == 404
    assert owner.post(f"{PAGE}?account=other", {"to": "a@example.com"}).status_code == 404
    assert numbers(owner) == []
    for number in numbers(operator):
        operator.post(f"{PAGE}/{number}/remove")


def test_forms_offer_the_kinds_of_their_owner(told: Installation) -> None:
    def offered(browser: Browser, query: str = "") -> set[str]:
        return set(re.findall(r'name="kind" value="([^"]+)"', browser.get(PAGE + query).text))

    operator = told.visitor("operator")
    assert offered(operator) == set(OPERATOR_KINDS)
    assert offered(operator, "?account=acme") == set(ACCOUNT_KINDS)
    refused = operator.post(f"{PAGE}?account=acme", {"to": "not an address"})
    assert refused.status_code == 400
    assert 'id="problem-to"' in refused.text
    assert 'value="not an address"' in refused.text


def test_mail_is_not_offered_without_a_server(installation: Installation) -> None:
    owner = installation.visitor("owner")
    assert "set TOLLGATE_SMTP_HOST" in owner.get(PAGE).text
    assert owner.post(PAGE, {"to": "ann@example.com"}).status_code == 400

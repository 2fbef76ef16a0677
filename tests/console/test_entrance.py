"""Ways into the console: a link or its code once, a key, and what is refused."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from sqlalchemy import func, select, update

from gateway.accounts.attempts import FAILURES_MAX, NETWORK_MAX, Attempts
from gateway.accounts.login_links import WRONG_CODES_MAX
from gateway.accounts.users import change_user
from gateway.console.entrance.enter import FLOOR_S, REFUSED
from gateway.errors import TooManyRequests
from gateway.metrics import REGISTRY
from gateway.tables.core import keys
from gateway.tables.users import login_links, sessions
from tests.console.visiting import FORM, Browser, Installation, installed
from tests.databases import Databases
from workers.contract.redis import connect


@pytest.fixture(autouse=True)
def _new_network(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the attempts of each test by themselves."""
    attempts = installation.client.app.state.services.attempts
    monkeypatch.setattr(attempts, "_namespace", f"{attempts._namespace}-{id(monkeypatch)}")


def test_visitor_without_a_session_is_sent_to_the_entrance_and_back(
    installation: Installation,
) -> None:
    browser = installation.browser()

    away = browser.get("/console/sessions?x=1")
    assert (away.status_code, away.headers["location"]) == (
        303, "/console/enter?next=%2Fconsole%2Fsessions%3Fx%3D1",
    )  # fmt: skip
    page = browser.get(away.headers["location"])
    assert 'name="next" value="/console/sessions?x=1"' in page.text
    secret = installation.link()["path"].partition("#")[2]
    back = browser.post("/console/enter/link", {"secret": secret, "next": "/console/sessions?x=1"})

    assert (back.status_code, back.headers["location"]) == (303, "/console/sessions?x=1")
    assert browser.inside


@pytest.mark.parametrize(
    "target",
    ["https://evil.example", "//evil.example", "/v1/models", "/console\\evil", "/consoles",
     "/console/enter"],
)  # fmt: skip
def test_visitor_is_never_sent_to_another_site(installation: Installation, target: str) -> None:
    browser = installation.browser()

    secret = installation.link()["path"].partition("#")[2]
    answer = browser.post("/console/enter/link", {"secret": secret, "next": target})

    assert answer.headers["location"] == "/console"


def test_link_is_used_once_and_its_replay_is_in_the_audit_log(installation: Installation) -> None:
    link = installation.link(name="once")

    assert installation.browser().enter(link).status_code == 303
    replay = installation.browser().enter(link)

    assert replay.status_code == 403
    assert REFUSED in replay.text
    refused = installation.events(act="session.refuse", subject=f"user {link['user_id']}")
    assert [event.reason for event in refused] == ["the link was used already"]


def test_code_of_a_link_can_be_typed_in_any_form(installation: Installation) -> None:
    link = installation.link(name="typing")

    typed = link["code"].lower().replace("-", " ").replace("0", "o").replace("1", "l")
    answer = installation.browser().post("/console/enter/code", {"secret": typed})

    assert answer.status_code == 303
    assert installation.browser().enter(link).status_code == 403


def test_wrong_codes_void_every_code_but_no_link(installation: Installation) -> None:
    first, second = installation.link(name="first"), installation.link(name="second")
    browser = installation.browser()

    for _ in range(WRONG_CODES_MAX):
        assert browser.post("/console/enter/code", {"secret": "0000-0000"}).status_code == 403

    assert browser.post("/console/enter/code", {"secret": first["code"]}).status_code == 403
    assert browser.enter(second).status_code == 303


def test_expired_link_and_disabled_user_are_refused(installation: Installation) -> None:
    late, gone = installation.link(name="late"), installation.link(name="gone")
    past = datetime.now(UTC) - timedelta(seconds=1)
    installation.execute(
        update(login_links).where(login_links.c.user_id == late["user_id"]).values(ends_at=past)
    )

    assert installation.browser().enter(late).status_code == 403
    with installation.database.transaction() as connection:
        change_user(connection, gone["user_id"], {"status": "disabled"})
    assert installation.browser().enter(gone).status_code == 403


@pytest.mark.parametrize(
    ("scopes", "role", "sees"),
    [
        (["inference", "read"], None, "member"),
        (["read"], None, "viewer"),
        (["inference", "read", "admin"], "finance", "finance"),
    ],
)
def test_key_enters_with_no_more_than_it_may_do_over_http(
    installation: Installation, scopes: list[str], role: str | None, sees: str
) -> None:
    secret, _ = installation.key(scopes=scopes, role=role)
    browser = installation.browser()

    assert browser.post("/console/enter/key", {"secret": secret}).status_code == 303

    assert sees in browser.get("/console/sessions").text or browser.inside
    assert secret not in str(browser.cookies)
    acme = installation.acme.id
    for path, form in (
        ("/console/keys/new?account=acme", {"name": "more", "read": "yes"}),
        (f"/console/members?account=id:{acme}", {"name": "Eve", "role": "owner"}),
        (f"/console/accounts/{acme}/access", {"hours": "8", "reason": "x"}),
    ):
        assert browser.post(path, form).status_code == 404, path


def test_key_that_is_revoked_expired_or_cannot_read_is_refused_alike(
    installation: Installation,
) -> None:
    now = datetime.now(UTC)
    revoked, revoked_key = installation.key()
    expired, expired_key = installation.key()
    blind, _ = installation.key(scopes=["inference"])
    installation.execute(update(keys).where(keys.c.id == revoked_key.id).values(revoked_at=now))
    installation.execute(update(keys).where(keys.c.id == expired_key.id).values(expires_at=now))

    answers = [
        installation.browser().post("/console/enter/key", {"secret": secret})
        for secret in (revoked, expired, blind, "tg_unknown", "")
    ]

    assert {answer.status_code for answer in answers} == {403}
    assert all(REFUSED in answer.text for answer in answers)
    # Neither the page nor the time tells why: each takes at least as long.
    assert len({re.sub(r'[0-9a-f]{64,}|nonce="[^"]*"', "", each.text) for each in answers}) == 1
    assert min(answer.elapsed.total_seconds() for answer in answers) >= FLOOR_S
    refused = installation.events(act="session.refuse", subject=f"key {revoked_key.id}")
    assert len(refused) == 1
    assert refused[0].account_id == installation.acme.id


def test_entering_by_key_can_be_turned_off(tmp_path: Path, postgres: str, valkey: str) -> None:
    url = Databases("sqlite", tmp_path, postgres).make()
    with installed(tmp_path / "home", url, valkey, console_key_login=False) as made:
        secret, _ = made.key()

        assert made.browser().post("/console/enter/key", {"secret": secret}).status_code == 404
        assert "API key" not in made.browser().get("/console/enter").text


def test_attempts_of_a_network_are_bounded_and_successes_are_not_counted(
    installation: Installation,
) -> None:
    browser = installation.browser()

    for _ in range(3):
        assert installation.browser().enter(installation.link()).status_code == 303
    for _ in range(NETWORK_MAX):
        assert browser.post("/console/enter/key", {"secret": "tg_x"}).status_code == 403
    waits = [browser.post("/console/enter/key", {"secret": "tg_x"}) for _ in range(7)]

    assert {answer.status_code for answer in waits} == {429}
    assert int(waits[0].headers["retry-after"]) <= 600
    assert int(waits[-1].headers["retry-after"]) == 900
    assert browser.enter(installation.link()).status_code == 429


async def test_attempts_are_counted_here_while_redis_is_away(
    installation: Installation,
) -> None:
    attempts = Attempts(connect("unix:///nonexistent"), namespace="x")

    for _ in range(NETWORK_MAX):
        await attempts.begin("192.0.2.1")
    with pytest.raises(TooManyRequests):
        await attempts.begin("192.0.2.1")
    await attempts.begin("192.0.2.2")
    for _ in range(FAILURES_MAX):
        await attempts.failed("link")
    with pytest.raises(TooManyRequests):
        await attempts.begin("192.0.2.3")


def test_leaving_ends_the_session_and_its_stolen_cookie_is_recorded_once(
    installation: Installation,
) -> None:
    link = installation.link(name="leaving")
    browser = installation.browser()
    browser.enter(link)
    stolen = Browser(installation.client)
    stolen.cookies = dict(browser.cookies)

    answer = browser.post("/console/leave")

    assert answer.headers["location"] == "/console/enter"
    assert answer.headers["clear-site-data"] == '"cache", "storage"'
    assert "tollgate" not in browser.cookies
    assert not stolen.inside
    assert not stolen.inside
    acts = [event.act for event in installation.events(subject=f"user {link['user_id']}")]
    assert acts[:3] == ["session.refuse", "session.end", "session.begin"]
    # Both are of the same millisecond, by which events are ordered.
    assert sorted(acts[3:]) == ["link.create", "user.create"]


def test_session_ends_when_idle_too_long_or_at_its_end(installation: Installation) -> None:
    now = datetime.now(UTC)
    rows = {
        "operator": {"seen_at": now - timedelta(minutes=31)},
        "auditor": {"ends_at": now},
        "viewer": {"seen_at": now - timedelta(minutes=31)},
    }
    inside = {}

    for role, values in rows.items():
        browser = installation.visitor(role)
        newest = installation.execute(select(func.max(sessions.c.id))).scalar_one()
        installation.execute(update(sessions).where(sessions.c.id == newest).values(**values))
        inside[role] = browser.inside

    assert inside == {"operator": False, "auditor": False, "viewer": True}


def test_cookie_is_out_of_reach_of_scripts_and_lasts_only_if_wanted(
    installation: Installation,
) -> None:
    secret, _ = installation.key()
    page = installation.browser()

    short = page.post("/console/enter/key", {"secret": secret})
    long = page.post("/console/enter/key", {"secret": secret, "lasting": "yes"})

    (cookie,) = short.headers.get_list("set-cookie")
    assert cookie.startswith("tollgate=")
    assert {"HttpOnly", "Path=/", "SameSite=lax"} <= set(cookie.split("; "))
    assert "Max-Age" not in cookie
    assert "Domain" not in cookie
    assert f"Max-Age={14 * 86_400}" in long.headers["set-cookie"]


def test_secrets_are_in_no_log_line(
    installation: Installation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret, _ = installation.key()
    link, browser = installation.link(), installation.browser()

    browser.post("/console/enter/key", {"secret": secret})
    browser.enter(link)
    browser.get("/console/sessions")
    browser.post("/console/enter/key", {"secret": "tg_" + "x" * 40})

    log = caplog.text + str(installation.events()) + generate_latest(REGISTRY).decode()
    for each in (secret, link["path"], link["code"], browser.cookies["tollgate"], "x" * 40):
        assert each not in log


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_names_of_this_machine_do_not_reach_the_console(
    installation: Installation, method: str
) -> None:
    browser = Browser(installation.client, "http://evil.example:8000")

    answer = (
        browser.get("/console/enter")
        if method == "GET"
        else browser.post("/console/enter/key", {"secret": "x"}, token="x")
    )

    assert answer.status_code == 421
    assert "TOLLGATE_PUBLIC_URL" in answer.text


def test_nobody_enters_without_tls_at_a_public_address(
    tmp_path: Path, postgres: str, valkey: str
) -> None:
    databases = Databases("sqlite", tmp_path, postgres)
    url = "http://gate.example"
    for insecure in (False, True):
        with installed(
            tmp_path / f"{insecure}",
            databases.make(),
            valkey,
            public_url=f"{url}/",
            console_insecure=insecure,
        ) as made:
            browser = Browser(made.client, url)
            page = browser.get("/console/enter").text

            assert ("TOLLGATE_CONSOLE_INSECURE" in page) is not insecure
            assert ("<form" in page) is insecure
            assert browser.post("/console/enter/key", token="x").status_code == 403
            if insecure:
                assert browser.enter(made.link()).status_code == 303


def test_cookie_of_a_public_address_needs_tls(tmp_path: Path, postgres: str, valkey: str) -> None:
    url = Databases("sqlite", tmp_path, postgres).make()
    with installed(tmp_path / "home", url, valkey, public_url="https://gate.example") as made:
        browser = Browser(made.client, "https://gate.example")
        answer = browser.enter(made.link())

        cookie = answer.headers.get_list("set-cookie")[-1]
        assert cookie.startswith("__Host-tollgate=")
        assert "Secure" in cookie.split("; ")
        assert browser.inside
        page = browser.get("/console/sessions")
        assert page.headers["strict-transport-security"] == "max-age=31536000"


def test_form_from_another_site_does_not_enter(installation: Installation) -> None:
    secret, _ = installation.key()
    browser = installation.browser()

    foreign = browser.post(
        "/console/enter/key", {"secret": secret}, headers={"Sec-Fetch-Site": "cross-site"}
    )
    tokenless = browser.post("/console/enter/key", {"secret": secret}, token="", headers=FORM)

    assert (foreign.status_code, tokenless.status_code) == (403, 403)
    assert "tollgate" not in browser.cookies


def test_console_can_be_turned_off(tmp_path: Path, postgres: str, valkey: str) -> None:
    url = Databases("sqlite", tmp_path, postgres).make()
    with installed(tmp_path / "home", url, valkey, console=False) as made:
        assert made.browser().get("/console/enter").status_code == 404

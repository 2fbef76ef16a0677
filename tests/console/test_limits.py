"""Rate limits and storage limits in the console: set, changed, removed, with their use."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.accounts.limits import list_limits
from gateway.ledger.transfers import add_credit
from gateway.pricing import parse_usd
from tests.console.seeding import HOSTILE, seeded_database
from tests.console.test_pages import text_of
from tests.console.visiting import Browser, Installation, installed
from tests.stack import PEPPER

PAGE = "/console/limits"


def words_of(browser: Browser, path: str = PAGE) -> str:
    return " ".join(text_of(browser.get(path).text).split())


def acts(installation: Installation, prefix: str) -> list[str]:
    return [each.act for each in installation.events() if each.act.startswith(prefix)]


@pytest.fixture
def key_id(installation: Installation) -> int:
    return installation.key(name="web")[1].id


def test_operator_sets_changes_and_removes_rate_limits(
    installation: Installation, key_id: int
) -> None:
    operator, owner = installation.visitor("operator"), installation.visitor("owner")
    of = f"{PAGE}?account=acme"
    sent = {"key": str(key_id), "model": "echo", "requests_per_minute": "600", "reason": "ticket 7"}
    made = operator.post(f"{PAGE}/rates?account=acme", sent)
    assert made.headers["location"].endswith("#rates")
    assert "0 of 600" in words_of(owner)
    changed = {**sent, "requests_per_minute": "", "concurrent": "3"}
    assert operator.post(f"{PAGE}/rates?account=acme", changed).status_code == 303
    assert "0 of 3" in words_of(owner)
    assert 'value="3"' in operator.get(f"{of}&key={key_id}&model=echo").text

    removal = f"{PAGE}/rates/remove?account=acme&key={key_id}&model=echo"
    assert "then unlimited" in words_of(operator, removal)
    assert operator.post(removal, {"reason": "no more"}).status_code == 303
    assert operator.get(removal).status_code == 404
    assert operator.post(removal).status_code == 404
    with installation.database.transaction() as connection:
        assert list_limits(connection, installation.acme.id) == []
    removed, replaced, first = installation.events(
        subject=f"account {installation.acme.id} key {key_id} model echo"
    )
    assert (first.before, first.reason) == (None, "ticket 7")
    assert replaced.before is not None
    assert replaced.after is not None
    assert (replaced.before["requests_per_minute"], replaced.after["concurrent"]) == (600, 3)
    assert (removed.act, removed.reason, removed.after) == ("limit.remove", "no more", None)


def test_mistakes_stay_at_their_form(installation: Installation) -> None:
    operator = installation.visitor("operator")
    for sent, said in (
        ({}, "a limit needs requests or tokens per minute"),
        ({"key": "999", "requests_per_minute": "5"}, "has no key 999"),
        ({"model": HOSTILE, "requests_per_minute": "5"}, "&lt;img src=x"),
        ({"requests_per_minute": "many"}, "is not a whole number"),
    ):
        answer = operator.post(f"{PAGE}/rates?account=acme", sent)
        assert answer.status_code in (400, 404)
        assert said.lower() in answer.text.lower()
        assert HOSTILE not in answer.text
    answer = operator.post(f"{PAGE}/storage?account=acme", {"bytes": "a lot"})
    assert (answer.status_code, 'id="problem-storage-bytes"' in answer.text) == (400, True)


def test_storage_limits_are_set_and_shown(installation: Installation) -> None:
    operator, viewer = installation.visitor("operator"), installation.visitor("viewer")
    sent = {"files": "12", "bytes": "5000000", "reason": "trial"}
    assert operator.post(f"{PAGE}/storage?account=acme", sent).status_code == 303
    assert "0 of 12" in words_of(viewer)
    assert "0 B of 5.00 MB" in words_of(viewer)
    event = installation.events(act="storage.set")[0]
    assert event.before is not None
    assert event.after is not None
    assert (event.after["files_max"], event.reason) == (12, "trial")
    assert event.before["files_max"] != 12


def test_only_operators_set_limits(installation: Installation) -> None:
    before = len(acts(installation, "limit.")) + len(acts(installation, "storage."))
    for role in ("finance", "auditor", "owner", "member", "viewer"):
        visitor = installation.visitor(role)
        assert "/console/limits/rates" not in visitor.get(f"{PAGE}?account=acme").text
        for path in ("rates", "storage", "rates/remove"):
            sent = {"requests_per_minute": "1", "files": "1"}
            assert visitor.post(f"{PAGE}/{path}?account=acme", sent).status_code == 404
    assert len(acts(installation, "limit.")) + len(acts(installation, "storage.")) == before


def test_use_is_unknown_while_the_queue_server_is_away(tmp_path: Path, postgres: str) -> None:
    url, _ = seeded_database(tmp_path, postgres, requests=4)
    with installed(tmp_path / "home", url, "unix:///nonexistent") as made:
        operator = made.visitor("operator")
        sent = {"requests_per_minute": "5", "concurrent": "4", "cancelled_seconds_per_hour": "9"}
        assert operator.post(f"{PAGE}/rates?account=atlas", sent).status_code == 303
        page = words_of(operator, f"{PAGE}?account=atlas")
        assert "use unknown of 5" in page
        assert "use unknown of 9" in page
        assert "2 of 4" in page  # holds are in SQL
        assert "does not answer" in page


def test_use_counts_the_last_minute(installation: Installation) -> None:
    with installation.database.transaction() as connection:
        busy = create_account(connection, f"busy{HOSTILE}")
        secret, _ = create_key(connection, busy.id, pepper=PEPPER.encode())
        add_credit(connection, busy.id, parse_usd("1"), kind="topup", key="topup:busy",
                   actor="test", reason="test")  # fmt: skip
    operator, of = installation.visitor("operator"), f"?account=id:{busy.id}"
    sent = {"requests_per_minute": "1", "tokens_per_minute": "5000"}
    assert operator.post(f"{PAGE}/rates{of}", sent).status_code == 303
    assert "0 of 1" in words_of(operator, PAGE + of)

    body = {"model": "echo", "task": "text-generation", "input": {"prompt": "one two"}}
    headers = {"Authorization": f"Bearer {secret}"}
    answer = installation.client.post("/v1/requests", json=body, headers=headers)
    assert answer.status_code in (200, 202), answer.text

    page = words_of(operator, PAGE + of)
    assert "1 rate limit of busy" in page
    assert "1 of 1" in page
    assert HOSTILE not in operator.get(PAGE + of).text

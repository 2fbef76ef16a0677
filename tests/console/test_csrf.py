"""Forged forms change nothing and are recorded; recent proofs; what follows a change of roles."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from gateway.accounts.users import change_user, remove_member
from gateway.console.guards import REFUSALS_PER_MINUTE
from gateway.console.roles import MAY
from gateway.tables.audit import audit_events
from gateway.tables.core import accounts, keys
from gateway.tables.users import sessions
from tests.console.routes import ConsoleRoute, console_routes
from tests.console.test_audit_walk import differing, stored
from tests.console.visiting import FORM, Installation

FORGERIES: dict[str, dict[str, Any]] = {
    "no token": {"token": ""},
    "wrong token": {"token": "0" * 64},
    "another site": {"headers": {"Sec-Fetch-Site": "cross-site"}},
    "another origin": {"headers": {"Origin": "https://evil.example"}},
    "neither": {"headers": {}},
}
CHANGING = {
    *("users", "members", "sessions", "login_links"),
    *("periods", "reconciliations", "proven_accounts", "proven_keys"),
}
"""Tables with the visitors of the tests, and with what a gateway writes after its start."""


@pytest.mark.parametrize("forgery", [*FORGERIES, "another session's"])
def test_forged_forms_change_nothing_and_are_recorded(
    installation: Installation, forgery: str
) -> None:
    routes = [
        route
        for route in console_routes(installation.client.app)
        if route.method != "GET" and route.act is not None
    ]
    assert routes
    rows = stored(installation)
    for role in ("operator", "owner"):
        sent = FORGERIES.get(forgery) or {"token": installation.visitor(role).token()}
        mine = [route for route in routes if role in MAY[route.act or "own.write"]]
        before = refusals(installation)

        # A session's refusals are recorded up to a number, so each session forges that many.
        for some in _batches(mine, REFUSALS_PER_MINUTE):
            browser = installation.visitor(role)
            token = browser.token()
            for route in some:
                answer = browser.post(
                    route.at(installation.acme.id), **{"token": token, "headers": FORM, **sent}
                )
                assert answer.status_code == 403, route
            assert browser.inside

        assert refusals(installation) == before + len(mine)
    assert set(differing(rows, stored(installation))) <= CHANGING


@pytest.mark.parametrize("role", ["viewer", "auditor"])
def test_forms_of_a_wrong_role_change_nothing_and_are_recorded(
    installation: Installation, role: str
) -> None:
    routes = [
        route
        for route in console_routes(installation.client.app)
        if route.method != "GET" and route.act is not None and role not in MAY[route.act]
    ]
    assert routes
    before, rows = refusals(installation), stored(installation)

    for some in _batches(routes, REFUSALS_PER_MINUTE):
        browser = installation.visitor(role)
        token = browser.token()
        for route in some:
            answer = browser.post(route.at(installation.acme.id), token=token)
            assert answer.status_code == 404, route

    assert refusals(installation) == before + len(routes)
    assert set(differing(rows, stored(installation))) <= CHANGING
    newest = installation.events(act="session.refuse")[0]
    assert newest.reason.endswith("is not allowed")
    assert f"<code>{newest.call_id}</code> identifies this call" in answer.text


def _batches(routes: list[ConsoleRoute], size: int) -> Iterator[list[ConsoleRoute]]:
    for start in range(0, len(routes), size):
        yield routes[start : start + size]


def test_form_at_a_foreign_host_changes_nothing(installation: Installation) -> None:
    routes = [each for each in console_routes(installation.client.app) if each.method != "GET"]
    browser = installation.visitor("operator")
    token = browser.token()

    rows = stored(installation)

    for route in routes:
        headers = {**FORM, "Host": "evil.example"}
        answer = browser.post(route.at(installation.acme.id), token=token, headers=headers)
        assert answer.status_code == 421, route
    assert set(differing(rows, stored(installation))) <= CHANGING


def test_token_of_forms_has_another_mask_on_each_page(installation: Installation) -> None:
    browser = installation.visitor("owner")
    first, second = browser.token(), browser.token()

    assert first != second
    assert len(first) == len(second) == 128
    for token in (first, second):
        answer = browser.post("/console/preferences", {"theme": "dark"}, token=token)
        assert answer.status_code == 303
    mask, rest = first[:64], second[64:]
    for wrong in (
        mask + rest,
        first[:-1] + ("0" if first[-1] != "0" else "1"),
        "z" * 128,
        "ab " * 42 + "ab",
    ):
        answer = browser.post("/console/preferences", {"theme": "dark"}, token=wrong)
        assert answer.status_code == 403


def refusals(installation: Installation) -> int:
    query = select(func.count()).where(audit_events.c.act == "session.refuse")
    number: int = installation.execute(query).scalar_one()
    return number


def test_refusals_of_one_session_fill_no_log(installation: Installation) -> None:
    browser = installation.visitor("viewer")
    before = refusals(installation)

    for _ in range(REFUSALS_PER_MINUTE + 5):
        assert browser.post("/console/leave", token="").status_code == 403

    assert refusals(installation) == before + REFUSALS_PER_MINUTE


def newest(installation: Installation) -> Any:
    query = select(sessions).order_by(sessions.c.id.desc()).limit(1)
    return installation.execute(query).one()


def test_every_loss_of_rights_ends_the_session_at_once(installation: Installation) -> None:
    now = datetime.now(UTC)

    disabled = installation.visitor("operator")
    with installation.database.transaction() as connection:
        user_id = connection.execute(select(func.max(sessions.c.user_id))).scalar_one()
        change_user(connection, user_id, {"status": "disabled"})
    assert not disabled.inside

    changed = installation.visitor("operator")
    with installation.database.transaction() as connection:
        user_id = connection.execute(select(func.max(sessions.c.user_id))).scalar_one()
        change_user(connection, user_id, {"role": "auditor"})
    assert not changed.inside

    removed = installation.visitor("owner")
    with installation.database.transaction() as connection:
        user_id = connection.execute(select(func.max(sessions.c.user_id))).scalar_one()
        remove_member(connection, user_id, installation.acme.id)
    assert not removed.inside

    for values in ({"revoked_at": now}, {"expires_at": now}):
        secret, key = installation.key()
        browser = installation.browser()
        browser.post("/console/enter/key", {"secret": secret})
        assert browser.inside
        installation.execute(update(keys).where(keys.c.id == key.id).values(**values))
        assert not browser.inside

    suspended = installation.visitor("owner", account="other")
    own = update(accounts).where(accounts.c.id == installation.other.id)
    installation.execute(own.values(status="suspended"))
    assert not suspended.inside
    installation.execute(own.values(status="active"))
    assert suspended.inside


def test_own_sessions_are_listed_and_ended(installation: Installation) -> None:
    secret, _ = installation.key()
    first, second, third = (installation.browser() for _ in range(3))
    for browser in (first, second, third):
        browser.post("/console/enter/key", {"secret": secret})
    id = newest(installation).id
    stranger = installation.visitor("owner")

    assert first.get("/console/sessions").text.count('/end"') == 2
    assert stranger.post(f"/console/sessions/{id}/end").status_code == 404
    assert third.inside
    assert first.post(f"/console/sessions/{id}/end").status_code == 303
    assert not third.inside
    assert first.post("/console/sessions/end-others").status_code == 303
    assert not second.inside
    assert first.inside


def test_what_is_looked_at_is_kept_for_the_next_session(installation: Installation) -> None:
    link = installation.link(role="operator", name="chooser")
    browser = installation.browser()
    browser.enter(link)

    chosen = browser.post(
        "/console/preferences",
        {"account": "other", "zone": "Asia/Kolkata", "theme": "dark", "next": "/console/sessions"},
    )

    assert chosen.headers["location"] == "/console/sessions"
    browser.enter(installation.link(role="operator", name="chooser"))
    row = newest(installation)
    assert (row.account_id, row.zone, row.theme) == (
        installation.other.id, "Asia/Kolkata", "dark",
    )  # fmt: skip
    for wrong in ({"zone": "Mars"}, {"theme": "pink"}):
        assert browser.post("/console/preferences", wrong).status_code == 400
    member = installation.visitor("member")
    assert member.post("/console/preferences", {"account": "other"}).status_code == 404
    assert member.post("/console/preferences", {"account": "nobody"}).status_code == 404


def test_proof_gives_a_new_cookie_and_needs_the_same_person(installation: Installation) -> None:
    link = installation.link(role="operator", name="prover")
    browser = installation.browser()
    browser.enter(link)
    old = browser.cookies["tollgate"]
    before = newest(installation)
    installation.execute(
        update(sessions)
        .where(sessions.c.id == before.id)
        .values(proved_at=datetime.now(UTC) - timedelta(hours=1))
    )

    other = installation.link(role="operator", name="another")
    refused = browser.post("/console/prove", {"secret": other["code"]})
    again = installation.link(role="operator", name="prover")
    proved = browser.post("/console/prove", {"secret": again["code"], "next": "/console/sessions"})

    assert refused.status_code == 403
    assert (proved.status_code, proved.headers["location"]) == (303, "/console/sessions")
    assert browser.cookies["tollgate"] != old
    assert browser.inside
    row = newest(installation)
    assert row.id == before.id
    assert row.proved_at > before.proved_at
    thief = installation.browser()
    thief.cookies["tollgate"] = old
    assert not thief.inside

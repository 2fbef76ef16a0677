"""Users, members and their sessions: pages that change who may do what."""

from __future__ import annotations

import re
import time
import uuid

import pytest
from sqlalchemy import func, select

from gateway.accounts.users import Member, create_user, find_user, list_members
from gateway.tables.users import sessions
from tests.console.visiting import Browser, Installation

SECRET = re.compile(r"/console/enter#([\w-]+)")


@pytest.fixture(autouse=True)
def _new_network(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = installation.client.app.state.services.attempts
    monkeypatch.setattr(attempts, "_namespace", f"{attempts._namespace}-{id(monkeypatch)}")


def members(installation: Installation) -> dict[str, Member]:
    with installation.database.transaction() as connection:
        found = list_members(connection, account_id=installation.acme.id)
    return {each.user.name: each for each in found}


def name() -> str:
    return f"person {uuid.uuid4().hex[:8]}"


def enter(installation: Installation, page: str) -> Browser:
    found = SECRET.search(page)
    assert found is not None
    browser = installation.browser()
    browser.post("/console/enter/link", {"secret": found[1]})
    return browser


def test_owner_invites_changes_and_removes_a_member(installation: Installation) -> None:
    owner, ann = installation.visitor("owner"), name()

    invited = owner.post("/console/members", {"name": ann, "role": "viewer"})
    assert invited.status_code == 201
    assert invited.headers["cache-control"] == "no-store"
    made = members(installation)[ann]
    assert "invited" in owner.get("/console/members").text
    again = owner.post(f"/console/members/{made.user.id}", {"act": "link"})
    browser = enter(installation, again.text)
    assert browser.inside
    assert owner.post(f"/console/members/{made.user.id}", {"act": "link"}).status_code == 409
    changed = owner.post(f"/console/members/{made.user.id}", {"role": "member"})
    assert changed.status_code == 303
    assert members(installation)[ann].role == "member"
    owner.post(f"/console/members/{made.user.id}", {"act": "remove"})

    assert ann not in members(installation)
    assert not browser.inside
    acts = [event.act for event in installation.events(subject=f"user {made.user.id}")]
    assert acts.count("member.set") == 2
    assert acts.count("member.remove") == 1
    assert acts.count("link.create") == 2


def test_owner_gets_no_link_for_a_user_that_exists(installation: Installation) -> None:
    owner, email = installation.visitor("owner"), f"{uuid.uuid4().hex[:8]}@example.com"
    with installation.database.transaction() as connection:
        operator = create_user(connection, name(), email=email, role="operator")

    answer = owner.post("/console/members", {"name": "x", "email": email, "role": "member"})

    assert answer.status_code == 303
    assert operator.name in members(installation)
    assert owner.post(f"/console/members/{operator.id}", {"act": "link"}).status_code == 409
    twice = owner.post("/console/members", {"name": "x", "email": email})
    assert twice.status_code == 409
    assert "is a member already" in twice.text


def test_last_owner_stays_unless_an_operator_decides(installation: Installation) -> None:
    owner = installation.visitor("owner", account="other")
    operator = installation.visitor("operator")
    with installation.database.transaction() as connection:
        (only,) = list_members(connection, account_id=installation.other.id)
    path = f"/console/members/{only.user.id}"

    for form in ({"role": "member"}, {"act": "remove"}):
        refused = owner.post(path, form)
        assert refused.status_code == 409
        assert "is the last owner" in refused.text
    of_other = f"{path}?account=id:{installation.other.id}"

    assert operator.post(of_other, {"act": "remove"}).status_code == 303
    assert not owner.inside


def test_members_of_another_account_do_not_exist(installation: Installation) -> None:
    owner, stranger = installation.visitor("owner"), installation.visitor("owner", account="other")
    owner.post("/console/members", {"name": name()})
    ann = next(iter(members(installation).values())).user.id

    for path in (f"/console/members/{ann}", f"/console/members/{ann}?account=acme"):
        assert stranger.post(path, {"act": "remove"}).status_code == 404
    assert stranger.get("/console/members?account=acme").status_code == 404
    assert any(each.user.id == ann for each in members(installation).values())


def test_operator_creates_and_changes_users(installation: Installation) -> None:
    operator, ann = installation.visitor("operator"), name()

    made = operator.post("/console/users", {"name": ann, "role": "finance"})
    path = made.headers["location"]
    link = operator.post(f"{path}/link")
    browser = enter(installation, link.text)
    assert "finance" in operator.get(path).text
    assert operator.get("/console/users/sessions").status_code == 200
    changed = operator.post(path, {"name": ann, "role": "auditor", "status": "active"})
    wrong = operator.post("/console/users", {"name": "x", "email": "nowhere"})

    assert changed.status_code == 303
    assert not browser.inside
    with installation.database.transaction() as connection:
        assert find_user(connection, path.rpartition("/")[2]).role == "auditor"
    assert wrong.status_code == 400
    assert "not a valid email" in wrong.text


def test_operator_ends_sessions_of_others(installation: Installation) -> None:
    operator, first = installation.visitor("operator"), installation.visitor("viewer")
    row = installation.execute(select(sessions).order_by(sessions.c.id.desc()).limit(1)).one()
    second = installation.visitor("member")
    user_id = installation.execute(select(func.max(sessions.c.user_id))).scalar_one()

    operator.post(f"/console/users/sessions/{row.id}/end")
    operator.post(f"/console/users/{user_id}/end-sessions")

    assert not first.inside
    assert not second.inside
    ended = installation.events(act="session.end", subject=f"user {row.user_id}")
    assert len(ended) == 1


def test_form_waits_for_a_proof_and_is_shown_once_more(installation: Installation) -> None:
    prover = f"prover {uuid.uuid4().hex[:8]}"
    operator, ann = installation.browser(), name()
    operator.enter(installation.link(role="operator", name=prover))
    installation.forget_last_proof()

    away = operator.post("/console/users", {"name": ann, "role": "auditor"})
    assert (away.status_code, away.headers["location"]) == (303, "/console/prove")
    code = installation.link(role="operator", name=prover)["code"]
    proved = operator.post("/console/prove", {"secret": code})
    assert proved.headers["location"] == "/console/prove/again"
    page = operator.get("/console/prove/again").text
    assert 'action="/console/users"' in page
    fields = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page))
    assert (fields["name"], fields["role"]) == (ann, "auditor")
    sent = operator.post("/console/users", fields, token=fields["csrf"])

    assert sent.headers["location"].startswith("/console/users/")
    assert operator.get("/console/prove/again").headers["location"] == "/console"


@pytest.mark.parametrize("role", ["owner", "operator"])
def test_invitations_and_roles_of_members_wait_for_a_proof(
    installation: Installation, role: str
) -> None:
    visitor = installation.visitor(role)
    installation.forget_last_proof()
    path = f"/console/members?account=id:{installation.acme.id}"
    invited = name()

    away = visitor.post(path, {"name": invited, "role": "owner"})
    changed = visitor.post(
        f"/console/members/1?account=id:{installation.acme.id}", {"act": "remove"}
    )

    assert (away.status_code, away.headers["location"]) == (303, "/console/prove")
    assert (changed.status_code, changed.headers["location"]) == (303, "/console/prove")
    assert "console/enter#" not in visitor.get("/console/prove").text
    assert invited not in visitor.get(path).text


def test_much_credit_waits_for_a_proof_and_little_does_not(installation: Installation) -> None:
    operator, holder = installation.browser(), name().replace(" ", "-")
    operator.enter(installation.link(role="operator", name=f"giver {uuid.uuid4().hex[:8]}"))
    opened = operator.post("/console/accounts/new", {"name": holder})
    account_id = int(opened.headers["location"].rpartition("/")[2])
    installation.forget_last_proof()
    path = f"/console/credit/new?account={holder}"
    form = {"kind": "topup", "reason": "paid"}

    little = operator.post(path, {**form, "amount": "10", "reference": f"{holder} 1"})
    much = operator.post(path, {**form, "amount": "10.01", "reference": f"{holder} 2"})

    assert little.headers["location"].startswith("/console/ledger")
    assert (much.status_code, much.headers["location"]) == (303, "/console/prove")
    assert len(installation.events(act="credit.add", account_id=account_id)) == 1


def test_operators_see_failed_logins_and_reports_of_the_last_hour(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = installation.visitor("operator")
    stranger = installation.browser()
    shown = re.compile(r"Failed logins, 1 h</dt><dd><a[^>]*>(\d+)</a>")
    before = int(shown.findall(operator.get("/console").text)[0])

    for _ in range(2):
        assert stranger.post("/console/enter/code", {"secret": "0000-0000"}).status_code == 403
    report = {"csp-report": {"effective-directive": "img-src"}}
    installation.client.post("/console/csp", json=report).raise_for_status()

    page = operator.get("/console").text
    assert int(shown.findall(page)[0]) == before + 2
    assert "browsers blocked: img-src" in page
    now = time.time
    monkeypatch.setattr("gateway.accounts.attempts.time.time", lambda: now() + 3700)
    assert shown.findall(operator.get("/console").text) == ["0"]

"""Keys of administrators in the console: created by operators, with a role, after a proof."""

from __future__ import annotations

import re

from gateway.accounts.keys import KeyFilter, list_keys
from tests.console.visiting import Browser, Installation

NEW = "/console/keys/new?account=acme"
SECRET = re.compile(r"tga_\w+")


def admin_keys(installation: Installation) -> list[str | None]:
    with installation.database.transaction() as connection:
        return [each.role for each in list_keys(connection, KeyFilter()) if "admin" in each.scopes]


def test_operator_creates_a_key_with_a_role_after_a_proof(installation: Installation) -> None:
    sent = {"name": "books", "read": "yes", "admin": "yes", "role": "finance"}
    operator = installation.visitor("operator")
    assert 'name="admin"' in operator.get(NEW).text
    installation.forget_last_proof()
    asked = operator.post(NEW, sent)
    assert asked.headers["location"].startswith("/console/prove")
    assert admin_keys(installation) == []

    operator = installation.visitor("operator")
    made = operator.post(NEW, sent)
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    assert admin_keys(installation) == ["finance"]
    (event,) = installation.events(act="key.create")
    assert event.after is not None
    assert (event.after["role"], event.after["scopes"]) == ("finance", ["admin", "read"])
    assert event.actor.startswith("user ")
    assert operator.post(NEW, {**sent, "role": "emperor"}).status_code == 400


def test_nobody_else_creates_them(installation: Installation) -> None:
    def tries(browser: Browser) -> int:
        return browser.post(NEW, {"name": "x", "read": "yes", "admin": "yes"}).status_code

    before = admin_keys(installation)
    for role in ("finance", "auditor", "owner", "member", "viewer"):
        browser = installation.visitor(role)
        assert tries(browser) == 404
        assert 'name="admin"' not in browser.get(NEW).text
    secret, _ = installation.key(scopes=["inference", "read", "admin"], role="finance")
    browser = installation.browser()
    browser.post("/console/enter/key", {"secret": secret})
    assert tries(browser) == 404
    assert len(admin_keys(installation)) == len(before) + 1

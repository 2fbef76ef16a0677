"""Every route of the console, for every role, in the own and in another account."""

from __future__ import annotations

import re

import pytest
from litestar.routes import HTTPRoute

from gateway.accounts.roles import MEMBER_ROLES, ROLES
from gateway.api.front import is_console
from gateway.console.roles import MAY
from tests.console.routes import ConsoleRoute, console_routes
from tests.console.visiting import CALLERS, Installation

NO_PAGE = "This page does not exist."


def test_roles_have_the_rights_of_the_specification() -> None:
    def who(act: str) -> str:
        letters = dict(zip((*ROLES, *MEMBER_ROLES), "OFAWMV", strict=True))
        return "".join(letters[each] for each in (*ROLES, *MEMBER_ROLES) if each in MAY[act])  # type: ignore[index]

    assert {act: who(act) for act in MAY} == {
        "own.write": "OFAWMV",
        "installation.read": "OFA", "installation.write": "O",
        "requests.read": "OFAWMV", "requests.write": "WM", "contents.read": "WMV",
        "access.read": "OAWMV", "access.write": "W", "access.ask": "O",
        "credit.read": "OFAWMV", "credit.write": "OF",
        "prices.read": "OFAWMV", "prices.write": "OF", "margins.read": "OFA",
        "catalog.read": "OFAWMV", "catalog.write": "O",
        "catalog_file.read": "OFA",
        "accounts.read": "OFAWMV", "accounts.write": "O", "terms.write": "OF",
        "organisations.read": "OFA", "organisations.write": "O", "organisation_budgets.write": "OF",
        "keys.read": "OAWMV", "keys.write": "OW", "admin_keys.write": "O",
        "users.read": "OA", "users.write": "O", "members.read": "OAW", "members.write": "OW",
        "budgets.read": "OFAWMV", "budgets.write": "OFW",
        "limits.read": "OFAWMV", "limits.write": "O",
        "play.read": "WMV", "play.write": "WM",
        "files.read": "WMV", "files.write": "WM", "files.delete": "W",
        "batches.read": "WMV", "batches.write": "WM", "voices.read": "WMV", "voices.write": "W",
        "payments.read": "OFAW", "payments.write": "W",
        "ledger.read": "OFAWMV", "ledger.write": "OF", "usage.read": "OFAWMV",
        "periods.read": "OFAWMV", "periods.write": "OF",
        "webhooks.read": "OAWMV", "webhooks.write": "OW",
        "notices.read": "OFAWMV", "notices.write": "OFW",
        "set_aside.read": "OFA", "set_aside.write": "O",
        "erasures.read": "OA", "erasures.write": "O", "retention.write": "O",
        "audit.read": "OFAW", "settings.read": "OA",
    }  # fmt: skip


@pytest.mark.parametrize("role", CALLERS)
def test_every_route_is_for_the_roles_of_the_table(
    installation: Installation, role: str | None
) -> None:
    browser = installation.visitor(role)
    token = browser.token()
    wrong = []

    for route in console_routes(installation.client.app):
        if route.act is None:
            continue
        for account in (installation.acme, installation.other):
            own = account is installation.acme or not route.about_account
            allowed = role in ROLES and role in MAY[route.act]
            allowed |= role in MEMBER_ROLES and own and role in MAY[route.act]
            if route.method == "GET":
                answer = browser.get(route.at(account.id))
            elif not allowed:
                answer = browser.post(route.at(account.id), token=token)
            else:
                continue
            if role is None:
                right = answer.status_code == 303 and "/console/enter" in answer.headers["location"]
            else:
                refused = answer.status_code == 404 and NO_PAGE in answer.text
                right = refused is not allowed and answer.status_code < 500
            if not right:
                wrong.append((route.method, route.at(account.id), answer.status_code))

    assert wrong == []


def test_routes_without_a_declared_act_are_the_known_ones(installation: Installation) -> None:
    routes = console_routes(installation.client.app)
    is_open = {(route.method, route.path) for route in routes if route.act is None}

    assert {path for _, path in is_open if not path.startswith("/console/enter")} == {
        "/console/csp", "/console/assets/{digest}/{name}", "/console/{rest}",
    }  # fmt: skip


def test_what_does_not_exist_looks_like_what_is_not_allowed(installation: Installation) -> None:
    viewer = installation.visitor("viewer")
    refused = [
        route.at(installation.other.id)
        for route in _gets(installation)
        if route.about_account or "viewer" not in MAY[route.act or "own.write"]
    ]
    unknown = _plain(viewer.get("/console/no/such/page").text, "/console/no/such/page")

    for path in refused:
        assert _plain(viewer.get(path).text, path) == unknown, path


def _gets(installation: Installation) -> list[ConsoleRoute]:
    routes = console_routes(installation.client.app)
    return [route for route in routes if route.method == "GET" and route.act]


def _plain(text: str, path: str) -> str:
    """Return a page without what differs with each answer: nonces, tokens, its path and ids."""
    return re.sub(r'nonce="[^"]*"|call_\w+|req_\w+|[0-9a-f]{128}', "", text.replace(path, ""))


def test_cookie_opens_no_route_of_the_api_and_a_key_no_page(installation: Installation) -> None:
    browser = installation.visitor("operator")
    secret, _ = installation.key(scopes=["inference", "read", "admin"])
    seen = 0

    for route in installation.client.app.routes:
        if isinstance(route, HTTPRoute) and not is_console(route.path):
            for handler in route.route_handlers:
                methods = handler.http_methods - {"OPTIONS", "HEAD"}
                if handler.opt.get("scope") is None or not methods:
                    continue
                path = re.sub(r"\{[^}]*\}", "1", route.path_format)
                method = str(next(iter(methods)))
                answer = browser.send(method, path, {"Sec-Fetch-Site": "same-origin"})
                assert answer.status_code == 401, f"{method} {path}"
                seen += 1
    assert seen > 100

    stranger, key = installation.browser(), {"Authorization": f"Bearer {secret}"}
    for each in console_routes(installation.client.app):
        if each.act is None:
            continue
        path = each.at(installation.acme.id)
        answer = stranger.send(each.method, path, {**key, "Sec-Fetch-Site": "same-origin"})
        assert answer.status_code == 303, path
        assert answer.headers["location"].startswith("/console/enter"), path


def test_every_answer_has_the_headers(installation: Installation) -> None:
    browser = installation.browser()
    for path in ("/console", "/console/enter", "/console/no", "/console/csp"):
        headers = browser.get(path).headers
        policy = re.sub(r"'nonce-[\w-]{22}'", "'nonce-{n}'", headers["content-security-policy"])
        assert policy == (
            "default-src 'none'; script-src 'self' 'nonce-{n}'; style-src 'self'; "
            "img-src 'self' data: blob:; media-src 'self' blob:; connect-src 'self'; "
            "font-src 'self'; worker-src 'self'; form-action 'self'; base-uri 'none'; "
            "frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'; "
            "trusted-types htmx; report-uri /console/csp"
        )
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "microphone=()" in headers["permissions-policy"]
        assert "strict-transport-security" not in headers
    assert browser.get("/console/enter").headers["cache-control"] == "no-store"
    assert "content-security-policy" not in browser.get("/health/live").headers

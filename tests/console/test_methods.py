"""Calls that fit no route of the console: the answer is a page, which says what is accepted."""

from __future__ import annotations

import pytest

from tests.console.routes import console_routes
from tests.console.visiting import FORM, Browser, Installation

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def test_wrong_method_is_answered_by_a_page_with_what_is_allowed(
    installation: Installation,
) -> None:
    browser, routes = installation.visitor("operator"), console_routes(installation.client.app)
    allowed: dict[str, set[str]] = {}
    for route in routes:
        allowed.setdefault(route.path, set()).add(route.method)
    for path in allowed:
        sent = next(route for route in routes if route.path == path).at(installation.acme.id)
        # Any address can be asked for: what does not exist is a page, too.
        for method in sorted(set(METHODS) - allowed[path] - {"GET"}):
            answer = browser.send(method, sent, FORM)

            assert answer.status_code == 405, (method, path)
            assert answer.headers["content-type"].startswith("text/html"), path
            assert allowed[path] <= set(answer.headers["allow"].split(", ")), path
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert f"does not take {method}" in answer.text


def test_get_of_a_form_is_a_page(installation: Installation) -> None:
    for browser in (installation.browser(), installation.visitor("operator")):
        answer = browser.get("/console/leave")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "OPTIONS, POST"
        assert "<h1>This page does not work that way</h1>" in answer.text


@pytest.mark.parametrize("path", ["/console/accounts/none", "/console/keys/1/x/y"])
def test_address_that_fits_no_route_is_a_page(installation: Installation, path: str) -> None:
    answer = installation.visitor("operator").get(path)

    assert answer.status_code == 404
    assert "<h1>This page does not exist</h1>" in answer.text


@pytest.mark.parametrize("path", ["/console/leave", "/console/accounts/none"])
def test_page_of_no_route_is_as_the_visitor_chose(installation: Installation, path: str) -> None:
    browser = installation.visitor("operator")
    chosen = {"theme": "dark", "zone": "Asia/Tokyo"}
    assert browser.post("/console/preferences", chosen).status_code == 303

    pages = [installation.browser().get(path).text, browser.get(path).text]

    for page, is_known in zip(pages, (False, True), strict=True):
        assert ('data-theme="dark"' in page) is is_known
        assert ('data-zone="Asia/Tokyo"' in page) is is_known
        assert ('href="/console/requests"' in page) is is_known


def test_part_of_a_page_gets_the_failure_as_a_part(installation: Installation) -> None:
    browser: Browser = installation.visitor("operator")

    answer = browser.send("DELETE", "/console/keys", {**FORM, "HX-Request": "true"})

    assert (answer.status_code, answer.headers["hx-reselect"]) == (405, ".part-failed")


def test_api_keeps_its_own_answers(installation: Installation) -> None:
    answer = installation.browser().send("DELETE", "/v1/models", {})

    assert answer.status_code in (401, 405)
    assert answer.json()["error"]["code"]

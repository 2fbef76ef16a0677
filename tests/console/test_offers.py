"""What pages offer: no link and no form that its visitor is refused, by crawling them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urljoin, urlsplit

import pytest
from sqlalchemy import delete

from gateway.console.navigation import PLACES
from gateway.console.roles import MAY
from gateway.tables.core import accounts
from tests.console.routes import ConsoleRoute, console_routes
from tests.console.seeding import Seeded, seeded_database
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases

PAGES_MAX = 1500


class Offers(HTMLParser):
    """Links and forms of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.forms: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "form" and "action" in found:
            self.forms.append((found.get("method", "get").upper(), found["action"]))


class Routes:
    """Finds the route that answers a path."""

    def __init__(self, installation: Installation) -> None:
        routes = [each for each in console_routes(installation.client.app) if each.act]
        # A named part is more specific than a parameter.
        self._patterns = [
            (re.compile(re.sub(r"\{[^}]*\}", "[^/]+", each.path) + "/?$"), each)
            for each in sorted(routes, key=lambda each: each.path.count("{"))
        ]

    def find(self, method: str, path: str) -> ConsoleRoute | None:
        return next(
            (each for pattern, each in self._patterns
             if each.method == method and pattern.match(path)), None,
        )  # fmt: skip


class Offer(NamedTuple):
    """What a page offers; ``status``: the answer to a link, 0 for a form, which is not sent."""

    page: str
    method: str
    target: str
    status: int = 0

    def __str__(self) -> str:
        return f"{self.page}: {self.method} {self.target} {self.status or ''}"


def crawl(browser: Browser, starts: list[str], routes: Routes) -> Iterator[Offer]:
    """Yield everything that is offered. Pages are followed once per kind: by their route and the
    names of their filters."""
    seen: set[tuple[str, ...]] = set()
    waiting = [("", start) for start in starts]
    while waiting:
        page, link = waiting.pop()
        path, query = urlsplit(link).path, urlsplit(link).query
        route = routes.find("GET", path)
        name = route.path if route else path
        kind = (name, *sorted(name for name, _ in parse_qsl(query)))
        if kind in seen:
            continue
        seen.add(kind)
        assert len(seen) < PAGES_MAX
        answer = browser.get(link)
        yield Offer(page, "GET", link, answer.status_code)
        if "text/html" not in answer.headers.get("content-type", ""):
            continue
        offers = Offers(answer.text)
        for href in offers.links:
            target = urljoin(link, href.partition("#")[0])
            if target.startswith("/console"):
                waiting.append((link, target))
        for method, action in offers.forms:
            yield Offer(link, method, urljoin(link, action))


def refused(browser: Browser, role: str, starts: list[str], routes: Routes) -> str:
    """Return what is offered and refused, with its page, by lines."""
    wrong = []
    for offer in crawl(browser, starts, routes):
        if offer.status:
            # 503: a busy machine took too long to read.
            right = offer.status < 400 or offer.status == 503
        else:
            route = routes.find(offer.method, urlsplit(offer.target).path)
            right = route is not None and route.act is not None and role in MAY[route.act]
        if not right:
            wrong.append(str(offer))
    return "\n".join(wrong)


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    directory = tmp_path_factory.mktemp("offers")
    url, seeded = seeded_database(directory, postgres)
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


def starts_of(seeded: Seeded) -> list[str]:
    """Return pages of which some are linked only from those that a role may not see."""
    mine, key = seeded.requests["atlas"], seeded.keys["web"].id
    return [
        *(f"/console/requests/{each}" for each in (mine[0], mine[-3], mine[-1])),
        f"/console/keys/{key}",
        f"/console/accounts/{seeded.accounts['atlas'].id}",
    ]


def of_navigation(browser: Browser) -> list[str]:
    known = {place.path for _, places in PLACES for place in places}
    return [each for each in Offers(browser.get("/console/about").text).links if each in known]


@pytest.mark.parametrize(
    "role",
    [
        "operator",
        "owner",
        "viewer",
        *(pytest.param(role, marks=pytest.mark.long) for role in ("finance", "auditor", "member")),
    ],
)
def test_pages_offer_nothing_that_their_visitor_is_refused(
    filled: tuple[Installation, Seeded], role: str
) -> None:
    installation, seeded = filled
    browser, routes = installation.visitor(role, account="atlas"), Routes(installation)
    starts = of_navigation(browser)
    starts += [each for each in starts_of(seeded) if browser.get(each).status_code == 200]

    assert refused(browser, role, starts, routes) == ""


@pytest.mark.parametrize(
    "role",
    ["operator", *(pytest.param(role, marks=pytest.mark.long) for role in ("finance", "auditor"))],
)
def test_empty_pages_offer_nothing_that_their_visitor_is_refused(
    role: str, tmp_path: Path, postgres: str, valkey: str
) -> None:
    url = Databases("sqlite", tmp_path, postgres).make()
    with installed(tmp_path / "home", url, valkey) as installation:
        installation.execute(delete(accounts).where(accounts.c.kind == "customer"))
        browser = installation.visitor(role)

        assert refused(browser, role, of_navigation(browser), Routes(installation)) == ""

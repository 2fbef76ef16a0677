"""Whatever others wrote is text on every page of a real browser: nothing runs, nothing is sent."""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from playwright.sync_api import Page

from gateway.accounts.roles import ROLES
from gateway.console.roles import AnyRole
from gateway.sql.database import Database
from tests.console.browser.conftest import Enter, Site
from tests.console.browser.inspection import Walker
from tests.console.hostile import Furnished, announce, catalog_with, furnish
from tests.console.payloads import COMPUTED, Dealer
from tests.console.routes import NO_PAGES, console_routes, pages_of
from tests.console.seeding import seed
from tests.console.serving import served_settings, serving
from tests.console.visiting import Browser, open_link
from tests.databases import Databases
from tests.stack import CATALOG

SHOWN = """\
(wanted) => {
  const flat = (text) => text.replace(/\\s+/g, " ");
  const texts = [document.documentElement.textContent];
  const names = ["title", "value", "aria-label", "alt", "data-copy"];
  for (const each of document.querySelectorAll(names.map((name) => `[${name}]`)))
    for (const name of names) texts.push(each.getAttribute(name) ?? "");
  const all = flat(texts.join("\\n"));
  return wanted.filter((each) => all.includes(flat(each)));
}
"""
NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True)
class Hostile:
    site: Site
    made: Furnished


@pytest.fixture(scope="module")
def hostile(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Hostile]:
    directory = tmp_path_factory.mktemp("hostile")
    url = Databases("sqlite", directory, postgres).make()
    catalog, dealer = directory / "catalog.yaml", Dealer()
    catalog.write_text(catalog_with(dealer, CATALOG.format(veo="0.40")))
    database = Database(url)
    seeded = seed(database, catalog, requests=24)
    made = furnish(database, catalog, seeded, dealer)
    database.dispose()
    namespace = f"t{uuid.uuid4().hex[:8]}"
    with ThreadPoolExecutor() as thread:  # Playwright has a loop of its own in this one
        thread.submit(asyncio.run, announce(valkey, namespace, made)).result()
    settings = served_settings(directory, url, valkey, namespace=namespace)
    with serving(settings) as served:
        site = Site(f"http://127.0.0.1:{settings.port}", url, seeded, catalog, served.app)
        enter_as(site, dealer.some("agent", 190))
        yield Hostile(site, made)


@pytest.fixture(scope="module")
def site(hostile: Hostile) -> Site:
    return hostile.site


def enter_as(site: Site, agent: str) -> None:
    """Open a session with a browser that calls itself so."""
    database = Database(site.database_url)
    with httpx.Client(headers={"User-Agent": agent}) as client:
        browser = Browser(client, site.url)  # type: ignore[arg-type]  # it only sends requests
        assert browser.enter(open_link(database, "operator", "atlas")).status_code == 303
    database.dispose()


def computed(page: Page) -> Iterator[str]:
    """Yield the cells of the page's CSV file that a spreadsheet would compute."""
    for link in page.locator("a[data-shortcut=e]").all():
        answer = page.request.get(link.get_attribute("href") or "")
        assert answer.status == 200, page.url
        if answer.headers["content-type"].startswith("text/csv"):
            cells = itertools.chain(*csv.reader(io.StringIO(answer.text(), newline="")))
            yield from (
                each
                for each in cells
                if each.startswith(tuple(COMPUTED)) and not NUMBER.fullmatch(each)
            )


def walk(hostile: Hostile, enter: Enter, role: AnyRole, scheme: str, width: int) -> set[str]:
    """Visit every page of a role, and return the places whose texts were shown."""
    site, made = hostile.site, hostile.made
    page = enter(role, color_scheme=scheme, viewport={"width": width, "height": 844})
    walker = Walker(page, site.url)
    own = made.of_operators if role in ROLES else made.of_members

    found, wrong = set(), []
    for path in (*pages_of(site.app, role, site.seeded), *own):
        try:
            walker.visit(path)
        except AssertionError as error:
            wrong.append(str(error))
            continue
        shown = set(page.evaluate(SHOWN, list(made.dealer.dealt.values())))
        found |= {name for name, text in made.dealer.dealt.items() if text in shown}
        # What is full of payloads is looked at closely; the other pages are elsewhere.
        wrong += [f"{path}: {each}" for each in walker.inspect(axe=path in own)]
        wrong += [f"{path}: {each!r} is computed" for each in computed(page)]

    assert not wrong, "\n".join(wrong)
    return found


def test_texts_of_others_are_shown_and_run_nothing(hostile: Hostile, enter: Enter) -> None:
    found = set.union(
        walk(hostile, enter, "operator", "light", 390), walk(hostile, enter, "owner", "light", 390)
    )

    unseen = hostile.made.dealer.dealt.keys() - found
    assert unseen == set(), sorted(unseen)


@pytest.mark.long
@pytest.mark.parametrize("role", ["operator", "owner"])
@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("dark", 390), ("light", 1280)])
def test_texts_of_others_run_nothing_in_other_sizes_and_schemes(
    hostile: Hostile, enter: Enter, role: AnyRole, scheme: str, width: int
) -> None:
    walk(hostile, enter, role, scheme, width)


def test_walk_visits_every_page(hostile: Hostile) -> None:
    site, made = hostile.site, hostile.made
    visited = {
        path.partition("?")[0]
        for role in ("operator", "owner")
        for path in (*pages_of(site.app, role, site.seeded), *made.of_operators, *made.of_members)
    }
    pages = {
        route.path
        for route in console_routes(site.app)
        if route.method == "GET" and route.path not in NO_PAGES
    }

    missed = {
        path
        for path in pages
        if not any(re.fullmatch(re.sub(r"{[^}]*}", "[^/]+", path), each) for each in visited)
    }
    assert missed == set()

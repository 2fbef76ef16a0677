"""Parts of pages, and whole pages, while the database is away, and after it has come back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from gateway.console.jobs import store
from gateway.console.jobs.store import NewJob
from gateway.sql.database import Database
from tests.console.browser.conftest import Enter, Site
from tests.console.seeding import seed
from tests.console.serving import served_settings, serving
from tests.databases import Server, own_postgres
from tests.stack import CATALOG


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, valkey: str) -> Iterator[tuple[Site, Server]]:
    directory: Path = tmp_path_factory.mktemp("failing")
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    with own_postgres() as (server, url):
        database = Database(url)
        seeded = seed(database, catalog)
        database.dispose()
        settings = served_settings(directory, url, valkey)
        with serving(settings):
            yield Site(f"http://127.0.0.1:{settings.port}", url, seeded, catalog), server


@pytest.fixture(scope="module")
def site(served: tuple[Site, Server]) -> Site:
    return served[0]


def test_parts_say_what_failed_while_the_database_is_away_and_come_back(
    served: tuple[Site, Server], enter: Enter
) -> None:
    _, server = served
    page = enter("owner")
    page.goto("/console/models/echo")
    speed = page.locator("#speed")
    expect(speed).to_contain_text("requests ended")
    note = speed.locator(".part-failed")

    server.stop()
    try:
        speed.get_by_role("link", name="1h").click()

        expect(note).to_contain_text("The database or the queue server does not answer")
        expect(note).to_contain_text("Since")
        expect(speed).to_contain_text("requests ended")
        since = note.locator("time").inner_text()
        note.get_by_role("button", name="Try again").click()
        expect(note).to_have_count(1)
        expect(note.locator("time")).to_have_text(since)
    finally:
        server.start()

    expect(note).to_have_count(0, timeout=40_000)
    expect(speed.locator("b").first).to_have_text("1h")


def test_page_of_an_outage_comes_back_by_itself(served: tuple[Site, Server], enter: Enter) -> None:
    _, server = served
    page = enter("owner")

    server.stop()
    try:
        answer = page.goto("/console/home")
        assert answer is not None
        assert answer.status == 503
        expect(page.locator("#back")).to_contain_text("comes back by itself")
        expect(page.get_by_role("link", name="Try again")).to_be_visible()
    finally:
        server.start()

    expect(page.locator("nav.side")).to_be_visible(timeout=40_000)
    assert page.url.endswith("/console/home")


def test_part_asks_again_ever_more_seldom_and_keeps_what_it_shows(
    served: tuple[Site, Server], enter: Enter
) -> None:
    page = enter("owner")
    asked: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.abort() if len(asked) % 2 else route.fulfill(status=502, body="<h1>Bad gateway</h1>")

    page.route("**/console/speed/**", refuse)
    page.goto("/console/models/echo")
    note = page.locator("#speed > .part-failed")

    expect(note).to_contain_text("Tollgate did not answer this part.")
    expect(note).to_contain_text("status 502", timeout=10_000)
    expect(page.locator("#speed h2")).to_be_visible()
    page.unroute("**/console/speed/**")
    expect(page.locator("#speed")).to_contain_text("requests ended", timeout=20_000)
    assert 2 <= len(asked) <= 4


def test_job_is_followed_on_after_its_database_was_away(
    served: tuple[Site, Server], enter: Enter
) -> None:
    site, server = served
    page = enter("operator")
    job = NewJob("proof", "digest", "operator", "ledger.read", "/console/ledger")
    database = Database(site.database_url)
    with database.transaction() as connection:
        store.begin(connection, "job_followed", job, datetime.now(UTC) + timedelta(minutes=5))
    database.dispose()
    page.goto("/console/jobs/job_followed")
    part = page.locator("#job")
    expect(part).to_contain_text("At work")

    server.stop()
    try:
        expect(part.locator(".part-failed")).to_contain_text("does not answer", timeout=20_000)
        expect(part).to_contain_text("At work")
    finally:
        server.start()
    database = Database(site.database_url)
    with database.transaction() as connection:
        store.end(connection, "job_followed", "done")
    database.dispose()

    page.wait_for_url("**/console/ledger", timeout=40_000)


def test_focus_stays_in_a_part_that_is_swapped(site: Site, enter: Enter) -> None:
    page = enter("owner")
    page.goto("/console/models/echo")
    speed = page.locator("#speed")
    expect(speed).to_contain_text("requests ended")

    speed.get_by_role("link", name="1h").focus()
    page.keyboard.press("Enter")

    expect(speed.locator("b").first).to_have_text("1h")
    expect(speed).to_be_focused()
    page.keyboard.press("Tab")
    assert speed.evaluate("(part) => part.contains(document.activeElement)")

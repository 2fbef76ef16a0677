"""Live pages in a real browser: one stream for all tabs, and figures that follow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from playwright.sync_api import BrowserContext, Page, Request, expect

from gateway.sql.database import Database
from tests.console.browser.conftest import Enter, Site
from tests.console.browser.inspection import Watched
from tests.console.seeding import Seeder

TABS = 8
RATE = 1000
HEAP_GROWTH_MAX = 10 * 1024 * 1024
RECORD_MESSAGES = """\
() => {
  window.tail = { sizes: [], entered: 0 };
  const seen = new Set([...document.querySelectorAll("#rows tr")].map((row) => row.id));
  document.getElementById("rows").addEventListener("live", ({ detail }) => {
    const fresh = (detail.rows ?? []).filter(([id]) => !seen.has(id));
    for (const [id] of fresh) seen.add(id);
    window.tail.sizes.push(fresh.length);
    window.tail.entered += fresh.length;
  });
}
"""


class Streams:
    """The streams that the tabs of a browser have open."""

    def __init__(self, context: BrowserContext) -> None:
        self._begun: dict[Request, Page] = {}
        context.on("request", self._begin)
        context.on("requestfinished", self._end)
        context.on("requestfailed", self._end)

    def _begin(self, request: Request) -> None:
        if "/console/live?" in request.url:
            self._begun[request] = request.frame.page

    def _end(self, request: Request) -> None:
        self._begun.pop(request, None)

    @property
    def tabs(self) -> list[Page]:
        """The tabs that have a stream open; of a closed one, no end is reported."""
        return [page for page in self._begun.values() if not page.is_closed()]


def test_figures_of_the_overview_follow_within_seconds(site: Site, enter: Enter) -> None:
    page = enter("operator", viewport={"width": 1280, "height": 900})
    watched = Watched(page)
    watched.visit("/console")
    mark = page.locator("#live")
    expect(mark).to_have_attribute("data-state", "live")
    expect(mark).to_contain_text("live 1 s")
    before = page.locator("[data-text=earned_of]").inner_text()

    newest = page.locator("#rows tr").first.get_attribute("id")
    make_requests(site, 3)

    expect(page.locator("[data-text=earned_of]")).not_to_have_text(before)
    expect(page.locator("#rows tr").nth(3)).to_have_id(newest or "")
    expect(page.locator("#rows tr")).to_have_count(10)
    expect(page.locator("[data-text=accepted]")).not_to_have_text("0.0")
    assert watched.inspect() == []

    page.get_by_role("button", name="Pause").click()
    expect(mark).to_contain_text("paused")
    before = page.locator("[data-text=earned_of]").inner_text()
    make_requests(site, 1)
    page.wait_for_timeout(1_500)
    assert page.locator("[data-text=earned_of]").inner_text() == before
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("[data-text=earned_of]")).not_to_have_text(before)


def test_all_tabs_of_a_browser_share_one_stream(site: Site, enter: Enter) -> None:
    first = enter("operator")
    first.goto("about:blank")
    context = first.context
    streams = Streams(context)
    tabs = [context.new_page() for _ in range(TABS)]
    for tab in tabs:
        tab.goto("/console", wait_until="commit")
    for tab in tabs:
        expect(tab.locator("#figures")).to_be_visible()
    for tab in tabs:
        expect(tab.locator("#live")).to_have_attribute("data-state", "live")

    [leader] = streams.tabs
    leader.close()
    tabs.remove(leader)
    make_requests(site, 2)

    for tab in tabs:
        expect(tab.locator("[data-text=accepted]")).not_to_have_text("0.0")
    # The figure may be older than the new stream.
    give_up = time.monotonic() + 30
    while not streams.tabs and time.monotonic() < give_up:
        tabs[0].wait_for_timeout(100)
    [successor] = streams.tabs
    assert successor in tabs


def test_new_requests_enter_the_list_and_open_ones_end_in_it(site: Site, enter: Enter) -> None:
    page = enter("owner", viewport={"width": 1280, "height": 900})
    watched = Watched(page)
    watched.visit("/console/requests?model=echo")
    page.keyboard.press("t")
    page.wait_for_url("**/console/requests?model=echo&tail=on")
    expect(page.locator("#live")).to_have_attribute("data-state", "live")
    rows = page.locator("#rows tr")
    before = rows.count()

    with seeding(site) as seeder:
        account, key = site.seeded.accounts["atlas"], site.seeded.keys["web"]
        echo = seeder.entry("text-generation")
        open_id = seeder.request(account, key, datetime.now(UTC), entry=echo, open=True)
    first = page.locator(f"#{open_id}")
    expect(first).to_contain_text("queued")
    expect(rows).to_have_count(before + 1)

    with seeding(site) as seeder:
        seeder.end(open_id)
        picture = seeder.entry("text-to-video")
        other = seeder.request(account, key, datetime.now(UTC), entry=picture)
    expect(first).not_to_contain_text("queued")
    assert page.locator(f"#{other}").count() == 0
    assert watched.inspect() == []

    page.mouse.wheel(0, 600)
    expect(page.locator("#tail-note")).to_contain_text("Scrolling has stopped the tail")
    make_requests(site, 2)
    expect(page.locator("#tail-note")).to_contain_text("+ 2 more")
    expect(rows).to_have_count(before + 1)
    page.get_by_role("link", name="Go on").click()
    expect(page.locator("#tail-note")).to_be_hidden()


@pytest.mark.parametrize("seconds", [4, pytest.param(20, marks=pytest.mark.long)])
def test_tail_keeps_up_with_a_thousand_settlements_a_second(
    seconds: int, site: Site, enter: Enter
) -> None:
    page = enter("operator")
    page.goto("/console/requests?tail=on")
    page.evaluate(RECORD_MESSAGES)
    expect(page.locator("#live")).to_have_attribute("data-state", "live")
    count_all = "() => document.querySelectorAll('#rows tr').length"
    before = page.evaluate(count_all)
    memory = heap_of(page)
    began, made = time.monotonic(), 0

    while time.monotonic() < began + seconds:
        wanted = int((time.monotonic() - began) * RATE) - made
        with seeding(site) as seeder:
            account, key = site.seeded.accounts["atlas"], site.seeded.keys["web"]
            seeder.requests(account, key, max(wanted, 1))
        made += max(wanted, 1)
    took = time.monotonic() - began

    note = page.locator("#tail-note")
    entered = page.evaluate("() => window.tail.entered")
    expect(note).to_have_text(re.compile(r"paused at \d\d:\d\d:\d\d"))
    assert entered >= 1
    more = (
        f"{made - entered:,}".replace(",", "\u202f") if made - entered >= 10_000 else made - entered
    )
    expect(note).to_contain_text(f"+ {more} more")
    sizes = page.evaluate("() => window.tail.sizes")
    assert len(sizes) <= 4 * (took + 3)
    assert max(sizes) <= 50
    assert page.evaluate(count_all) <= before + entered
    assert heap_of(page) - memory <= HEAP_GROWTH_MAX


def test_open_request_follows_to_its_receipt_and_can_be_cancelled(site: Site, enter: Enter) -> None:
    page = enter("owner")
    watched = Watched(page)
    account, key = site.seeded.accounts["atlas"], site.seeded.keys["web"]
    with seeding(site) as seeder:
        echo = seeder.entry("text-generation")
        ended, cancelled = (
            seeder.request(account, key, datetime.now(UTC), entry=echo, open=True) for _ in "12"
        )

    watched.visit(f"/console/requests/{ended}")
    expect(page.locator("h1")).to_contain_text("echo holds $")
    waited = page.locator("[data-text=waited]")
    expect(waited).not_to_have_text(waited.inner_text())
    expect(waited).to_have_text(re.compile(r"^\d+ s ago$"))
    with seeding(site) as seeder:
        seeder.end(ended)
    expect(page.locator("#money")).to_be_visible()
    expect(page).to_have_title(re.compile("echo · Tollgate$"))
    assert watched.inspect() == []

    watched.visit(f"/console/requests/{cancelled}")
    page.get_by_role("link", name="Cancel").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("h1")).to_contain_text("Cancelled, free")
    expect(page.locator(".receipt")).to_contain_text("Released")


@contextmanager
def seeding(site: Site) -> Iterator[Seeder]:
    """Book what a gateway would book now, in one transaction."""
    database = Database(site.database_url)
    try:
        with database.transaction() as connection:
            yield Seeder(connection, site.catalog, seed=datetime.now(UTC).microsecond)
    finally:
        database.dispose()


def heap_of(page: Page) -> int:
    """Return the bytes that the scripts of a page hold, once what is not needed is gone."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return int(used)


def make_requests(site: Site, count: int) -> None:
    """Accept and settle requests of atlas now."""
    with seeding(site) as seeder:
        seeder.requests(site.seeded.accounts["atlas"], site.seeded.keys["web"], count)

"""Figures and lists in a real browser: what is loaded, aligned, copied and drawn."""

from __future__ import annotations

from decimal import Decimal

import pytest
from playwright.sync_api import expect

from tests.console.browser.conftest import Enter, Site
from tests.console.routes import pages_of

FIRST_LOAD_MAX = 5
"""The page, and four files that every page needs."""
SHELL_SCRIPTS = 2
LOADED = """\
() => performance.getEntriesByType("resource")
  .filter((each) => each.transferSize > 0 && !each.name.includes("/console/live"))
  .filter((each) => !["fetch", "xmlhttprequest"].includes(each.initiatorType))
  .map((each) => new URL(each.name).pathname)
"""
"""The files that did not come from the browser's cache, besides parts and the stream."""
POINTS = """\
() => [...document.querySelectorAll("main table")].flatMap((table) => {
  const columns = new Map();
  for (const row of table.querySelectorAll("tbody tr, tfoot tr")) {
    let at = 0;
    for (const cell of row.cells) {
      const point = cell.querySelector(":scope .frac");
      if (point && cell.checkVisibility()) {
        columns.set(at, [...(columns.get(at) ?? []), point.getBoundingClientRect().left]);
      }
      at += cell.colSpan;
    }
  }
  return [...columns].map(([at, lefts]) => {
    const name = table.tHead?.rows[0].cells[at]?.textContent ?? at;
    return [`${name}`, lefts.length, Math.max(...lefts) - Math.min(...lefts)];
  });
})
"""
AT_ITS_PLACE = """\
(each) => {
  const { left, top } = each.getBoundingClientRect();
  return document.elementFromPoint(left + 4, top + 6).textContent;
}
"""
RECORD_CHARTS = """\
window.drawn = [];
Object.defineProperty(window, "uPlot", {
  configurable: true,
  get() { return this.plot; },
  set(plot) {
    this.plot = class extends plot {
      constructor(options, data, target) {
        super(options, data, target);
        window.drawn.push(data.map((line) => [...line]));
      }
    };
  },
});
"""


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)])
def test_first_page_takes_few_requests_and_the_next_one(
    every: int, site: Site, enter: Enter
) -> None:
    session = enter("operator").context.storage_state()
    browser = enter("operator").context.browser
    assert browser is not None
    elsewhere: list[str] = []
    for path in list(pages_of(site.app, "operator", site.seeded))[::every]:
        context = browser.new_context(base_url=site.url, storage_state=session)
        page = context.new_page()
        page.on("request", lambda each: elsewhere.append(each.url))
        page.goto(path)
        files = page.evaluate(LOADED)
        # Pages with charts, an editor or a stream have scripts of their own.
        if page.locator("script[src]").count() == SHELL_SCRIPTS:
            assert 1 + len(files) <= FIRST_LOAD_MAX, (path, files)
        page.goto(path)
        assert page.evaluate(LOADED) == [], path
        context.close()

    assert {url for url in elsewhere if not url.startswith((site.url, "data:", "blob:"))} == set()


def test_decimal_points_of_every_column_are_in_line(site: Site, enter: Enter) -> None:
    page = enter("operator", viewport={"width": 1280, "height": 844})
    compared = 0
    crooked = []
    for path in pages_of(site.app, "operator", site.seeded):
        page.goto(path)
        for name, cells, off in page.evaluate(POINTS):
            compared += cells > 1
            if off > 0.5:
                crooked.append(f"{path}: {name} is off by {off:.1f} px")

    assert not crooked, "\n".join(crooked)
    assert compared > 30


def test_chart_is_drawn_with_the_values_of_its_table(site: Site, enter: Enter) -> None:
    page = enter("owner")
    page.context.add_init_script(RECORD_CHARTS)
    page.goto("/console/usage?by=day&metric=net")
    expect(page.locator("figure canvas")).to_be_visible()

    rows = page.locator("figure tbody tr")
    values = rows.evaluate_all("(all) => all.map((row) => row.dataset.value)")
    cells = page.locator("figure tbody td.net .amount").all_text_contents()
    ((_, line),) = page.evaluate("window.drawn")

    assert [Decimal(each) for each in values] == [Decimal(each) for each in cells]
    assert [float(each) for each in values] == line
    assert len(line) >= 2


def test_first_column_stays_beside_what_scrolls(site: Site, enter: Enter) -> None:
    page = enter("operator", viewport={"width": 800, "height": 700})
    page.goto("/console/requests")
    box = page.locator("main .table:has(> .rows)")
    cells = page.locator("main .rows tr > :first-child, main .rows tr:has(input) > :nth-child(2)")
    lefts = "(all) => all.map((each) => each.getBoundingClientRect().left)"
    before = cells.evaluate_all(lefts)

    box.evaluate("(each) => (each.scrollLeft = 200)")
    assert box.evaluate("(each) => each.scrollLeft") > 50
    assert cells.evaluate_all(lefts) == before
    # Nothing covers it.
    seen = page.locator("main .rows th", has_text="Time").evaluate(AT_ITS_PLACE)
    assert seen == "Time"

    # Wherever a row is clicked, it is opened.
    row = page.locator("main .rows tbody tr").last
    row.locator("td[data-label=Made]").click()
    page.wait_for_url("**/console/requests/req_*")

"""The keyboard alone: where the focus is after a part, a page or a dialog has changed."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.console.browser.conftest import Enter, Site
from tests.console.browser.inspection import Watched

FOCUSED = "() => document.activeElement.id || document.activeElement.tagName"
RING = """\
() => {
  const at = document.activeElement;
  if (!at || at === document.body) return null;
  // A link that opens its row shows the focus around the row.
  const rings = [at, at.closest("tr")].filter(Boolean).map((each) => getComputedStyle(each));
  const isRing = ({ outlineStyle, outlineWidth }) =>
    outlineStyle !== "none" && Number.parseFloat(outlineWidth) >= 2;
  const shown = rings.some(isRing);
  return [shown, at.outerHTML.slice(0, 120)];
}
"""
REREAD = """\
(id) => htmx.ajax("GET", location.pathname + location.search, {
  source: document.body, swap: "none", selectOOB: `#${id}:outerMorph`,
})
"""


def test_skip_link_leads_past_the_navigation(site: Site, enter: Enter) -> None:
    page = enter("owner")
    page.goto("/console/requests")

    page.keyboard.press("Tab")
    page.keyboard.press("Enter")

    assert page.evaluate(FOCUSED) == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")


@pytest.mark.parametrize("path", ["/console/requests", "/console/keys", "/console/limits"])
def test_whatever_has_the_focus_shows_it(path: str, site: Site, enter: Enter) -> None:
    page = enter("owner")
    page.goto(path)

    hidden = []
    for _ in range(60):
        page.keyboard.press("Tab")
        if (found := page.evaluate(RING)) is None:
            break
        if not found[0]:
            hidden.append(found[1])

    assert not hidden, "\n".join(hidden)


@pytest.mark.parametrize(
    ("path", "name"),
    [("/console/requests", "status"), ("/console/keys", "status"), ("/console/usage", "by")],
)
def test_filter_that_acts_keeps_the_focus(path: str, name: str, site: Site, enter: Enter) -> None:
    page = enter("owner")
    watched = Watched(page)
    watched.visit(path)
    field = page.locator(f"form.filters select[name={name}]")
    _show(page, name)

    field.focus()
    with page.expect_navigation():
        page.keyboard.press("ArrowDown")

    expect(field).to_be_focused()
    expect(page).to_have_url(re.compile(rf"{name}=[^#]*$"))
    assert watched.inspect(axe=False) == []


def _show(page: Page, name: str) -> None:
    box = page.locator(f"main details:has([name={name}]) > summary")
    if box.count() and not page.locator(f"form.filters [name={name}]").is_visible():
        box.first.click()


def test_list_that_is_read_again_keeps_the_focus(site: Site, enter: Enter) -> None:
    page = enter("operator")
    for path in ("/console", "/console/workers", "/console/queue"):
        page.goto(path)
        part = page.locator("[data-live][id]:has(a)").first
        if not part.count():
            continue
        link = part.locator("a").first
        link.focus()
        before = page.evaluate("document.activeElement.href")

        page.evaluate(REREAD, part.get_attribute("id"))

        assert page.evaluate("document.activeElement.href") == before, path


def test_dialogs_and_menus_give_the_focus_back(site: Site, enter: Enter) -> None:
    page = enter("operator")
    page.goto("/console/requests")
    for opener in ("[data-palette]", "[data-open=shortcuts]"):
        page.locator(opener).focus()
        page.keyboard.press("Enter")
        expect(page.locator("dialog[open]")).to_have_count(1)
        page.keyboard.press("Escape")
        expect(page.locator("dialog[open]")).to_have_count(0)
        expect(page.locator(opener)).to_be_focused()
    menu = page.locator("header details.menu > summary").first
    menu.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    expect(menu).to_be_focused()
    expect(page.locator("details.menu[open]")).to_have_count(0)


def test_choice_among_found_accounts_keeps_the_focus(site: Site, enter: Enter) -> None:
    page = enter("operator")
    page.goto("/console/requests")
    page.locator("summary", has_text="all accounts").press("Enter")
    field = page.get_by_label("Account, by name or number")

    field.press_sequentially("zen")
    expect(page.locator("#menu-accounts button", has_text="zenith")).to_be_visible()

    expect(field).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('details.menu') !== null")


def test_mistake_of_a_form_is_reached_from_its_field(site: Site, enter: Enter) -> None:
    page = enter("owner")
    page.goto("/console/keys/new")
    page.get_by_label("Name").fill("x" * 10)
    page.get_by_label(re.compile("Spend")).first.fill("much")
    page.get_by_role("button", name="Create the key").press("Enter")

    wrong = page.locator("[aria-invalid=true]").first
    expect(wrong).to_be_visible()
    described = (wrong.get_attribute("aria-describedby") or "").split()
    assert any("problem" in each for each in described)
    for each in described:
        expect(page.locator(f"#{each}")).to_be_visible()

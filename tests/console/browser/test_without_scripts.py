"""JavaScript is off: every page can be read, and what the account does works by forms."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from gateway.console.roles import AnyRole
from gateway.sql.database import Database
from tests.console.browser.conftest import Enter, Site
from tests.console.routes import pages_of
from tests.console.visiting import open_link

ENTRANCE = "/console/enter"


@pytest.mark.parametrize("role", ["operator", pytest.param("owner", marks=pytest.mark.long)])
def test_every_page_can_be_read(role: AnyRole, site: Site, enter: Enter) -> None:
    page = enter(role, java_script_enabled=False)

    wrong = []
    for path in pages_of(site.app, role, site.seeded):
        answer = page.goto(path, wait_until="commit")
        assert answer is not None
        words = page.locator("main").inner_text()
        wrong += [f"{path}: {answer.status}"] if answer.status != 200 else []
        wrong += [f"{path}: no heading"] if page.locator("h1:visible").count() != 1 else []
        wrong += [f"{path}: asks for scripts"] if re.search("(?i)enable javascript", words) else []
        wrong += [
            f"{path}: {each} does nothing"
            for each in page.locator(".only-scripts:visible").all_inner_texts()
        ]

    assert not wrong, "\n".join(wrong)


def test_people_enter_by_a_code_and_leave(site: Site, enter: Enter) -> None:
    page = enter("owner", java_script_enabled=False)
    page.goto("/console/sessions")
    page.locator("header details.menu > summary").last.click()
    page.get_by_role("button", name="Leave").click()
    expect(page).to_have_url(re.compile(ENTRANCE))
    page.goto("/console/keys")
    expect(page).to_have_url(re.compile(ENTRANCE))

    page.get_by_label("Code").fill(_code(site))
    page.get_by_role("button", name="Enter").first.click()
    expect(page).not_to_have_url(re.compile(ENTRANCE))
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.goto("/console/keys")
    expect(page).to_have_url(re.compile("/console/keys$"))


def _code(site: Site) -> str:
    database = Database(site.database_url)
    try:
        return open_link(database, "owner", "atlas")["code"]
    finally:
        database.dispose()


def test_owner_sets_changes_and_ends_a_budget(site: Site, enter: Enter) -> None:
    page = enter("owner", java_script_enabled=False)
    page.goto("/console/limits?account=atlas")
    form = page.locator(
        "form.form[action^='/console/limits?'], form.form[action='/console/limits']"
    )
    _open(page, "#field-limit")

    # Members bound keys; the account as a whole is bound by the operator.
    page.locator("#field-name").fill("by hand")
    page.locator("#field-limit").fill("3")
    page.locator("#field-key").fill(str(site.seeded.keys["web"].id))
    form.last.get_by_role("button").last.click()

    expect(page.get_by_text("by hand").first).to_be_visible()


def _open(page: Page, inside: str) -> None:
    """Open the fold that a field is in."""
    fold = page.locator(f"details:has({inside}) > summary")
    if fold.count() and not page.locator(inside).is_visible():
        fold.first.click()


def test_operator_refunds(site: Site, enter: Enter) -> None:
    page = enter("operator", java_script_enabled=False)
    page.goto(f"/console/requests/{site.request}")
    link = page.get_by_role("link", name="Refund")
    if not link.count():
        pytest.fail("the request was not charged")
    link.first.click()

    page.get_by_label("Amount in USD").fill("0.000000001")
    page.get_by_label(re.compile("Reason")).fill("late")
    page.get_by_role("button", name=re.compile("Refund to")).click()

    expect(page).to_have_url(re.compile(f"/console/requests/{site.request}"))
    expect(page.locator("main")).to_contain_text("0.000000001")
    expect(page.locator("main")).to_contain_text("late")


def test_filters_paging_and_zone_work_by_their_buttons(site: Site, enter: Enter) -> None:
    page = enter("owner", java_script_enabled=False)
    page.goto("/console/ledger?account=atlas")
    _open(page, "[name=kind]")
    page.locator("select[name=kind]").select_option("charge")
    page.locator("form.filters").get_by_role("button").first.click()
    expect(page).to_have_url(re.compile("kind=charge"))
    page.get_by_role("link", name="Older").first.click()
    expect(page.locator("tbody tr").first).to_be_visible()

    page.locator("#zone > summary").click()
    page.locator("#zone").get_by_role("button", name="UTC").first.click()
    expect(page.locator("#zone > summary")).to_contain_text("UTC")

"""The console in a real browser: every page, by every way of using it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Route, expect

from tests.console.browser.conftest import Enter, Site
from tests.console.browser.inspection import Watched
from tests.console.seeding import HOSTILE

OPERATOR = (
    "/console",
    "/console/requests",
    "/console/failures",
    "/console/models",
    "/console/ledger?account=atlas",
    "/console/balance?account=atlas",
    "/console/usage?by=day",
    "/console/margins",
    "/console/statements?account=atlas",
    "/console/accounts",
    "/console/audit",
    "/console/accounts/{account}",
    "/console/accounts/new",
    "/console/credit/new?account=atlas",
    "/console/requests/{request}/refund",
    "/console/users",
    "/console/users/{user}",
    "/console/users/sessions",
    "/console/prove",
    "/console/enter",
)
OWNER = (
    "/console/home",
    "/console/requests/{request}",
    "/console/requests/{open}",
    "/console/models/echo",
    "/console/pick?task=text-generation",
    "/console/usage?by=model",
    "/console/limits",
    "/console/keys",
    "/console/keys/new",
    "/console/keys/{key}",
    "/console/sessions",
    "/console/members",
)
BROKEN = """\
<!doctype html><html lang="en"><title>Broken</title>
<script>document.title = "ran"</script>
<img src="/console/nothing.png">
<input>
<p style="width: 4000px; height: 9px; background: red"></p>
<pre>{wide}</pre>
</html>
"""


def path_of(path: str, site: Site) -> str:
    return path.format(
        request=site.request,
        open=site.open_request,
        account=site.seeded.accounts["atlas"].id,
        key=site.seeded.keys["web"].id,
        user=1,
    )


@pytest.mark.parametrize(
    ("role", "paths"), [("operator", OPERATOR), ("owner", OWNER)], ids=["operator", "owner"]
)
@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 390)], ids=["wide", "small"]
)
def test_pages_break_no_rule(
    role: str, paths: tuple[str, ...], scheme: str, width: int, site: Site, enter: Enter
) -> None:
    page = enter(role, color_scheme=scheme, viewport={"width": width, "height": 844})
    watched = Watched(page)

    found = []
    for path in paths:
        watched.visit(path_of(path, site))
        found += [f"{path}: {problem}" for problem in watched.inspect()]

    assert not found, "\n".join(found)


def test_page_that_breaks_the_rules_is_noticed(site: Site, enter: Enter) -> None:
    page = enter("owner")
    watched = Watched(page)
    policy = page.request.get("/console/home").headers["content-security-policy"]

    def answer(route: Route) -> None:
        headers = {"Content-Security-Policy": policy, "Content-Type": "text/html"}
        route.fulfill(body=BROKEN.replace("{wide}", "x" * 4000), headers=headers)

    page.route("**/console/broken", answer)
    watched.visit("/console/broken")

    problems = " ".join(watched.inspect())
    assert page.title() == "Broken"
    for each in (
        "policy: script-src",
        "policy: style-src",
        "axe: label",
        "axe: image-alt",
        "wider",
    ):
        assert each in problems, problems


def test_everything_works_without_scripts(site: Site, enter: Enter) -> None:
    page = enter("owner", java_script_enabled=False)

    page.goto("/console/requests")
    page.locator("summary", has_text="Filters").click()
    page.get_by_label("Status").select_option("succeeded")
    page.get_by_role("button", name="Filter").click()
    expect(page).to_have_url(re.compile("status=succeeded"))
    page.get_by_role("link", name="Older").click()
    page.locator("a.open").first.click()
    expect(page.get_by_text("= sum of the lines, exact")).to_be_visible()

    page.goto("/console/keys/new")
    page.get_by_label("Name").fill("from a form")
    page.get_by_role("button", name="Create the key").click()
    secret = page.locator("#secret").inner_text()
    assert secret.startswith("tg_")
    page.get_by_role("link", name="I have copied it").click()
    assert secret not in page.content()

    page.goto("/console/models/echo")
    page.get_by_role("link", name="Show how fast it was").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Speed of echo")


def test_keyboard_reaches_everything(site: Site, enter: Enter) -> None:
    page = enter("owner")
    page.goto("/console/home")

    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_url("**/console/requests")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/requests/req_*")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.keyboard.press("d")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_parts_are_filled_in_by_htmx(site: Site, enter: Enter) -> None:
    page = enter("viewer")
    watched = Watched(page)

    watched.visit("/console/models/echo")

    expect(page.locator("#speed")).to_contain_text("requests ended")
    assert watched.inspect(axe=False) == []


def test_what_users_wrote_runs_nowhere(site: Site, enter: Enter) -> None:
    page = enter("operator")
    watched = Watched(page)

    for path in ("/console/accounts", "/console/keys", "/console/failures"):
        watched.visit(path)
        assert page.locator("[onerror]").count() == 0
        assert watched.inspect(axe=False) == []
    watched.visit("/console/accounts")
    expect(page.get_by_text(HOSTILE).first).to_be_visible()


def test_browser_keeps_no_secret(site: Site, enter: Enter) -> None:
    page = enter("owner")
    page.goto("/console/home")

    kept = "() => [document.cookie, localStorage.length, sessionStorage.length]"
    assert page.evaluate(kept) == ["", 0, 0]
    assert "tg_" not in page.content().replace("tg_…", "")


def test_decimal_points_of_a_column_are_in_line(site: Site, enter: Enter) -> None:
    page = enter("owner", viewport={"width": 1280, "height": 844})
    page.goto("/console/ledger")

    points = "(all) => all.map((each) => each.getBoundingClientRect().left)"
    lefts = page.locator("tbody td.money:nth-child(3) .frac").evaluate_all(points)

    assert len(lefts) == 50
    assert max(lefts) - min(lefts) <= 0.5


def test_copied_amount_is_the_plain_decimal(site: Site, enter: Enter) -> None:
    page = enter("owner", permissions=["clipboard-read", "clipboard-write"])
    page.goto("/console/ledger?kind=charge")
    cell = page.locator("tbody td.money .amount").first

    cell.evaluate("(each) => getSelection().selectAllChildren(each)")
    page.keyboard.press("Control+c")

    shown = cell.text_content() or ""
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == shown.replace("\N{MINUS SIGN}", "-")
    assert float(copied) < 0


def test_chart_has_the_values_of_its_table(site: Site, enter: Enter) -> None:
    page = enter("owner")
    watched = Watched(page)
    watched.visit("/console/usage?by=day")

    expect(page.get_by_role("img", name="Net cost by day")).to_be_visible()
    expect(page.locator("figure canvas")).to_be_visible()
    assert page.locator("figure table tbody tr").count() >= 2
    assert watched.inspect() == []


def test_link_leaves_no_secret_behind_and_another_one_enters_again(
    site: Site, enter: Enter
) -> None:
    page = enter("operator")
    first = page.context.cookies()

    link = site.link("auditor")
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_url(f"{site.url}/console")

    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0
    assert page.evaluate("location.hash") == ""
    second = page.context.cookies()
    assert {each["name"] for each in first} == {each["name"] for each in second}
    tokens = [
        {each["value"] for each in jar if each["name"] == "tollgate"} for jar in (first, second)
    ]
    assert tokens[0] != tokens[1]
    page.go_back()
    assert link.partition("#")[2] not in page.url

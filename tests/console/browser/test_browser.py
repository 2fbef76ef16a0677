"""The console in a real browser: every page, by every way of using it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, Route, expect

from gateway.console.roles import AnyRole
from tests.console.browser.conftest import Enter, Site
from tests.console.browser.inspection import Watched
from tests.console.routes import pages_of
from tests.console.seeding import HOSTILE

MENUS = (
    "header details.menu > summary >> nth=0",
    "#zone > summary",
    "header details.menu > summary >> nth=2",
    "[data-open=shortcuts]",
    "[data-palette]",
    "nav.bar details > summary",
    "details.filter-box > summary",
)
"""What opens the menus, dialogs and filters of a page."""
BROKEN = """\
<!doctype html><html lang="en"><title>Broken</title>
<script>document.title = "ran"</script>
<img src="/console/nothing.png">
<input>
<p style="width: 4000px; height: 9px; background: red"></p>
<pre>{wide}</pre>
</html>
"""


@pytest.mark.parametrize(
    ("scheme", "width", "role"),
    [
        ("light", 1280, "operator"),
        pytest.param("dark", 390, "operator", marks=pytest.mark.long),
        pytest.param("dark", 1280, "owner", marks=pytest.mark.long),
        pytest.param("light", 390, "owner", marks=pytest.mark.long),
        pytest.param("light", 1280, "owner", marks=pytest.mark.long),
        ("dark", 390, "owner"),
        pytest.param("dark", 1280, "operator", marks=pytest.mark.long),
        pytest.param("light", 390, "operator", marks=pytest.mark.long),
    ],
)
def test_pages_break_no_rule(
    role: AnyRole, scheme: str, width: int, site: Site, enter: Enter
) -> None:
    page = enter(role, color_scheme=scheme, viewport={"width": width, "height": 844})
    watched = Watched(page)

    found = []
    for path in pages_of(site.app, role, site.seeded):
        watched.visit(path)
        found += [f"{path}: {problem}" for problem in watched.inspect(targets=True)]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1280),
        ("dark", 390),
        pytest.param("light", 390, marks=pytest.mark.long),
        pytest.param("dark", 1280, marks=pytest.mark.long),
    ],
)
def test_open_menus_and_dialogs_break_no_rule(
    scheme: str, width: int, site: Site, enter: Enter
) -> None:
    page = enter("operator", color_scheme=scheme, viewport={"width": width, "height": 844})
    watched = Watched(page)

    found = []
    for opener in MENUS:
        watched.visit("/console/requests")
        if not page.locator(opener).first.is_visible():
            continue
        page.locator(opener).first.click()
        found += [f"{opener}: {problem}" for problem in watched.inspect()]

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
    page.get_by_role("combobox", name="Status").select_option("succeeded")
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


def test_new_secret_is_shown_once_and_is_nowhere_else(site: Site, enter: Enter) -> None:
    page = enter("owner")
    sent: list[str] = []
    page.on("request", lambda each: sent.append(f"{each.url} {each.headers} {each.post_data}"))

    page.goto("/console/keys/new")
    page.get_by_label("Name").fill("shown once")
    page.get_by_role("button", name="Create the key").click()
    secret = page.locator("#secret").inner_text()
    assert secret.startswith("tg_")
    assert is_empty(page)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as .env").click()
    assert saved.value.path().read_text() == f"TOLLGATE_API_KEY={secret}\n"
    page.reload()
    after = [page.content()]
    page.goto("/console/models")
    after.append(page.content())
    for _ in range(3):
        page.go_back()
        after.append(page.content())
    page.go_forward()
    after.append(page.content())

    assert secret[:7] in after[0]
    assert not any(secret in each for each in (*after, *sent))


def is_empty(page: Page) -> bool:
    """Whether scripts can read nothing that outlives the page."""
    kept = "() => [document.cookie, localStorage.length, sessionStorage.length]"
    return bool(page.evaluate(kept) == ["", 0, 0])


SECRET = re.compile(r"tga?_[\w-]{30,}")


@pytest.mark.parametrize("role", ["operator", "owner"])
def test_no_page_has_a_secret(role: AnyRole, site: Site, enter: Enter) -> None:
    page = enter(role)
    page.goto("/console/sessions")
    assert is_empty(page)

    for path in pages_of(site.app, role, site.seeded):
        assert not SECRET.search(page.request.get(path).text()), path


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


def test_mistake_in_the_catalog_leads_to_its_line(site: Site, enter: Enter) -> None:
    page = enter("operator")
    watched = Watched(page)
    watched.visit("/console/catalog")
    text = page.get_by_label("Text of the catalog")
    expect(page.locator(".gutter span").first).to_have_text("1")

    text.fill(text.input_value().replace('"0.40"', "0.40"))
    page.get_by_role("button", name="Check").click()
    page.locator("#problems a").first.click()

    expect(text).to_be_focused()
    chosen = "(area) => area.value.slice(area.selectionStart, area.selectionEnd)"
    assert "0.40" in text.evaluate(chosen)
    expect(page.locator(".gutter .wrong")).to_have_count(1)
    assert page.get_by_role("button", name="Save and reload").count() == 0
    assert watched.inspect() == []


def test_lines_of_a_chart_are_the_columns_of_its_table(site: Site, enter: Enter) -> None:
    page = enter("finance")
    watched = Watched(page)
    watched.visit("/console/plan?model=llama-3.3-70b&gpu=H200,H100&hour=3&dtype=fp8")

    expect(page.get_by_role("img", name="Cost of a million output tokens")).to_be_visible()
    expect(page.locator("figure canvas")).to_be_visible()
    names = page.locator(".legend span").all_inner_texts()
    heads = page.locator("figure th.number").all_inner_texts()
    assert [f"{name}, $" for name in names] == heads
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


def test_palette_finds_by_keyboard_alone(site: Site, enter: Enter) -> None:
    page = enter("operator")
    watched = Watched(page)
    watched.visit("/console")
    palette, field = page.locator("#palette"), page.locator("#palette-text")

    page.keyboard.press("Control+k")
    expect(field).to_be_focused()
    expect(palette.locator(".found a")).not_to_have_count(0)
    page.keyboard.type("gatew")
    expect(palette.locator(".found a")).to_have_count(1)
    assert watched.inspect() == []
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/gateways")

    page.keyboard.press("Control+k")
    page.keyboard.type("at")
    expect(palette.locator(".found")).to_contain_text("atlas")
    while "Account" not in page.evaluate("document.activeElement.textContent"):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/console/accounts/\d+$"))
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    expect(palette).to_be_hidden()
    page.keyboard.press("g")
    page.keyboard.press("Shift+U")
    page.wait_for_url("**/console/users")


def test_account_is_switched_by_the_start_of_its_name(site: Site, enter: Enter) -> None:
    page = enter("operator")
    page.goto("/console")

    page.locator("summary", has_text="all accounts").click()
    page.get_by_label("Account, by name or number").press_sequentially("zen")
    page.locator("#menu-accounts button", has_text="zenith").click()

    expect(page.locator("summary", has_text="zenith")).to_be_visible()


def test_keys_copy_an_id_and_tick_a_row(site: Site, enter: Enter) -> None:
    page = enter("owner", permissions=["clipboard-read", "clipboard-write"])
    page.goto("/console/requests?status=running")
    page.goto("/console/requests")

    page.keyboard.press("j")
    page.keyboard.press("c")
    id = page.evaluate("document.activeElement.pathname.split('/').at(-1)")
    expect(page.locator("#said")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == id
    tick = page.locator("main .rows tbody tr").first.locator("input[type=checkbox]")
    if tick.count():
        page.keyboard.press("x")
        expect(tick).to_be_checked()

"""What pages are to people who see, point or hear differently: charts, colours, sizes, keys."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect
from playwright.sync_api import TimeoutError as TooLate

from gateway.console.navigation import PLACES
from gateway.console.roles import MAY, AnyRole
from tests.console.browser.conftest import Enter, Site
from tests.console.browser.inspection import Watched
from tests.console.routes import pages_of

CHARTS = (
    "/console/usage?by=day",
    "/console/usage?by=day&by2=model&vs=before",
    "/console/margins?by=model",
    "/console/plan?model=llama-3.3-70b&gpu=H200,H100&hour=3&dtype=fp8",
)
DRAWN = """\
(figure) => [...figure.querySelectorAll("tbody tr[data-value]")].map((row) => [
  Number(row.dataset.value),
  [...row.children].map((cell) => Number(cell.textContent.replace(/[^0-9.\\u2212-]/g, "").replace("\\u2212", "-"))),
])
"""  # noqa: E501
CONTRAST = """\
() => {
  const parts = (color) => {
    const pen = new OffscreenCanvas(1, 1).getContext("2d");
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (color) => {
    const [r, g, b] = parts(color).map((each) => each / 255)
      .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let each = node.parentElement; each; each = each.parentElement) {
      const { backgroundColor } = getComputedStyle(each);
      if (!/, 0\\)$|^transparent$/.test(backgroundColor)) return backgroundColor;
    }
    return getComputedStyle(document.documentElement).backgroundColor;
  };
  const at = document.activeElement;
  const found = [light(getComputedStyle(at).outlineColor), light(ground(at))];
  return (Math.max(...found) + 0.05) / (Math.min(...found) + 0.05);
}
"""
FIRST_FRAME = """\
window.firstFrame = new Promise((known) => {
  const look = () => {
    if (!document.body) return requestAnimationFrame(look);
    known(getComputedStyle(document.documentElement).backgroundColor);
  };
  requestAnimationFrame(look);
});
"""
PAINTED = """\
() => {
  const [paint] = performance.getEntriesByName("first-paint");
  if (!paint) return null;
  const sheet = performance.getEntriesByType("resource").find(({ name }) => name.endsWith(".css"));
  return [paint.startTime, sheet.responseEnd];
}
"""
BORDERS = """\
() => [...document.querySelectorAll("button, .button, input:not([type=hidden]), select, textarea, dialog, .panel")]
  .filter((each) => each.checkVisibility() && !each.matches("[type=checkbox], [type=radio], [type=range], [type=file]"))
  .filter((each) => {
    const { borderTopStyle, borderTopWidth } = getComputedStyle(each);
    return borderTopStyle === "none" || Number.parseFloat(borderTopWidth) < 1;
  })
  .map((each) => each.outerHTML.slice(0, 90))
"""  # noqa: E501
GROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 18, 22)"}


def test_charts_are_named_and_their_tables_are_heard(site: Site, enter: Enter) -> None:
    page = enter("operator")
    seen = 0

    for path in CHARTS:
        page.goto(path)
        for figure in page.locator("figure:is([data-chart], [data-lines])").all():
            seen += 1
            expect(figure.get_by_role("img")).to_have_attribute("aria-label", re.compile("table"))
            expect(figure.get_by_role("img").locator("canvas")).to_have_count(1)
            # Found by its role, the table is one that screen readers have.
            table = figure.get_by_role("table")
            expect(table).to_have_count(1)
            assert table.get_by_role("row").count() > 2
            for drawn, written in figure.evaluate(DRAWN):
                assert drawn in written, path

    assert seen >= len(CHARTS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ring_of_the_focus_stands_out(scheme: str, site: Site, enter: Enter) -> None:
    page = enter("owner", color_scheme=scheme)
    page.goto("/console/keys")

    ratios = []
    for _ in range(40):
        page.keyboard.press("Tab")
        ratios.append(page.evaluate(CONTRAST))

    assert min(ratios) >= 3


def test_each_page_is_reached_by_its_keys(site: Site, enter: Enter) -> None:
    page = enter("operator")
    page.goto("/console?account=atlas")
    page.goto("/console/requests?account=atlas")

    wrong = []
    for place in [place for _, places in PLACES for place in places if place.key]:
        if "operator" not in MAY[place.act] or not page.locator(f"[data-go='{place.key}']").count():
            continue
        page.keyboard.press("g")
        page.keyboard.press(place.key)
        try:
            page.wait_for_url(re.compile(rf"{re.escape(place.path)}(/\d+.*)?(\?.*)?$"))
        except TooLate:
            wrong.append(f"g {place.key}: {page.url}")

    assert not wrong, "\n".join(wrong)


def test_keys_of_a_list_do_what_their_buttons_do(site: Site, enter: Enter) -> None:
    page = enter("owner")
    page.goto("/console/requests")

    page.keyboard.press("]")
    page.wait_for_url(re.compile("after=|before=|cursor="))
    page.keyboard.press("[")
    expect(page.locator("main .rows tbody tr").first).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    second = page.evaluate("document.activeElement.href")
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.href") != second
    page.keyboard.press("z")
    expect(page.locator("#zone input:not([type=hidden])").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#zone > summary")).to_be_focused()
    with page.expect_download() as found:
        page.keyboard.press("e")
    assert found.value.suggested_filename.endswith(".csv")
    page.keyboard.press("t")
    expect(page.get_by_role("button", name="Stop the tail")).to_be_visible()
    page.goto("/console/keys")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.closest('.filters') !== null")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_forced_colours_keep_borders_and_words(scheme: str, site: Site, enter: Enter) -> None:
    page = enter("operator", forced_colors="active", color_scheme=scheme)
    watched = Watched(page)

    found = []
    for path in ("/console", "/console/requests", "/console/keys", "/console/usage?by=day"):
        watched.visit(path)
        found += [f"{path}: {each}" for each in (*watched.inspect(), *page.evaluate(BORDERS))]
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"

    assert not found, "\n".join(found)


@pytest.mark.parametrize("chosen", ["light", "dark"])
def test_first_frame_has_the_ground_of_the_theme(chosen: str, site: Site, enter: Enter) -> None:
    other = {"light": "dark", "dark": "light"}[chosen]
    page = enter("owner", color_scheme=other)
    page.goto("/console/home")
    assert _ground(page) == GROUNDS[other]
    while page.locator("html").get_attribute("data-theme") != chosen:
        page.keyboard.press("d")
        page.wait_for_load_state()
    page.add_init_script(FIRST_FRAME)

    page.goto("/console/keys")

    assert page.evaluate("window.firstFrame") == GROUNDS[chosen] == _ground(page)
    # The entry of the first paint comes a moment after its frame.
    painted, styled = page.wait_for_function(PAINTED).json_value()
    assert painted >= styled


def _ground(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))


@pytest.mark.parametrize("role", ["operator", pytest.param("owner", marks=pytest.mark.long)])
def test_pages_fit_at_twice_the_size(role: AnyRole, site: Site, enter: Enter) -> None:
    # 200 % of a window of 1280 px is one of 640 px with twice as many device pixels.
    page = enter(role, viewport={"width": 640, "height": 422}, device_scale_factor=2)
    watched = Watched(page)

    found = []
    for path in pages_of(site.app, role, site.seeded):
        watched.visit(path)
        found += [f"{path}: {each}" for each in watched.inspect(axe=False)]

    assert not found, "\n".join(found)

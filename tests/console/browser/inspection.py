"""What must hold for every page in a real browser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from playwright.sync_api import ConsoleMessage, Dialog, Page, Request

Scheme: TypeAlias = Literal["light", "dark"]
SMALL = 390
"""Width of a small screen, on which targets are to be large."""
TWO_VIEWS: Sequence[tuple[Scheme, int]] = (("light", 1280), ("dark", SMALL))
EVERY_VIEW: Sequence[tuple[Scheme, int]] = (*TWO_VIEWS, ("dark", 1280), ("light", SMALL))
AXE = (Path(__file__).parents[1] / "vendor" / "axe.min.js").read_text()
RECORD_VIOLATIONS = """\
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample}`);
});
"""
RUN_AXE = """\
async () => {
  const options = { resultTypes: ["violations"], runOnly: ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"] };
  const found = await axe.run(document, options);
  return found.violations
    .filter((each) => ["serious", "critical"].includes(each.impact))
    .map((each) => `${each.id}: ${each.nodes.map((node) => node.html.slice(0, 160)).slice(0, 3).join(" | ")}`);
}
"""  # noqa: E501
SMALL_TARGETS = """\
() => [...document.querySelectorAll("button, .button, select, summary, nav.bar a, input:not([type=checkbox], [type=radio], [type=hidden])")]
  .filter((each) => each.checkVisibility() && !each.closest("p, td, .copy, dialog:not([open])"))
  .map((each) => [each, each.getBoundingClientRect()])
  .filter(([, { width, height }]) => width > 0 && (width < 43.5 || height < 43.5))
  .map(([each, { width, height }]) => `${each.outerHTML.slice(0, 90)} is ${width.toFixed()} x ${height.toFixed()}`)
"""  # noqa: E501
WIDER = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Watched:
    """Problems of the pages that a tab shows."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("console", self._on_message)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))

    def visit(self, path: str) -> None:
        answer = self.page.goto(path)
        assert answer is not None
        assert answer.status == 200, f"{path}: {answer.status}"
        self._wait_for_parts()

    def inspect(self, *, axe: bool = True, targets: bool = False) -> list[str]:
        """Return what is wrong with the page as it is now, and forget it; ``targets`` are examined
        on a small screen only."""
        found, self.problems[:] = [*self.problems], []
        found += [f"policy: {each}" for each in self.page.evaluate("window.violations")]
        found += self._too_wide()
        size = self.page.viewport_size
        if targets and size and size["width"] == SMALL:
            found += [f"small: {each}" for each in self.page.evaluate(SMALL_TARGETS)]
        if axe:
            self._wait_for_parts()
            self.page.evaluate(AXE)
            found += [f"axe: {each}" for each in self.page.evaluate(RUN_AXE)]
        return found

    def _wait_for_parts(self) -> None:
        # Parts that are being loaded are faded, which is not their contrast.
        self.page.wait_for_selector(".htmx-request", state="detached")

    def inspect_views(self, views: Sequence[tuple[Scheme, int]] = EVERY_VIEW) -> list[str]:
        """Inspect the page as it is now in several schemes and widths."""
        found = []
        for scheme, width in views:
            self.page.emulate_media(color_scheme=scheme)
            self.page.set_viewport_size({"width": width, "height": 844})
            found += [f"{scheme}, {width} px: {each}" for each in self.inspect(targets=True)]
        return found

    def _too_wide(self) -> Iterator[str]:
        if (wider := self.page.evaluate(WIDER)) > 0:
            yield f"wider than the window by {wider} px"

    def _on_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")


class Walker(Watched):
    """Also notes what pages request from elsewhere, or as no page of ours does, and open."""

    def __init__(self, page: Page, url: str) -> None:
        super().__init__(page)
        self._origin = f"{url}/"
        page.on("request", self._on_request)
        page.on("dialog", self._on_dialog)

    def _on_request(self, request: Request) -> None:
        path = urlsplit(request.url).path
        if not request.url.startswith(self._origin) or path in ("/console/leave", "/console/x"):
            self.problems.append(f"requested {request.url}")

    def _on_dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"opened a dialog: {dialog.message}")
        dialog.dismiss()

"""What must hold for every page in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import ConsoleMessage, Page

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
        # Parts that are being loaded are faded, which is not their contrast.
        self.page.wait_for_selector(".htmx-request", state="detached")

    def inspect(self, *, axe: bool = True) -> list[str]:
        """Return what is wrong with the page as it is now, and forget it."""
        found, self.problems[:] = [*self.problems], []
        found += [f"policy: {each}" for each in self.page.evaluate("window.violations")]
        found += self._too_wide()
        if axe:
            self.page.evaluate(AXE)
            found += [f"axe: {each}" for each in self.page.evaluate(RUN_AXE)]
        return found

    def _too_wide(self) -> Iterator[str]:
        if (wider := self.page.evaluate(WIDER)) > 0:
            yield f"wider than the window by {wider} px"

    def _on_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

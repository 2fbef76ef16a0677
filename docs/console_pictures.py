"""Renews the pictures of the console in ``docs/img`` from an installation that ``tollgate demo``
filled: ``make console-pictures``, while its ``tollgate up`` runs.

Needs Chromium, Playwright and Pillow, as the tests of pages do.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from sqlalchemy import select

from gateway.accounts.pepper import read_pepper
from gateway.audit_log import Author
from gateway.operations.entrance.links import LinkBody, create_link
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.tables.core import receipts

PICTURES: Final = Path(__file__).parent / "img"
BYTES_MAX: Final = 40_000
PLAY: Final = "/console/playground"
SCROLL: Final = """\
() => {
  const small = innerWidth < 760;
  const shown = document.querySelector(small ? "#made" : ".graph");
  const top = shown ? shown.getBoundingClientRect().top + scrollY - 96 : 0;
  scrollTo({ top, behavior: "instant" });
}
"""
"""Shows what was made: a workflow has its steps above it, a small screen the form."""
AUTHOR: Final = Author("console pictures", "cli")


@dataclass(frozen=True)
class Picture:
    """A page as a visitor sees it: an operator or, with an account, its owner. ``fill`` has what is
    entered in the playground's form, by labels, before it is ordered."""

    name: str
    path: str
    account: str | None = None
    width: int = 1280
    height: int = 800
    dark: bool = False
    fill: Mapping[str, str] | None = None


def pictures(request_id: str) -> list[Picture]:
    one = f"/console/requests/{request_id}"
    return [
        Picture("console-overview", "/console"),
        Picture("console-requests", "/console/requests", height=560),
        Picture("console-request", one, account="northwind", height=860),
        Picture(
            "console-playground",
            f"{PLAY}?task=text-to-image&n=2",
            account="northwind",
            height=780,
            fill={"Prompt": "a red circle above a blue square"},
        ),
        Picture(
            "console-play-chat",
            f"{PLAY}?model=pocket-chat",
            account="northwind",
            height=720,
            fill={"Message": "What is a hold?"},
        ),
        Picture(
            "console-play-workflow",
            f"{PLAY}?model=pocket-talking-head&from-image=ours/0",
            account="northwind",
            height=860,
            fill={"Text": "Good morning."},
        ),
        Picture(
            "console-play-music-small",
            f"{PLAY}?model=pocket-music&seconds=6",
            account="northwind",
            width=390,
            dark=True,
            fill={"Prompt": "a calm waltz"},
        ),
        Picture("console-pick", "/console/pick?q=product+photos&budget=0.05", height=900),
        Picture("console-margins", "/console/margins", height=720),
        Picture("console-ledger", "/console/ledger?account=northwind", height=720),
        Picture("console-usage", "/console/usage?by=model", account="northwind", height=720),
        Picture("console-request-small", one, account="northwind", width=390, dark=True),
    ]


def main() -> None:
    settings = Settings()
    database = Database(settings.sql_url)
    try:
        with database.snapshot() as connection:
            # A chat of today, whose answer is still kept.
            newest = select(receipts.c.request_id).where(
                receipts.c.model == "pocket-chat", receipts.c.status == "succeeded"
            )
            request_id = connection.execute(
                newest.order_by(receipts.c.request_id.desc()).limit(1)
            ).scalar_one()
        with sync_playwright() as playwright:
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            path = os.environ.get("TOLLGATE_TEST_BROWSER") or shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=path, args=arguments)
            for picture in pictures(str(request_id)):
                page = _enter(browser, settings, database, picture)
                page.goto(f"{settings.console_url}{picture.path}")
                page.wait_for_load_state("load")
                if picture.fill is not None:
                    _order(page, picture.fill)
                page.wait_for_timeout(1500)
                _save(page.screenshot(), PICTURES / f"{picture.name}.webp")
                page.context.close()
            browser.close()
    finally:
        database.dispose()


def _enter(browser: Browser, settings: Settings, database: Database, picture: Picture) -> Page:
    where = {} if picture.account is None else {"account": picture.account, "role": "owner"}
    with database.transaction() as connection:
        body = LinkBody.model_validate(where)
        link = create_link(connection, AUTHOR, body, pepper=read_pepper(settings))
    context = browser.new_context(
        viewport={"width": picture.width, "height": picture.height},
        color_scheme="dark" if picture.dark else "light",
    )
    page = context.new_page()
    page.goto(f"{settings.console_url}{link['path']}")
    page.wait_for_url(lambda url: "enter" not in url)
    return page


def _order(page: Page, fill: Mapping[str, str]) -> None:
    """Order what a form is filled with, and scroll to what was made."""
    for label, text in fill.items():
        page.get_by_label(label).first.fill(text)
    page.locator("#order").click()
    page.wait_for_selector("#made .charged", timeout=120_000)
    # What was made has played, and is drawn.
    page.wait_for_selector("#made [data-live]", state="detached", timeout=60_000)
    page.evaluate(SCROLL)


def _save(png: bytes, path: Path) -> None:
    """Write a picture without loss or, if that is larger than ``BYTES_MAX``, by its quality."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    file = io.BytesIO()
    image.save(file, "WEBP", lossless=True, quality=100, method=4)
    for quality in range(85, 5, -5):
        if file.tell() <= BYTES_MAX:
            break
        file = io.BytesIO()
        image.save(file, "WEBP", quality=quality, method=6)
    path.write_bytes(file.getvalue())


if __name__ == "__main__":
    main()

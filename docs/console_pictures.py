"""Renews the pictures of the console in ``docs/img`` from an installation that ``tollgate demo``
filled: ``make console-pictures``, while its ``tollgate up`` runs.

Needs Chromium, Playwright and Pillow, as the tests of pages do.
"""

from __future__ import annotations

import io
import os
import shutil
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
AUTHOR: Final = Author("console pictures", "cli")


@dataclass(frozen=True)
class Picture:
    """A page as a visitor sees it: an operator or, with an account, its owner."""

    name: str
    path: str
    account: str | None = None
    width: int = 1280
    height: int = 800
    dark: bool = False


def pictures(request_id: str) -> list[Picture]:
    one = f"/console/requests/{request_id}"
    return [
        Picture("console-overview", "/console"),
        Picture("console-requests", "/console/requests", height=560),
        Picture("console-request", one, account="northwind", height=860),
        Picture(
            "console-playground",
            "/console/playground?task=text-to-image",
            account="northwind",
            height=640,
        ),
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


def _save(png: bytes, path: Path) -> None:
    """Write a picture as small as ``BYTES_MAX``, by its quality."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for quality in range(85, 5, -5):
        file = io.BytesIO()
        image.save(file, "WEBP", quality=quality, method=6)
        if file.tell() <= BYTES_MAX:
            break
    path.write_bytes(file.getvalue())


if __name__ == "__main__":
    main()

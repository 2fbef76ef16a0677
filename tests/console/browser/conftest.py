"""A real browser, and the console served to it with a week of traffic."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from litestar import Litestar
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from gateway.sql.database import Database
from tests.console.browser.inspection import RECORD_VIOLATIONS
from tests.console.seeding import Seeded, seed
from tests.console.serving import served_settings, serving
from tests.console.visiting import open_link
from tests.databases import Databases
from tests.stack import CATALOG

if TYPE_CHECKING:
    from tests.gateway.test_pictures import Service

PATH = "TOLLGATE_TEST_BROWSER"
REQUIRED = "TOLLGATE_TEST_BROWSER_REQUIRED"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 30_000
"""A busy machine takes long to answer."""

expect.set_options(timeout=PATIENCE_MS)


@dataclass(frozen=True)
class Site:
    """The console at an address, and what it shows."""

    url: str
    database_url: str
    seeded: Seeded
    catalog: Path = Path()
    served: Litestar | None = None

    @property
    def app(self) -> Litestar:
        """The application that is served, within this process."""
        assert self.served is not None
        return self.served

    @property
    def request(self) -> str:
        """A request that was charged."""
        return self.seeded.requests["atlas"][-3]

    @property
    def open_request(self) -> str:
        return self.seeded.requests["atlas"][-1]

    def link(self, role: str) -> str:
        """Return a one-time address for a new person with a role."""
        database = Database(self.database_url)
        try:
            made = open_link(database, role, "atlas")
        finally:
            database.dispose()
        return f"{self.url}{made['path']}"


def chromium_path() -> str:
    """Find the system's Chromium; without one, skip the test, or fail where it is required."""
    path = os.environ.get(PATH) or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        how = f"no Chromium here: apt-get install chromium, or set {PATH}"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(how)
        pytest.skip(how)
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The system's Chromium; without one, tests are skipped, or fail where it is required.

    Only for one module: while Playwright runs, no asynchronous test can run in this process.
    """
    path = chromium_path()
    # The sandbox of Chromium does not run as root, as in containers.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    arguments += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    seeded = seed(database, catalog)
    database.dispose()
    settings = served_settings(directory, url, valkey)
    with serving(settings) as served:
        yield Site(f"http://127.0.0.1:{settings.port}", url, seeded, catalog, served.app)


@pytest.fixture(scope="package")
def looking() -> Iterator[Service]:
    """Somebody else's model, which sees pictures."""
    # Imported here because it brings in libraries that take seconds, which few modules need.
    from tests.console.browser.playing import somebody_elses_model

    with somebody_elses_model() as service:
        yield service


@pytest.fixture(scope="package")
def playground(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str, looking: Service
) -> Iterator[Site]:
    """A gateway and a worker with a model for every task, and an account with credit."""
    from tests.console.browser.playing import served

    with served(tmp_path_factory.mktemp("playground"), postgres, valkey, looking) as site:
        yield site


Enter = Callable[..., Page]


@pytest.fixture
def enter(chromium: Browser, site: Site) -> Iterator[Enter]:
    """Open a page in a new browser profile in which a person with a role has entered."""
    contexts: list[BrowserContext] = []

    def open_page(role: str, **options: object) -> Page:
        context = chromium.new_context(base_url=site.url, reduced_motion="reduce")
        contexts.append(context)
        page = context.new_page()
        page.goto(site.link(role))
        page.wait_for_url(lambda address: "/enter" not in address)
        if options:
            kept = context.storage_state()
            context = chromium.new_context(
                base_url=site.url, reduced_motion="reduce", storage_state=kept, **options
            )  # type: ignore[arg-type]  # options of playwright
            contexts.append(context)
            page = context.new_page()
        context.add_init_script(RECORD_VIOLATIONS)
        page.set_default_timeout(PATIENCE_MS)
        return page

    yield open_page
    for context in contexts:
        context.close()

"""A real browser, and the console served to it with a week of traffic."""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from gateway.app import create_app
from gateway.audit_log import Author
from gateway.operations.entrance.links import LinkBody, create_link
from gateway.settings import Settings
from gateway.sql.database import Database
from tests.console.browser.inspection import RECORD_VIOLATIONS
from tests.console.seeding import Seeded, seed
from tests.databases import Databases
from tests.stack import CATALOG, PEPPER, free_port

PATH = "TOLLGATE_TEST_BROWSER"
REQUIRED = "TOLLGATE_TEST_BROWSER_REQUIRED"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MEMBERS = ("owner", "member", "viewer")


@dataclass(frozen=True)
class Site:
    """The console at an address, and what it shows."""

    url: str
    database_url: str
    seeded: Seeded

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
        where = {"account": "atlas"} if role in MEMBERS else {}
        name = f"{role} {uuid.uuid4().hex[:8]}"
        body = LinkBody.model_validate({"role": role, "name": name, **where})
        try:
            with database.transaction() as connection:
                made = create_link(connection, Author("test", "cli"), body, pepper=PEPPER.encode())
        finally:
            database.dispose()
        return f"{self.url}{made['path']}"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The system's Chromium; without one, tests are skipped, or fail where it is required.

    Only for one module: while Playwright runs, no asynchronous test can run in this process.
    """
    path = os.environ.get(PATH) or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        how = f"no Chromium here: apt-get install chromium, or set {PATH}"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(how)
        pytest.skip(how)
    # The sandbox of Chromium does not run as root, as in containers.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
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
    port = free_port()
    settings = Settings.model_validate(
        {
            "home": directory / "home",
            "catalog": catalog,
            "database_url": url,
            "redis_url": valkey,
            "namespace": f"t{uuid.uuid4().hex[:8]}",
            "pepper": PEPPER,
            "port": port,
        }
    )
    with serving(settings):
        yield Site(f"http://127.0.0.1:{port}", url, seeded)


class serving:  # lower case, like other context managers
    """Serves the gateway in a thread of this process."""

    def __init__(self, settings: Settings) -> None:
        Path(settings.home).mkdir(parents=True, exist_ok=True)
        config = uvicorn.Config(create_app(settings), port=settings.port, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="console")

    def __enter__(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            assert self._thread.is_alive(), "the gateway ended"
            assert time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=30)


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
        page.set_default_timeout(8_000)
        return page

    yield open_page
    for context in contexts:
        context.close()

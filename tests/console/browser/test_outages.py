"""Live pages while the gateway is restarted, and while the queue server is away."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from gateway.settings import Settings
from gateway.sql.database import Database
from tests.console.browser.conftest import Enter, Site
from tests.console.browser.test_live import make_requests
from tests.console.seeding import seed
from tests.console.serving import serving
from tests.databases import Databases
from tests.servers import queue_server
from tests.stack import CATALOG, PEPPER, free_port


class Parts:
    """A gateway and a queue server that can be stopped."""

    def __init__(self, settings: Settings, queue: contextlib.ExitStack) -> None:
        self._settings = settings
        self._queue = queue
        self._gateway: serving | None = None

    def start_gateway(self) -> None:
        self._gateway = serving(self._settings).__enter__()

    def stop_gateway(self) -> None:
        if self._gateway is not None:
            self._gateway.__exit__()
            self._gateway = None

    def stop_queue(self) -> None:
        self._queue.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Iterator[tuple[Site, Parts]]:
    directory: Path = tmp_path_factory.mktemp("outages")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    seeded = seed(database, catalog, requests=20)
    database.dispose()
    with contextlib.ExitStack() as queue:
        values = {
            "home": directory / "home",
            "catalog": catalog,
            "database_url": url,
            "redis_url": queue.enter_context(queue_server("valkey")),
            "namespace": f"t{uuid.uuid4().hex[:8]}",
            "pepper": PEPPER,
            "port": (port := free_port()),
        }
        parts = Parts(Settings.model_validate(values), queue)
        parts.start_gateway()
        yield Site(f"http://127.0.0.1:{port}", url, seeded, catalog), parts
        parts.stop_gateway()


@pytest.fixture(scope="module")
def site(served: tuple[Site, Parts]) -> Site:
    return served[0]


def test_stream_does_not_delay_a_restart_and_resumes_after_it(
    served: tuple[Site, Parts], enter: Enter
) -> None:
    site, parts = served
    page = enter("operator")
    page.goto("/console")
    mark, earned = page.locator("#live"), page.locator("[data-text=earned_of]")
    expect(mark).to_have_attribute("data-state", "live")
    before = earned.inner_text()

    began = time.monotonic()
    parts.stop_gateway()
    assert time.monotonic() < began + 20
    expect(mark).to_contain_text("reconnecting")
    assert earned.inner_text() == before

    parts.start_gateway()
    expect(mark).to_have_attribute("data-state", "live", timeout=20_000)
    make_requests(site, 2)
    expect(earned).not_to_have_text(before)


def test_queue_server_that_is_away_is_said_and_figures_of_the_ledger_stay(
    served: tuple[Site, Parts], enter: Enter
) -> None:
    site, parts = served
    page = enter("auditor")
    page.goto("/console")
    expect(page.locator("#live")).to_have_attribute("data-state", "live")
    band, earned = page.locator("[data-text=trouble]"), page.locator("[data-text=earned_of]")
    expect(band).to_be_hidden()
    before = earned.inner_text()

    parts.stop_queue()

    expect(band).to_contain_text("The queue server does not answer", timeout=15_000)
    expect(page.locator("h1")).to_have_text("The queue server does not answer")
    make_requests(site, 2)
    expect(earned).not_to_have_text(before)
    page.goto(f"/console/requests/{site.open_request}")
    expect(page.locator("[data-text=status]")).to_have_text("queued")

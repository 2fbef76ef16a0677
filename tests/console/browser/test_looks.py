"""Pages look as they did: eight of them, in light and dark, on wide and small screens.

``make console-pictures`` renews the pictures. A difference is a warning, and a failure where a
browser is required that is the one, with the fonts, by which the pictures were made.
"""

from __future__ import annotations

import asyncio
import os
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from unittest import mock

import pytest
import time_machine
from playwright.sync_api import Browser, BrowserContext, Cookie, Page, Route, sync_playwright
from sqlalchemy import update

from gateway.accounts.accounts import change_account
from gateway.audit_log import Author
from gateway.billing.reconciliation import prove_here, run_reconciliation
from gateway.billing.usage.rollups import build_due, build_due_days
from gateway.operations.entrance.links import LinkBody, create_link
from gateway.operations.running import gateways
from gateway.sql.database import Database
from gateway.tables.core import keys
from tests.console.browser.conftest import REQUIRED, Site, chromium_path
from tests.console.browser.inspection import EVERY_VIEW, Scheme
from tests.console.browser.looks import (
    BYTES_MAX,
    DIFFERENCE_MAX,
    FOLDER,
    difference,
    encoded,
    font_configuration,
    means_of,
    record,
    recorded_means,
)
from tests.console.seeding import seed
from tests.console.serving import served_settings, serving
from tests.databases import Databases
from tests.stack import PEPPER
from workers.contract.announcements import Announcement, ModelState, Workers
from workers.contract.redis import connect

RENEW: Final = "TOLLGATE_TEST_PICTURES"
NOW: Final = datetime(2026, 3, 18, 15, 4, 5, tzinfo=UTC)
CATALOG: Final = """\
version: 1
models:
  - name: chat-small
    task: text-generation
    engine: echo
    description: Answers short questions, calls tools and writes JSON.
    good_for: [chat]
    limits: {context_tokens: 4096, output_tokens: 512, choices: 4}
    price:
      - {unit: input_token, amount: "0.02", per: 1000000}
      - {unit: output_token, amount: "0.08", per: 1000000}
  - name: painter
    task: text-to-image
    engine: diffusion
    checkpoint: painter
    sizes: ["1024x1024"]
    qualities: {low: {steps: 4}, high: {steps: 8}}
    limits: {images: 4, steps: 50, guidance: 10, characters: 500}
    default_parameters: {quality: high}
    price:
      - {unit: image, amount: "0.0004"}
      - {unit: image, amount: "0.0008", when: {quality: high}}
    examples: [{prompt: "a lighthouse at dusk"}]
  - name: voice
    task: text-to-speech
    engine: speech
    checkpoint: voice
    limits: {characters: 500, seconds: 60}
    price: [{unit: character, amount: "0.001", per: 1000}]
"""
LIVE: Final = "**/console/live*"
"""The stream of what changes, which never begins: it also makes the gateway read more."""
WAITS, WAIT_MS = 5, 1_000
"""How often and how long a page is waited for that a busy machine has not yet drawn as it is."""
WIDE, SMALL = 800, 844
"""Heights of the screens."""


@dataclass(frozen=True)
class Look:
    """A page, as an operator or an account's owner sees it once ``shown`` is on it."""

    name: str
    path: str
    role: str = "owner"
    shown: str = "h1"


def looks(site: Site) -> Sequence[Look]:
    return (
        Look("overview", "/console", "operator"),
        Look("requests", "/console/requests?account=atlas", "operator"),
        Look("ledger", "/console/ledger?account=atlas", "operator"),
        Look("models", "/console/models", "operator"),
        Look("request", f"/console/requests/{site.request}"),
        Look("usage", "/console/usage?by=day", shown="[data-chart] canvas"),
        Look(
            "playground",
            "/console/playground?model=painter&prompt=a+lighthouse",
            shown="#price[aria-busy=false] b",
        ),
        Look("limits", "/console/limits"),
    )


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """Stop the clock of this process, and let no version of ours be in a picture."""
    version = mock.patch.object(gateways, "installed_version", return_value="1.2.3")
    with time_machine.travel(NOW, tick=False), version:
        yield


@pytest.fixture(scope="module")
def site(
    frozen: None, tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Site]:
    """The console with the same figures each time, under a clock that does not move."""
    directory = tmp_path_factory.mktemp("looks")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG)
    database = Database(url)
    seeded = seed(database, catalog)
    with database.transaction() as connection:
        change_account(connection, seeded.accounts["atlas"].id, keep_inputs=True)
        for name, key in seeded.keys.items():
            connection.execute(update(keys).where(keys.c.id == key.id).values(prefix=f"tg_{name}"))
    _settle_books(database)
    database.dispose()
    namespace = f"t{uuid.uuid4().hex[:8]}"
    asyncio.run(_announce(valkey, namespace))
    settings = served_settings(directory, url, valkey, namespace=namespace)
    with serving(settings) as served:
        yield Site(f"http://127.0.0.1:{settings.port}", url, seeded, catalog, served.app)


def _settle_books(database: Database) -> None:
    """Seal what is over and prove the books, which the gateway would do at some time."""
    with database.transaction() as connection:
        while build_due(connection, NOW):
            pass
        while build_due_days(connection):
            pass
    asyncio.run(run_reconciliation(database, whole=True, prove=prove_here))


async def _announce(url: str, namespace: str) -> None:
    """Announce a worker that serves the models."""
    redis = connect(url)
    started = int((NOW - timedelta(hours=5)).timestamp() * 1000)
    names = ("chat-small", "painter", "voice")
    worker = Announcement(
        "w-1",
        models=names,
        loaded=names,
        device="NVIDIA H200",
        bytes_total=141 * 2**30,
        bytes_used=52 * 2**30,
        version="1.0",
        started_ms=started,
        states={
            name: ModelState(
                capacity=8, weights_bytes=size * 2**30, device="NVIDIA H200", dtype="bf16"
            )
            for name, size in zip(names, (16, 24, 2), strict=True)
        },
    )
    await Workers(redis, namespace=namespace).announce(worker, ttl_s=3600)
    await redis.aclose()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium with fonts that are the same everywhere."""
    configuration = font_configuration(tmp_path_factory.mktemp("fonts"))
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    # Drawn by the processor: graphics cards differ.
    arguments += ["--disable-gpu", "--disable-lcd-text", "--force-color-profile=srgb"]
    arguments += ["--font-render-hinting=none"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path(),
            args=arguments,
            env={**os.environ, "FONTCONFIG_FILE": str(configuration)},
        )
        yield browser
        browser.close()


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("always:Pages look")
def test_pages_look_as_they_did(site: Site, browser: Browser, tmp_path: Path) -> None:
    renewing = os.environ.get(RENEW) == "renew"
    means, recorded = means_of(browser), recorded_means()
    different = {}

    for name, page in _pages(site, browser):
        kept = FOLDER / f"{name}.webp"
        screenshot = _screenshot(page)
        if renewing:
            FOLDER.mkdir(exist_ok=True)
            kept.write_bytes(encoded(screenshot))
        assert kept.exists(), f"{kept} is missing: make console-pictures"
        assert kept.stat().st_size <= BYTES_MAX, name
        share = difference(kept.read_bytes(), screenshot)
        for _ in range(WAITS):
            if share <= DIFFERENCE_MAX:
                break
            page.wait_for_timeout(WAIT_MS)
            screenshot = _screenshot(page)
            share = difference(kept.read_bytes(), screenshot)
        if share > DIFFERENCE_MAX:
            (tmp_path / f"{name}.png").write_bytes(screenshot)
            different[name] = f"{share:.1%}"

    if renewing:
        record(means)
        assert not different
    if not different:
        return
    shares = ", ".join(f"{name} by {share}" for name, share in different.items())
    message = f"Pages look different: {shares}. They are in {tmp_path}."
    if means == recorded:
        message += " If they should be: make console-pictures."
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(message)
    else:
        message += f" The pictures are of {recorded}, and these of {means}."
    warnings.warn(message, stacklevel=1)


def _pages(site: Site, browser: Browser) -> Iterator[tuple[str, Page]]:
    sessions = {role: _session(site, browser, role) for role in ("operator", "owner")}
    for scheme, width in EVERY_VIEW:
        context = _context(site, browser, scheme, width)
        page = context.new_page()
        inside = ""
        for look in looks(site):
            if look.role != inside:
                context.clear_cookies()
                context.add_cookies(sessions[look.role])  # type: ignore[arg-type]  # same fields
                inside = look.role
            _visit(page, look)
            yield f"{look.name}-{scheme}-{width}", page
        context.close()


def _session(site: Site, browser: Browser, role: str) -> Sequence[Cookie]:
    """Enter as a person whose name is the role; return the cookies."""
    where = {} if role == "operator" else {"account": "atlas"}
    body = LinkBody.model_validate({"role": role, "name": role, **where})
    database = Database(site.database_url)
    with database.transaction() as connection:
        link = create_link(connection, Author("test", "cli"), body, pepper=PEPPER.encode())
    database.dispose()
    context = browser.new_context(base_url=site.url)
    context.route(LIVE, _hold_back)
    page = context.new_page()
    page.goto(link["path"])
    page.wait_for_url(lambda address: "/enter" not in address)
    cookies = context.cookies()
    context.close()
    return cookies


def _context(site: Site, browser: Browser, scheme: Scheme, width: int) -> BrowserContext:
    context = browser.new_context(
        base_url=site.url,
        color_scheme=scheme,
        reduced_motion="reduce",
        viewport={"width": width, "height": SMALL if width < 760 else WIDE},
    )
    context.set_default_timeout(30_000)
    context.clock.set_fixed_time(NOW)
    context.route(LIVE, _hold_back)
    return context


def _hold_back(route: Route) -> None:
    """Leave a request open."""


def _visit(page: Page, look: Look) -> None:
    answer = page.goto(look.path)
    assert answer is not None
    assert answer.status == 200, look.path
    page.wait_for_selector(look.shown)
    page.wait_for_selector(".htmx-request", state="detached")


def _screenshot(page: Page) -> bytes:
    return page.screenshot(animations="disabled")

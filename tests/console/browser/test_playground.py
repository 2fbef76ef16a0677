"""The playground in a real browser, with models that answer."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from gateway.accounts.accounts import create_account
from gateway.ledger.transfers import add_credit
from gateway.pricing import NANOS_PER_USD
from gateway.sql.database import Database
from tests.artist import png
from tests.console.browser.conftest import Enter, Site
from tests.console.browser.inspection import Watched
from tests.console.seeding import HOSTILE, Seeded
from tests.databases import Databases
from tests.stack import running

IMAGE = """\
  - name: pocket-image
    task: text-to-image
    also: [image-edit]
    engine: diffusion
    checkpoint: POCKET
    options: {slots: 1}
    sizes: ["64x64"]
    limits: {images: 2, steps: 4, guidance: 10, characters: 500}
    default_parameters: {steps: 1, guidance: 1}
    price: [{unit: image, amount: "0.0004"}]
    vocabulary: {words: [a, red, circle]}
    examples: [{prompt: a red circle}]
"""
POCKET = Path(__file__).parents[3] / "workers" / "pocket" / "image"
PLAY = "/console/playground"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str) -> Iterator[Site]:
    """A gateway and a worker, and an account with credit."""
    directory = tmp_path_factory.mktemp("playground")
    url = Databases("sqlite", directory, postgres).make()
    database = Database(url)
    with database.transaction() as connection:
        atlas = create_account(connection, "atlas")
        add_credit(
            connection,
            atlas.id,
            NANOS_PER_USD,
            kind="topup",
            key="one",
            actor="test",
            reason="test",
        )
    database.dispose()
    name = f"t{uuid.uuid4().hex[:8]}"
    models = IMAGE.replace("POCKET", str(POCKET))
    with running(
        directory, url, valkey, namespace=name, more_models=models, patience_s=120
    ) as stack:
        yield Site(stack.url, url, Seeded({"atlas": atlas}, {}, {}))


def charged(page: Page) -> str:
    """Wait for the end of the newest order; return its cost, as the page shows it."""
    found = page.locator("#made .charged").last
    expect(found).to_have_text(re.compile(r"^\$"), timeout=30_000)
    return found.inner_text()


def open_receipt(page: Page) -> None:
    page.locator("#made").get_by_role("link", name="receipt").last.click()
    page.wait_for_url("**/console/requests/req_*")


def test_chat_streams_and_ends_with_the_cost_of_its_receipt(site: Site, enter: Enter) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=echo")

    page.get_by_label("Message").fill(f"one two {HOSTILE}")
    expect(page.locator("#price")).to_contain_text("Costs at most $")
    page.get_by_role("button", name="Send").click()
    cost = charged(page)
    first = page.locator("#made .answered").inner_text()
    assert HOSTILE in first
    page.get_by_label("Message").fill("three")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#made .charged")).to_have_count(2)
    second = charged(page)

    assert page.locator("#made article").count() == 2
    assert page.locator("#made [onerror]").count() == 0
    assert watched.inspect() == []
    assert second != cost
    open_receipt(page)
    expect(page.locator("main")).to_contain_text(second)


def test_picture_appears_and_unknown_words_are_named(site: Site, enter: Enter) -> None:
    page = enter("member", color_scheme="dark", viewport={"width": 390, "height": 844})
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=pocket-image")

    page.get_by_label("Prompt").first.fill("a red elephant")
    expect(page.locator("#price")).to_have_text("Costs at most $0.0004")
    expect(page.locator("#unknown")).to_contain_text("elephant")
    page.locator("#code summary").click()
    expect(page.locator('[data-code="curl"]')).to_contain_text("$TOLLGATE_API_KEY")
    page.get_by_role("button", name="Order").click()

    assert charged(page) == "$0.0004"
    picture = page.locator("#made img")
    expect(picture).to_be_visible()
    assert picture.evaluate("(each) => each.decode().then(() => each.naturalWidth)") == 64
    assert watched.inspect() == []
    page.goto(PLAY)
    expect(page.locator("table.rows")).to_contain_text("pocket-image")


def test_picture_is_uploaded_and_changed(site: Site, enter: Enter) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=pocket-image&task=image-edit")

    page.get_by_label("Picture").set_input_files(
        files={"name": "one.png", "mimeType": "image/png", "buffer": png(64, 64)}
    )
    page.get_by_label("Prompt").first.fill("a red circle")
    page.get_by_role("button", name="Order").click()

    assert charged(page) == "$0.0004"
    expect(page.locator("#made img")).to_be_visible()
    open_receipt(page)
    expect(page.locator("main")).to_contain_text("image-edit")
    page.get_by_role("link", name="Try again").click()
    expect(page.locator("main")).to_contain_text("What was sent then is not kept")
    assert watched.inspect() == []


def test_refusal_is_shown_at_the_form_and_the_text_stays(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=Veo3")

    page.get_by_label("Prompt").first.fill("a ship")
    page.get_by_role("button", name="Order").click()

    expect(page.get_by_role("alert")).to_contain_text("Veo3 is not available")
    expect(page.get_by_label("Prompt").first).to_have_value("a ship")


def test_without_scripts_the_form_leads_to_the_request(site: Site, enter: Enter) -> None:
    page = enter("member", java_script_enabled=False)
    page.goto(f"{PLAY}?model=echo")

    page.get_by_label("Message").fill("one two")
    page.get_by_role("button", name="What does it cost?").click()
    expect(page.locator("#price")).to_contain_text("$")
    expect(page.get_by_label("Message")).to_have_value("one two")
    page.get_by_role("button", name="Send").click()
    page.wait_for_url("**/console/requests/req_*")
    page.wait_for_timeout(500)
    page.reload()
    expect(page.locator("#made")).to_contain_text("one two")


def test_viewer_sees_prices_but_orders_nothing(site: Site, enter: Enter) -> None:
    page = enter("viewer")
    page.goto(f"{PLAY}?model=echo")

    page.get_by_label("Message").fill("one")

    expect(page.locator("#price")).to_contain_text("$")
    expect(page.get_by_role("button", name="Send")).to_have_count(0)

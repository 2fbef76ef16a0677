"""Every sum leads to what it is made of, where the same figure is found again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from html import unescape
from urllib.parse import urljoin
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import update

from gateway.billing.usage.report import Span
from gateway.console.views.evidence import row_url
from gateway.tables.core import budgets
from tests.console.seeding import Seeded, seeded_database
from tests.console.visiting import Browser, Installation, installed

LINK = re.compile(r'<a [^>]*href="([^"]*)"[^>]*>(.*?)</a>', re.S)
FIGURES = re.compile(r"<dd>(.*?)(?:<small>|</dd>)", re.S)
ROW_AMOUNT = re.compile(r'<td class="money[^"]*" data-label="Amount, \$">(.*?)</td>', re.S)
FIGURE = re.compile("\N{MINUS SIGN}?[0-9]+([.][0-9]+)?")


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str, mid_month: None
) -> Iterator[tuple[Installation, Seeded]]:
    directory = tmp_path_factory.mktemp("evidence")
    url, seeded = seeded_database(directory, postgres)
    with installed(directory / "home", url, valkey) as made:
        # The budget is as old as the requests that it counts.
        made.execute(update(budgets).values(created_at=datetime.now(UTC) - timedelta(days=30)))
        yield made, seeded


def plain(html: str) -> str:
    """Return a figure without marks: neither the currency nor spaces within it."""
    text = unescape(re.sub(r"<[^>]+>", "", html)).strip()
    return text.replace("$", "").replace("\N{NARROW NO-BREAK SPACE}", "")


def figures_with_links(browser: Browser, path: str) -> list[tuple[str, str]]:
    """Return the figures of a page that lead to a list with a sum, and their targets."""
    page = browser.get(path)
    assert page.status_code == 200, path
    return [
        (plain(text), urljoin(path, unescape(href)))
        for href, text in LINK.findall(page.text)
        if "/usage/bookings?" in href or "sum=yes" in href
        if FIGURE.fullmatch(plain(text))
    ]


def sums_of(page: str) -> set[str]:
    shown = page.partition('id="sum"')[2].partition("</dl>")[0]
    return {plain(each) for each in FIGURES.findall(shown)}


PAGES = {
    "/console": 8,
    "/console/accounts": 2,
    "/console/accounts/{atlas}": 4,
    "/console/home?account=atlas": 6,
    "/console/balance?account=atlas": 2,
    "/console/limits?account=atlas": 2,
    "/console/margins?by=model": 6,
    "/console/margins?by=account": 4,
    "/console/prices": 3,
    "/console/usage?by=model": 8,
    "/console/usage?by=day&by2=model": 10,
    "/console/usage?by=key": 4,
    "/console/usage?by=hour&by2=task&account=atlas&from={today}": 6,
    "/console/usage?by=tag:project&account=atlas": 8,
    "/console/usage?by=month&metric=output_tokens&account=zenith": 2,
}
"""Pages with the least number of their figures that lead to a list."""


@pytest.mark.parametrize("path", PAGES)
def test_figure_is_found_again_where_it_leads(
    filled: tuple[Installation, Seeded], path: str
) -> None:
    installation, seeded = filled
    browser = installation.visitor("operator")
    today = datetime.now(UTC).date().isoformat()
    at = path.format(atlas=seeded.accounts["atlas"].id, today=today)

    found = figures_with_links(browser, at)
    assert len(found) >= PAGES[path]
    for figure, target in found[:40]:
        if "metric=" in path and figure not in ("0",):
            continue
        assert figure in sums_of(browser.get(target).text), f"{figure} of {at} at {target}"


def test_sum_is_that_of_the_listed_bookings(filled: tuple[Installation, Seeded]) -> None:
    installation, _ = filled
    browser = installation.visitor("operator")
    listed, url = [], "/console/usage/bookings?account=atlas"
    while url:
        page = browser.get(url).text
        listed += [plain(each).replace("\N{MINUS SIGN}", "-") for each in ROW_AMOUNT.findall(page)]
        more = re.search(r'<a href="([^"]*)"[^>]*rel="next"', page)
        url = urljoin(url, unescape(more[1])) if more else ""

    sums = sums_of(page)
    net = sum((Decimal(each) for each in listed if each != "free"), Decimal(0))
    assert format(net.normalize(), "f") in sums
    assert any(each.startswith("-") for each in listed)


def test_members_reach_the_bookings_of_their_account_only(
    filled: tuple[Installation, Seeded],
) -> None:
    viewer = filled[0].visitor("viewer", account="zenith")

    found = figures_with_links(viewer, "/console/home")

    assert found
    for figure, target in found:
        assert figure in sums_of(viewer.get(target).text)
    assert viewer.get("/console/usage/bookings?account=atlas").status_code == 404
    assert viewer.get("/console/usage/bookings?account=all").status_code == 404


def test_statement_lines_of_a_model_sum_to_its_bookings(
    filled: tuple[Installation, Seeded],
) -> None:
    owner = filled[0].visitor("owner", account="atlas")
    month = datetime.now(UTC).date().isoformat()[:7]
    page = owner.get(f"/console/statements/{month}").text

    sums: dict[str, Decimal] = {}
    for href, text in LINK.findall(page):
        if "/usage/bookings?" in href:
            sums[href] = sums.get(href, Decimal(0)) + Decimal(plain(text))
    assert sums
    for href, amount in sums.items():
        assert format(amount.normalize(), "f") in sums_of(owner.get(unescape(href)).text)
    for href in re.findall(r'href="(/console/ledger/\d+[^"]*)"', page):
        assert owner.get(unescape(href)).status_code == 200


def test_row_that_no_filter_selects_has_no_address() -> None:
    zone = ZoneInfo("Europe/Berlin")
    span = Span(datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC), zone)

    assert row_url({"model": "other (12)"}, span, {}) is None
    assert row_url({"device": "NVIDIA H200"}, span, {}) is None
    assert row_url({"tag:a": "b"}, span, {"tag": "c=d"}) is None
    day = row_url({"day": "2026-10-25"}, span, {"model": "m"})
    assert day is not None
    # A day of 25 hours.
    assert "from=2026-10-24T22%3A00%3A00" in day
    assert "to=2026-10-25T23%3A00%3A00" in day

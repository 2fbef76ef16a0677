"""Every figure is exact, the same wherever it occurs, and adds up: read from the pages alone."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from html import unescape
from typing import Any
from urllib.parse import urlencode

import pytest
from msgspec.structs import replace
from sqlalchemy import Engine, event

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.checks.moments import microseconds_of
from gateway.ledger.holds import hold
from gateway.ledger.transfers import add_credit
from gateway.pricing import NANOS_MAX
from gateway.sql.database import Database
from tests.console.reading import figures, number, plain, rows_of, section
from tests.console.routes import pages_of
from tests.console.seeding import Seeded, Seeder, seed
from tests.console.test_money import seal_hours
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.stack import CATALOG, PEPPER

AMOUNT = re.compile(r"\N{MINUS SIGN}?\d[\d\N{NARROW NO-BREAK SPACE}]*(\.\d{1,9})?")
SINGLE = re.compile(r"\N{MINUS SIGN}?\$\d[\d\N{NARROW NO-BREAK SPACE}]*(\.\d{1,9})?")
CELL = re.compile(r'<span class="amount">(.*?)</span></span>', re.S)
LINK = re.compile(r'class="open" href="/console/requests/(req_[0-9a-f]+)"')
TOPS = ("Accounts", "Models")
LARGE = "word " * 1_000_000
MICROSECONDS = 10**15
"""Less than any moment, as SQLite has it."""


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str, mid_month: None
) -> Iterator[tuple[Installation, Seeded]]:
    """A week of traffic whose hours are sealed, and accounts at both ends of what is possible."""
    directory = tmp_path_factory.mktemp("figures")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    seeded = seed(database, catalog)
    with database.transaction() as connection:
        rich, _ = create_account(connection, "rich"), create_account(connection, "empty")
        add_credit(
            connection, rich.id, NANOS_MAX, kind="topup", key="rich", actor="marlene", reason="all"
        )
    seal_hours(database)
    database.dispose()
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


@pytest.fixture(scope="module")
def operator(filled: tuple[Installation, Seeded]) -> Browser:
    return filled[0].visitor("operator")


@pytest.fixture(scope="module")
def owner(filled: tuple[Installation, Seeded]) -> Browser:
    return filled[0].visitor("owner", account="atlas")


def shown(browser: Browser, path: str) -> str:
    answer = browser.get(path)
    assert answer.status_code == 200, f"{path}: {answer.status_code}"
    return answer.text


def table_of(browser: Browser, path: str, **query: str) -> list[dict[str, str]]:
    joint = "&" if "?" in path else "?"
    answer = browser.get(f"{path}{joint}{urlencode(query)}")
    assert answer.status_code == 200, path
    return list(csv.DictReader(io.StringIO(answer.text)))


def test_lines_of_every_request_add_up_on_its_page(
    filled: tuple[Installation, Seeded], operator: Browser
) -> None:
    ends: Counter[str] = Counter()
    for request_id in [*filled[1].requests["atlas"], *filled[1].requests["zenith"]]:
        page = shown(operator, f"/console/requests/{request_id}")
        if 'id="money"' not in page:
            assert "Held" in page
            ends["open"] += 1
            continue
        receipt = section(page, "money")
        lines = [
            number(row.labelled["Amount, $"])
            for row in rows_of(receipt)
            if "Amount, $" in row.labelled
        ]
        foot: dict[str, list[Decimal]] = {}
        for row in rows_of(receipt, "tfoot"):
            for label, text in row.labelled.items():
                foot.setdefault(label, []).append(number(text))
        (charge,), (held,), (released,) = (
            foot[f"{name}, $"] for name in ("Charge", "Held", "Released")
        )
        assert sum(lines, Decimal(0)) == charge, request_id
        assert held - charge == released, request_id
        returned = sum(foot.get("Refund, $", []), Decimal(0))
        assert foot.get("Net, $", [charge]) == [charge + returned], request_id
        ends["refunded" if returned else "charged" if charge else "free"] += 1

    assert all(ends[end] for end in ("open", "charged", "free", "refunded")), ends


def test_every_accepted_request_is_listed_with_its_words(
    filled: tuple[Installation, Seeded], operator: Browser
) -> None:
    installation, seeded = filled
    with installation.database.transaction() as connection:
        seeder = Seeder(connection, installation.settings.catalog, seed=3)
        account, key = seeded.accounts["zenith"], seeded.keys["main"]
        now = datetime.now(UTC)
        order, flow = (seeder.order(account, key, now) for _ in range(2))
        batch = seeder.charge(replace(order, service_class="batch"), now)
        hold(connection, [replace(flow, task="workflow")])
    listed: dict[str, str] = {}
    path: str | None = "/console/requests"
    while path:
        page = shown(operator, path)
        assert not re.search(r"\bof \d+ (requests|rows)|\btotal\b", plain(page), re.I)
        body = page.partition('<table class="rows')[2].partition("</tbody>")[0]
        for row in re.findall(r"<tr id=.*?</tr>", body, re.S):
            listed[LINK.findall(row)[0]] = plain(row)
        more = re.search(r'<a href="([^"]+)"[^>]* rel="next"', page)
        path = unescape(more[1]) if more else None

    made = {id for ids in seeded.requests.values() for id in ids}
    assert listed.keys() == made | {batch, flow.request_id}
    statuses = {
        row["id"]: row["status"] for row in table_of(operator, "/console/requests/file", by="")
    }
    words = Counter(statuses.values())
    assert {"succeeded", "failed", "cancelled", "expired", "queued"} <= words.keys(), words
    for id, status in statuses.items():
        assert status in listed[id]
        free = status in ("failed", "cancelled", "expired")
        assert ("free" in listed[id].split()) == free, listed[id]
        assert ("open" in listed[id].split()) == (status in ("queued", "running")), listed[id]
    assert "batch" in listed[batch].split()
    assert "workflow" in plain(shown(operator, f"/console/requests/{flow.request_id}"))


def test_figure_is_the_same_on_every_page(
    filled: tuple[Installation, Seeded], operator: Browser, owner: Browser
) -> None:
    atlas = filled[1].accounts["atlas"].id
    home = shown(owner, "/console/home")
    balance = shown(owner, "/console/balance")
    accounts = {row.cells[0]: row.labelled for row in rows_of(shown(operator, "/console/accounts"))}
    available = figures(home)["Available"]
    assert available == figures(balance)["Available"]
    assert available == f"${accounts['atlas']['Available, $']}"
    assert f"atlas has {available} available" in plain(home)
    assert figures(home)["Held"] == figures(balance)["Held"]
    assert figures(home)["Held"] == f"${accounts['atlas']['Held, $']}"
    held = shown(operator, "/console/requests?status=open&account=atlas&sum=yes")
    assert figures(held)["Held"] == figures(home)["Held"]
    facts = plain(shown(operator, f"/console/accounts/{atlas}"))
    assert f"Held {figures(home)['Held']} " in facts

    today = figures(home)["Spent today"]
    day = datetime.now(UTC).date().isoformat()
    spent = f"/console/usage?from={day}&to={day}"
    assert f"Usage of atlas: {today} " in plain(shown(owner, spent)).replace("·", "")
    overview = shown(operator, "/console")
    tops = [rows_of(overview.partition(f"<h2>{name} today</h2>")[2]) for name in TOPS]
    by_account = {row.cells[0]: row.labelled["Net cost, $"] for row in tops[0]}
    assert f"${by_account['atlas']}" == today
    assert figures(overview)["Earned today"] in plain(shown(operator, f"{spent}&account=all"))

    by_model = {row.cells[0]: row.labelled["Net cost, $"] for row in tops[1]}
    usage = {
        row.cells[0]: row.labelled["Net, $"]
        for row in rows_of(shown(operator, f"{spent}&account=all&by=model"))
    }
    margins = {
        row.cells[0]: row.labelled["Revenue, $"]
        for row in rows_of(shown(operator, f"/console/margins?by=model&from={day}&to={day}"))
    }
    assert by_model
    for model, net in by_model.items():
        assert net == usage[model] == margins[model], model
    week = f"${accounts['atlas']['7 days, $']}"
    assert week == figures(home)["Spent in 7 days"]


@pytest.mark.parametrize("metric", ["net", "refunded", "output_tokens"])
@pytest.mark.parametrize("by", ["model", "day&by2=key", "tag:project"])
def test_table_chart_and_file_have_the_same_values(
    operator: Browser, owner: Browser, by: str, metric: str
) -> None:
    path = f"/console/usage?by={by}&metric={metric}&account=atlas"
    rows = rows_of(shown(operator, path))
    lines = table_of(operator, path, format="csv")
    column = {"net": "net_cost"}.get(metric, metric)
    label = {"net": "Net, $", "refunded": "Refunded, $"}.get(metric, "Output tokens")

    assert len(rows) == len(lines) > 0
    sums: Counter[str] = Counter()
    for row, line in zip(rows, lines, strict=True):
        # The chart is drawn from these attributes.
        drawn = re.search(r'data-value="([^"]*)"', row.attributes)
        assert drawn is not None
        values = {Decimal(drawn[1]), number(row.labelled[label]), Decimal(line[column])}
        assert len(values) == 1, (row, line)
        assert row.cells[0] == next(iter(line.values()))
        sums.update({name: Decimal(line[name]) for name in ("cost", "net_cost", column)})
    (foot,) = rows_of(shown(operator, path), "tfoot")
    assert number(foot.labelled[label]) == sums[column]
    assert table_of(owner, path.partition("&account")[0], format="csv") == lines


def test_money_of_every_page_is_an_exact_decimal(
    filled: tuple[Installation, Seeded], operator: Browser, owner: Browser
) -> None:
    installation, seeded = filled
    cells: set[str] = set()
    wrong = []
    for role, browser in (("operator", operator), ("owner", owner)):
        for path in pages_of(installation.client.app, role, seeded):  # type: ignore[arg-type]
            page = shown(browser, path)
            text = plain(re.sub(r"<(script|style|pre|textarea)\b.*?</\1>", " ", page, flags=re.S))
            found = [plain(each) for each in CELL.findall(page)]
            cells.update(found)
            wrong += [f"{path}: {each}" for each in found if not AMOUNT.fullmatch(each)]
            for single in re.findall(r"\S*\$\d\S*", text):
                if not SINGLE.match(single.lstrip("(≈≤+")):
                    wrong.append(f"{path}: {single}")
            if re.search(r"\bNaN\b|\b\d+(\.\d+)?e[+-]\d+\b", text):
                wrong.append(f"{path}: not a number that people write")

    assert not wrong, "\n".join(wrong)
    assert {"0", "0.000000001", "9223372036.854775807"} <= cells


def test_year_is_summed_from_sealed_hours_and_equals_the_api(
    filled: tuple[Installation, Seeded], owner: Browser
) -> None:
    installation, seeded = filled
    seal_hours(installation.database)
    edge = datetime.now(UTC) - timedelta(hours=2)
    read: list[tuple[str, Sequence[object]]] = []

    def note(_: object, cursor: object, statement: str, given: Any, *__: object) -> None:
        # The names of tags are those of the newest receipts, which are no part of a sum.
        if re.search(r"FROM (receipts|refunds)\b", statement) and " LIMIT " not in statement:
            read.append((statement, given))

    today = datetime.now(UTC).date()
    year = {"from": str(today - timedelta(days=365)), "to": str(today)}
    event.listen(Engine, "before_cursor_execute", note)
    try:
        lines = table_of(owner, "/console/usage?by=model", format="csv", **year)
    finally:
        event.remove(Engine, "before_cursor_execute", note)

    assert lines
    for statement, given in read:
        moments = [each for each in given if isinstance(each, int) and each > MICROSECONDS]
        assert min(moments, default=0) >= microseconds_of(edge), (statement, given)
    with installation.database.transaction() as connection:
        secret, _ = create_key(
            connection,
            seeded.accounts["atlas"].id,
            pepper=PEPPER.encode(),
            scopes=("read",),
        )
    answer = installation.client.get(
        f"/v1/usage?{urlencode({**year, 'group_by': 'model'})}",
        headers={"Authorization": f"Bearer {secret}"},
    )
    assert answer.status_code == 200, answer.text
    api = {row["model"]: row["net_cost"] for row in answer.json()["data"]}
    assert {line["model"]: line["net_cost"] for line in lines} == api


def test_large_content_makes_no_page_large(
    filled: tuple[Installation, Seeded], owner: Browser
) -> None:
    installation, seeded = filled
    account, key = seeded.accounts["atlas"], seeded.keys["web"]
    with installation.database.transaction() as connection:
        seeder = Seeder(connection, installation.settings.catalog, seed=5)
        now = datetime.now(UTC)
        small = seeder.charge(seeder.order(account, key, now), now)
    before = shown(owner, "/console/requests")
    with installation.database.transaction() as connection:
        seeder = Seeder(connection, installation.settings.catalog, seed=6)
        large = seeder.charge(seeder.order(account, key, now), now, text=LARGE)
        prompt = seeder.order(account, key, now, prompt=LARGE[:1_000_000])
        hold(connection, [prompt])

    listed = shown(owner, "/console/requests")
    assert {small, large, prompt.request_id} <= set(LINK.findall(listed))
    assert abs(len(listed) - len(before)) < 4_000
    page = shown(owner, f"/console/requests/{large}")
    assert len(page) < len(shown(owner, f"/console/requests/{small}")) + 10_000
    assert "Cut here" in page
    assert "5.00 MB" in page
    whole = owner.get(f"/console/requests/{large}/output")
    assert whole.json()["choices"][0]["text"] == LARGE
    assert len(shown(owner, f"/console/requests/{prompt.request_id}")) < 60_000

"""Lists of requests: filters, steps of a search, bars, files, columns, cancelling; and what every
page reads from the database."""

from __future__ import annotations

import asyncio
import csv
import io
import re
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import Engine, event, text

from gateway.billing.usage.failures import EndCount
from gateway.billing.usage.report import Group, Span
from gateway.console.views.files import csv_lines
from gateway.console.views.histogram import histogram
from gateway.ledger.holds import hold
from gateway.requests import lookup
from gateway.sql import database as database_module
from gateway.sql.database import Database, DatabaseTimeout, for_page
from gateway.sql.lanes import PAGE, ran_too_long
from tests.console.routes import console_routes
from tests.console.seeding import Seeded, Seeder, seeded_database
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.stack import wait_for

STATEMENTS_MAX = 8
FIRST_PAGES = {
    "/console": 30,  # the first time; then it keeps the closed sums of the day, and needs 21
    "/console/home": 26,
    "/console/limits": 12,
    "/console/requests/{request_id}": 14,
}
"""Pages that show a little of everything, or all kinds; these numbers must not grow."""
LARGE = ("receipts", "transfers", "holds", "outputs", "receipt_steps", "refunds", "audit_log")
LINK = re.compile(r'class="open" href="/console/requests/(req_[0-9a-f]+)"')


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    directory = tmp_path_factory.mktemp("lists")
    url, seeded = seeded_database(directory, postgres, requests=200)
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


@pytest.fixture(scope="module")
def operator(filled: tuple[Installation, Seeded]) -> Browser:
    return filled[0].visitor("operator")


def found(browser: Browser, query: str) -> list[str]:
    answer = browser.get(f"/console/requests?{query}")
    assert answer.status_code == 200, answer.text
    return LINK.findall(answer.text)


def lines(browser: Browser, query: str) -> list[dict[str, str]]:
    answer = browser.get(f"/console/requests/file?{query}")
    assert answer.status_code == 200
    return list(csv.DictReader(io.StringIO(answer.text)))


def test_filters_of_all_accounts_select_what_they_say(
    filled: tuple[Installation, Seeded], operator: Browser
) -> None:
    everything = lines(operator, "")
    dear = [row for row in everything if float(row["cost"] or 0) >= 0.00003]
    slow = [row for row in everything if float(row["total_ms"] or 0) >= 100]
    failed = [row for row in everything if row["status"] == "failed"]
    tagged = [row for row in everything if '"project":"web"' in row["tags"]]
    assert 0 < len(dear) < len(everything) > len(slow) > 0
    assert failed
    assert tagged

    assert lines(operator, "cost=0.00003") == dear
    cheap = [row for row in everything if row["total_ms"] and float(row["cost"]) <= 0.00003]
    assert lines(operator, "cost_max=0.00003") == cheap
    assert lines(operator, "took=0.1") == slow
    assert lines(operator, "status=failed") == failed
    assert lines(operator, "tag=project=web") == tagged
    of_model = [row for row in failed if row["model"] == failed[0]["model"]]
    assert lines(operator, f"status=failed&model={failed[0]['model']}") == of_model
    key = filled[1].keys["main"]
    own = lines(operator, f"key={key.prefix}")
    assert {row["account"] for row in own} == {"zenith"}
    assert operator.get("/console/requests?key=nobody").status_code == 400
    assert operator.get("/console/requests?took=soon").status_code == 400


def test_reason_selects_requests_that_ended_so(operator: Browser) -> None:
    failed = [row for row in lines(operator, "") if row["status"] == "failed"]
    reason = failed[0]["reason"]
    of_reason = [row for row in failed if row["reason"] == reason]

    assert lines(operator, f"reason={reason}&status=failed") == of_reason
    assert lines(operator, f"reason={reason}") == of_reason
    assert lines(operator, "reason=nothing_like_it") == []
    failures = operator.get("/console/failures").text
    assert f"status=failed&amp;reason={reason}&amp;model=" in failures


def test_list_has_keys_and_classes(filled: tuple[Installation, Seeded], operator: Browser) -> None:
    key = filled[1].keys["main"]

    rows = lines(operator, f"key={key.prefix}")

    assert {(row["key"], row["service_class"]) for row in rows} == {(key.prefix, "standard")}
    html = operator.get(f"/console/requests?key={key.prefix}").text
    assert f'title="{key.prefix}"' in html
    assert 'data-label="Class">standard<' in html


def test_pages_lead_both_ways(operator: Browser) -> None:
    everything = [row["id"] for row in lines(operator, "")]
    path: str | None = "/console/requests"
    pages = []
    while path:
        html = operator.get(path).text
        pages.append((path, LINK.findall(html)))
        path = linked(html, "next")
    assert len(pages) > 2
    assert [id for _, ids in pages for id in ids] == everything

    back = []
    while path := linked(html, "prev"):
        answer = operator.get(path)
        if answer.status_code == 303:
            answer = operator.get(answer.headers["location"])
        html = answer.text
        back.append(LINK.findall(html))

    assert back == [ids for _, ids in reversed(pages[:-1])]
    assert linked(html, "first") is None
    # From a page in the middle, one goes both ways as well.
    middle = operator.get(f"/console/requests?cursor={everything[70]}").text
    newer = LINK.findall(operator.get(linked(middle, "prev") or "").text)
    assert newer == everything[21:71]


def test_pages_have_each_request_once_while_others_end(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> None:
    directory = tmp_path_factory.mktemp("paging")
    url, seeded = seeded_database(directory, postgres, requests=10)
    with installed(directory / "home", url, valkey) as made:
        account, key = seeded.accounts["atlas"], seeded.keys["web"]
        with made.database.transaction() as connection:
            seeder = Seeder(connection, made.settings.catalog, seed=3)
            seeder.requests(account, key, 800)
            now = datetime.now(UTC)
            ending = [seeder.order(account, key, now) for _ in range(200)]
            hold(connection, ending)
        browser = made.visitor("operator")
        path: str | None = "/console/requests?account=atlas"
        visited: list[list[str]] = []
        html = ""
        while path:
            html = browser.get(path).text
            visited.append(LINK.findall(html))
            assert not re.search(r"\btotal\b", html)
            path = linked(html, "next")
            with made.database.transaction() as connection:
                seeder = Seeder(connection, made.settings.catalog, seed=len(visited))
                for each in ending[:12]:
                    seeder.end(each.request_id)
            del ending[:12]
        back: list[list[str]] = []
        while path := linked(html, "prev"):
            answer = browser.get(path)
            if answer.status_code == 303:
                answer = browser.get(answer.headers["location"])
            html = answer.text
            back.append(LINK.findall(html))

    ids = [id for page in visited for id in page]
    assert len(ids) == len(set(ids)) > 1000
    assert ids == sorted(ids, reverse=True)
    assert back == visited[-2::-1]
    assert not ending


def linked(html: str, rel: str) -> str | None:
    found = re.search(rf'<a href="([^"]+)"[^>]* rel="{rel}"', html)
    return unescape(found[1]) if found else None


def test_file_has_the_rows_of_the_list(operator: Browser) -> None:
    shown = found(operator, "model=echo&outcome=charged")

    assert [row["id"] for row in lines(operator, "model=echo&outcome=charged")][
        : len(shown)
    ] == shown


def test_search_says_how_far_it_came(operator: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "LOOKED_AT_MAX", 20)

    html = operator.get("/console/requests?tag=project=nobody").text

    assert "back to" in html
    assert "Search further back" in html


def test_bars_count_what_the_list_has(operator: Browser) -> None:
    week = (datetime.now(UTC) - timedelta(days=6)).date().isoformat()
    html = operator.get(f"/console/requests/histogram?from={week}").text
    bars = re.findall(r"<tr><th scope=\"row\">.*?</tr>", html)
    counts = [
        [int(each) for each in re.findall(r'class="number"[^>]*>(\d+)<', bar)] for bar in bars
    ]
    statuses = ("succeeded", "failed", "cancelled", "expired")

    ended = Counter(row["status"] for row in lines(operator, f"from={week}"))
    assert all(ended[status] for status in ("succeeded", "failed"))
    for place, status in enumerate(statuses):
        assert abs(sum(count[place] for count in counts) - ended[status]) <= 2, status
    link = re.search(r'href="(/console/requests\?[^"]*cursor=req_[0-9a-f]{32})"', html)
    assert link is not None
    assert operator.get(link[1].replace("&amp;", "&")).status_code == 200


def test_bars_of_a_day_with_a_change_of_clocks() -> None:
    zone = ZoneInfo("Europe/Berlin")
    day = Span(datetime(2026, 10, 25, tzinfo=zone), datetime(2026, 10, 26, tzinfo=zone), zone)
    group = Group(labels={"hour": "2026-10-25T02:00+01:00"}, requests=3, charged=2)

    failed = EndCount("failed", datetime(2026, 10, 25, 1, 45, tzinfo=UTC), 1)

    made = histogram(day, "hour", [group], [failed])

    assert len(made.bars) == 25
    assert [bar.label for bar in made.bars if bar.requests] == ["2026-10-25T02:00+01:00"]
    assert dict(zip(made.series, made.totals, strict=True)) == {
        "succeeded": 2,
        "failed": 1,
        "cancelled": 0,
        "expired": 0,
    }
    assert [bar.requests for bar in made.bars if bar.counts[1]] == [3]
    assert histogram(day, "hour", [group], None).totals == [2, 1]


def test_cells_that_a_spreadsheet_would_compute_are_text() -> None:
    assert csv_lines([["=1+1", "@x", "-0.5", "-a", None, 7]]) == b"'=1+1,'@x,-0.5,'-a,,7\n"


def test_columns_are_chosen_and_kept(filled: tuple[Installation, Seeded]) -> None:
    browser = filled[0].visitor("auditor")
    assert ">Tags</th>" not in browser.get("/console/requests").text

    browser.post("/console/columns", {"list": "requests", "column": "tags"})

    html = browser.get("/console/requests").text
    assert ">Tags</th>" in html
    assert ">Made</th>" not in html


def test_chosen_requests_are_cancelled_by_those_who_may(
    filled: tuple[Installation, Seeded],
) -> None:
    installation, seeded = filled
    request_id = seeded.requests["atlas"][-1]
    form = {"request": request_id, "next": "/console/requests?status=queued"}

    viewer = installation.visitor("viewer", account="atlas")
    stranger = installation.visitor("owner", account="zenith")
    assert 'name="request"' not in viewer.get("/console/requests").text
    assert viewer.post("/console/requests/cancel", form).status_code == 404
    assert stranger.post("/console/requests/cancel", form).status_code == 404

    member = installation.visitor("member", account="atlas")
    assert f'value="{request_id}"' in member.get("/console/requests").text
    answer = member.post("/console/requests/cancel", form)
    assert answer.headers["location"] == "/console/requests?status=queued"
    wait_for(lambda: f'value="{request_id}"' not in member.get("/console/requests").text, "the end")


def test_every_page_reads_little(filled: tuple[Installation, Seeded], operator: Browser) -> None:
    """At most a few statements for a page, none of which reads a whole large table."""
    installation, seeded = filled
    values = {
        "request_id": seeded.requests["atlas"][-4],
        "account_id": str(seeded.accounts["atlas"].id),
        "name": "echo",
        "model": "echo",
        "task": "text-generation",
    }
    read: list[tuple[str, object]] = []

    def note(_: object, cursor: object, statement: str, given: object, *__: object) -> None:
        # Loops of the gateway read meanwhile, in other lanes.
        reads = threading.current_thread().name.startswith("sql-page")
        if reads and not statement.startswith("BEGIN"):
            read.append((statement, given))

    crowded: dict[str, int] = {}
    whole: list[str] = []
    event.listen(Engine, "before_cursor_execute", note)
    try:
        for route in console_routes(installation.client.app):
            if route.method != "GET" or "{rest" in route.path:
                continue
            path = re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], "1"), route.path)
            about = "account=atlas" if not route.about_account else ""
            read.clear()
            answer = operator.get(f"{path}?{about}")
            if answer.status_code != 200:
                continue
            statements = list(read)
            if len(statements) > FIRST_PAGES.get(route.path, STATEMENTS_MAX):
                crowded[route.path] = len(statements)
            with installation.database.snapshot() as connection:
                for statement, given in statements:
                    plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", given)
                    if " LIMIT " not in statement.replace("\n", " "):
                        whole += [
                            f"{path}: {row[3]}: {statement}"
                            for row in plan.all()
                            for table in LARGE
                            if row[3] == f"SCAN {table}"
                        ]
    finally:
        event.remove(Engine, "before_cursor_execute", note)

    assert crowded == {}
    assert whole == []


async def test_page_fails_soon_and_delays_no_order(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "PAGE", PAGE)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    for kind, slow in (("sqlite", endless), ("postgresql", "SELECT pg_sleep(30)")):
        url = Databases(kind, tmp_path_factory.mktemp("lane"), postgres).make()  # type: ignore[arg-type]
        database = Database(url)
        loop = asyncio.get_running_loop()

        async def page(database: Database = database, slow: str = slow) -> None:
            for_page.set(True)
            await database.report(lambda c: c.execute(text(slow)).all(), account_id=None)

        began = loop.time()
        pages = [asyncio.create_task(page()) for _ in range(4)]
        await asyncio.sleep(0)
        held = await database.write(lambda c: c.execute(text("SELECT 1")).scalar())
        seen = await database.read(lambda c: c.execute(text("SELECT 1")).scalar())
        assert (held, seen) == (1, 1)
        assert not any(task.done() for task in pages)
        ends = await asyncio.gather(*pages, return_exceptions=True)
        assert loop.time() - began < 4
        assert all(isinstance(end, DatabaseTimeout) or ran_too_long(end) for end in ends), ends
        await database.close()

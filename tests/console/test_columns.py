"""Columns of every list can be hidden: head and cells together, for one visitor, and for good."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import func, select

import gateway.console
from gateway.console.columns import ListColumns
from gateway.console.live.tail import Tail, _Look
from gateway.console.pages.columns import LISTS
from gateway.console.views.requests import request_row
from gateway.ids import new_request_id
from gateway.requests.lookup import RequestFilter
from gateway.sql.database import Database
from gateway.tables.users import sessions
from gateway.tasks.submission import OpenRequest
from tests.console.hostile import announce, furnish
from tests.console.payloads import Dealer
from tests.console.seeding import Seeded, seed
from tests.console.test_prices import dict_of, entered
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.stack import CATALOG
from workers.contract.jobs import Job, RequestId, encode
from workers.contract.queue import Queue, QueueEntry
from workers.contract.redis import connect

TEMPLATES = Path(gateway.console.__file__).parent / "templates"
WHERE: Mapping[str, str] = {
    "accounts": "/console/accounts",
    "archives": "/console/archives",
    "audit": "/console/audit",
    "batches": "/console/batches",
    "bookings": "/console/usage/bookings",
    "budgets": "/console/limits?account=atlas",
    "consents": "/console/voices",
    "corrections": "",
    "erasures": "/console/erasures",
    "failures": "/console/failures",
    "feedback": "/console/feedback",
    "files": "/console/files",
    "gateways": "/console/gateways",
    "jobs": "/console/queue?model=echo",
    "keys": "/console/keys",
    "ledger": "/console/ledger?account=atlas",
    "margins": "/console/margins",
    "members": "/console/members?account=atlas",
    "models": "/console/models",
    "notices": "/console/notices",
    "organisations": "/console/organisations",
    "payments": "/console/payments",
    "periods": "/console/periods",
    "picks": "/console/pick?task=text-generation",
    "prices": "/console/prices",
    "queued_accounts": "/console/queue?model=echo",
    "queued_jobs": "/console/queue?model=echo",
    "queues": "/console/queue",
    "rates": "/console/limits?account=atlas",
    "requests": "/console/requests",
    "retention": "/console/retention",
    "sessions": "/console/sessions",
    "set_aside": "/console/set-aside",
    "statements": "/console/statements?account=atlas",
    "subscriptions": "/console/notices",
    "tasks": "/console/gateways",
    "upstreams": "/console/upstreams",
    "user_sessions": "/console/users/sessions",
    "users": "/console/users",
    "voices": "/console/voices",
    "webhooks": "/console/webhooks",
    "workers": "/console/workers",
}
"""A page with rows of each list; a correction is rehearsed before."""
OTHER_HEADS = {
    ("jobs", "left"): "Lease left",
    ("models", "order"): "of",
    ("picks", "results"): "1000 results, $",
}
"""Heads that are not those by which their columns are chosen."""
OF_MEMBERS = ("batches", "consents", "files", "voices")
"""Lists that members see only."""
OF_OTHERS = {("jobs", "model"): "the page of a worker"}
"""Columns that a page of their list leaves out, and where they are."""


class Tables(HTMLParser):
    """The tables of a page: their heads, and the number of cells of each row."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[list[str], list[int]]] = []
        self._open: list[tuple[list[str], list[int]]] = []
        self._in_head = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            table: tuple[list[str], list[int]] = ([], [])
            if not self._open:  # others are within a cell
                self.found.append(table)
            self._open.append(table)
        elif tag == "tr" and self._open:
            self._open[-1][1].append(0)
        elif tag in ("td", "th") and self._open:
            self._open[-1][1][-1] += int(dict(attrs).get("colspan") or 1)
            self._in_head = ("scope", "col") in attrs
            if self._in_head:
                self._open[-1][0].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._open.pop()
        elif tag == "th":
            self._in_head = False

    def handle_data(self, data: str) -> None:
        if self._in_head:
            self._open[-1][0][-1] += data


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    """An installation with rows in every list."""
    directory = tmp_path_factory.mktemp("columns")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    seeded = seed(database, catalog, requests=24)
    made = furnish(database, catalog, seeded, Dealer())
    database.dispose()
    with installed(directory / "home", url, valkey) as installation:
        asyncio.run(announce(valkey, installation.settings.namespace, made))
        asyncio.run(enqueue(valkey, installation.settings.namespace, seeded))
        yield installation, seeded


async def enqueue(url: str, namespace: str, seeded: Seeded) -> None:
    """Let one job of a model run, and others wait."""
    redis = connect(url)
    queue, account = Queue(redis, "echo", namespace=namespace), str(seeded.accounts["atlas"].id)
    entries = [
        QueueEntry(id, account, encode(Job(RequestId(id), account, "echo", "chat", {})), 1.0)
        for id in seeded.requests["atlas"][:3]
    ]
    await queue.enqueue(entries, queue_max=100, account_max=100)
    await queue.lease("w-1", 1, lease_ms=3_600_000)
    await redis.aclose()


class Visits:
    """Where each list is, and browsers that see it."""

    def __init__(self, installation: Installation) -> None:
        self.operator = installation.visitor("operator", account="atlas")
        self.owner = installation.visitor("owner", account="atlas")
        span = {"from": "2020-01-01T00:00", "to": "2090-01-01T00:00"}
        fields = dict_of(entered(model="echo", **span))
        answer = self.operator.post("/console/prices/corrections", fields)
        self._rehearsed = answer.headers["location"]
        self.operator.finished(self._rehearsed)

    def of(self, name: str) -> tuple[Browser, str]:
        return self.owner if name in OF_MEMBERS else self.operator, WHERE[name] or self._rehearsed


def choose(browser: Browser, found: ListColumns, *hidden: str, path: str = "") -> None:
    """Hide columns by the form of a list, as it is without scripts."""
    shown = [name for name in found.heads if name not in hidden]
    form: dict[str, Any] = {"list": found.name, "column": shown, "next": path}
    answer = browser.post("/console/columns", form)
    assert answer.status_code == 303, answer.text
    assert answer.headers["location"] == (path or "/console")


def lost(before: Tables, after: Tables) -> list[tuple[set[str], int]]:
    """Return the heads that tables have lost, and how many."""
    return [
        (set(heads) - set(left), len(heads) - len(left))
        for (heads, _), (left, _) in zip(before.found, after.found, strict=True)
        if heads != left
    ]


def uneven(tables: Tables) -> list[tuple[list[str], list[int]]]:
    """Return the tables of which a row has more or fewer cells than there are heads."""
    return [(heads, cells) for heads, cells in tables.found if heads and set(cells) != {len(heads)}]


def test_each_column_of_each_list_is_hidden_with_its_cells(
    filled: tuple[Installation, Seeded],
) -> None:
    visits = Visits(filled[0])
    wrong: list[object] = []

    for found in LISTS.values():
        browser, path = visits.of(found.name)
        choose(browser, found, path=path)
        page = browser.get(path).text
        whole = Tables(page)
        if f'name="list" value="{found.name}"' not in page:
            wrong.append((path, found.name, "has no form"))
            continue
        for name in found.heads:
            choose(browser, found, name, path=path)
            without = Tables(browser.get(path).text)
            head = OTHER_HEADS.get((found.name, name), found.heads[name])
            wanted = [] if (found.name, name) in OF_OTHERS else [({head}, 1)]
            if (gone := lost(whole, without)) != wanted or uneven(without):
                wrong.append((path, found.name, name, gone, uneven(without)))
        choose(browser, found, *found.heads, path=path)
        bare = Tables(browser.get(path).text)
        if uneven(bare) or not all(heads for heads, _ in bare.found):
            wrong.append((path, found.name, "without columns", bare.found))

    assert wrong == [], "\n".join(map(str, wrong))


def test_columns_are_those_of_their_list_and_visitor_and_of_its_next_session(
    filled: tuple[Installation, Seeded],
) -> None:
    installation, _ = filled
    user = installation.visitor("owner", account="atlas")
    other = installation.visitor("owner", account="atlas")
    choose(user, LISTS["requests"], "model", "held")
    choose(user, LISTS["keys"], "may")

    assert {"Model", "Held, $"}.isdisjoint(heads(user, "/console/requests"))
    assert "Tags" in heads(user, "/console/requests")
    assert "May" not in heads(user, "/console/keys")
    assert {"Model", "Held, $"} <= heads(other, "/console/requests")
    assert "Tags" not in heads(other, "/console/requests")
    assert "May" in heads(other, "/console/keys")

    newest = installation.execute(select(func.max(sessions.c.user_id))).scalar_one()
    again = installation.browser()
    again.enter(installation.link(user=newest - 1))
    assert {"Model", "Held, $"}.isdisjoint(heads(again, "/console/requests"))
    assert "May" not in heads(again, "/console/keys")


def test_parts_and_files_of_a_list_after_columns_were_hidden(
    filled: tuple[Installation, Seeded],
) -> None:
    """A part is read again without them; a file has all columns."""
    installation, _ = filled
    browser = installation.visitor("operator", account="atlas")
    choose(browser, LISTS["workers"], "device", "memory")
    choose(browser, LISTS["keys"], "spent")

    part = browser.get("/console/workers", **{"HX-Request": "true", "HX-Request-Type": "partial"})
    assert not uneven(Tables(part.text))
    assert {"Device", "Memory"}.isdisjoint(Tables(part.text).found[0][0])
    assert "spent" in browser.get("/console/keys?as=csv").text.partition("\n")[0]


async def test_rows_that_come_later_leave_out_the_columns_of_their_page() -> None:
    now, services = datetime.now(UTC), cast("Any", None)
    one = OpenRequest(new_request_id(), 7, "echo", "text-generation", "running", 1, now, now)
    follower = Tail(services, RequestFilter(None))

    for hidden in ((), ("model",), ("charged", "model", "nothing", "tags")):
        row = follower._rendered(_Look("list", "UTC", hidden), request_row(one, {7: "atlas"}))
        shown = LISTS["requests"].heads.keys() - set(hidden)
        assert row.count("<td") == 1 + len(shown)
        assert ("echo" in row) is ("model" in shown)


def test_unknown_columns_are_ignored_and_unknown_lists_refused(
    filled: tuple[Installation, Seeded],
) -> None:
    browser = filled[0].visitor("viewer", account="atlas")
    form: dict[str, Any] = {"list": "requests", "column": ["model", "nothing", "shows"]}

    assert browser.post("/console/columns", form).status_code == 303
    assert heads(browser, "/console/requests") == {"Time", "Model"}
    assert browser.post("/console/columns", {"list": "nothing"}).status_code == 404
    assert browser.post("/console/columns").status_code == 404


def test_every_list_of_a_template_is_declared() -> None:
    named = {
        name
        for path in TEMPLATES.rglob("*.html")
        for name in re.findall(r"forms\.columns\(lists\.(\w+)", path.read_text())
    }

    assert named == LISTS.keys() == WHERE.keys()


def heads(browser: Browser, path: str) -> set[str]:
    """Return the heads of the first table of a page."""
    return set(Tables(browser.get(path).text).found[0][0])

"""Lists and reports use indexes: no query plan reads a whole table.

Every statement that a call with the scope ``read`` makes is explained by the database that runs it,
over a history that is large enough for the planner to prefer an index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import Connection, Engine, event, insert, text

from gateway.archive.bounds import learn_bounds
from gateway.archive.files import read_page as read_rows
from gateway.archive.marks import Archive
from gateway.archive.remove import Place, _charges, _uncharged
from gateway.archive.seal import seal_of_month
from gateway.batches.names import prefix_of
from gateway.batches.store import placed_requests
from gateway.billing.entries import entries, find_entry
from gateway.billing.exports.files import export
from gateway.billing.exports.footer import Footer
from gateway.billing.exports.pages import connection_reader
from gateway.billing.statements.close import _moved_in
from gateway.billing.usage.failures import count_failures
from gateway.billing.usage.report import Filters, Span, usage
from gateway.ids import first_request_id
from gateway.ledger.closed import ClosedRequest
from gateway.ledger.holds import hold
from gateway.ledger.periods import month_of
from gateway.performance import read_samples
from gateway.requests import lookup
from gateway.requests.lookup import RequestFilter
from gateway.sql.database import Database
from gateway.tables.core import idempotency, receipts, transfers
from tests.databases import Databases
from tests.ledger.books import Books, done, open_books

LARGE = ("receipts", "transfers", "idempotency")
NOW = datetime.now(UTC)
SPAN = Span(NOW - timedelta(hours=2), NOW + timedelta(hours=1), ZoneInfo("UTC"))


@pytest.fixture(scope="module")
def books(databases: Databases) -> Iterator[Books]:
    """About ten thousand receipts of several accounts, nearly all successful."""
    database = Database(databases.make())
    made = open_books(database, credit=10**9)
    request = made.order()
    with database.transaction() as connection:
        hold(connection, [request])
    made.settle(done(request.request_id))
    others = [open_books(database, credit=0) for _ in range(3)]
    with database.transaction() as connection:
        (row,) = connection.execute(receipts.select()).mappings().all()
        (charge,) = connection.execute(
            transfers.select().where(transfers.c.kind == "charge")
        ).mappings()
        connection.execute(
            insert(transfers),
            [{**charge, "id": 1000 + each, "key": f"copy:{each}"} for each in range(5000)],
        )
        connection.execute(
            insert(receipts),
            [{**row, **_place(number, made, others)} for number in range(10_000)],
        )
        connection.execute(insert(idempotency), [
            {
                "account_id": made.account.id,
                "key": f"name {each}" if each % 50 else f"batch\nb{each % 7}\n{each}\n0",
                "request_id": f"req_{each:032x}",
                "body_sha256": b"0" * 32,
                "created_at": NOW,
            }
            for each in range(5000)
        ])  # fmt: skip
        connection.execute(text("ANALYZE"))
    yield made
    database.dispose()


def _place(number: int, made: Books, others: list[Books]) -> dict[str, Any]:
    owner = others[number % len(others)] if number % 10 else made
    settled = NOW - timedelta(seconds=number)
    id = first_request_id(settled)[:-10] + f"{number:010x}"
    rare = number % 500 == 0
    return {
        "request_id": id,
        "account_id": owner.account.id,
        "key_id": owner.key.id,
        "model": f"m{number % 40}",
        "transfer_id": 1000 + number // 2,
        "settled_at": settled,
        "accepted_at": settled,
        **(
            {"status": "failed", "outcome": "released", "charge_nanos": 0, "transfer_id": None}
            if rare
            else {}
        ),
    }


@pytest.fixture
def plans() -> Iterator[list[str]]:
    """Explain each SELECT before it runs; collect the plans."""
    found: list[str] = []

    def explain(
        connection: Connection, cursor: Any, statement: str, parameters: Any, *_: Any
    ) -> None:
        if not statement.lstrip().upper().startswith("SELECT"):
            return
        postgres = connection.dialect.name == "postgresql"
        how = "EXPLAIN (FORMAT JSON) " if postgres else "EXPLAIN QUERY PLAN "
        # A separate cursor: the driver's is about to run the statement itself.
        asked = connection.connection.cursor()
        try:
            asked.execute(how + statement, parameters)
            rows = asked.fetchall()
        finally:
            asked.close()
        if postgres:
            read = rows[0][0] if isinstance(rows[0][0], list) else json.loads(rows[0][0])
            found.extend(f"{plan} <- {statement}" for plan in _scans(read[0]["Plan"]))
        else:
            found.extend(f"{row[3]} <- {statement}" for row in rows)

    event.listen(Engine, "before_cursor_execute", explain)
    yield found
    event.remove(Engine, "before_cursor_execute", explain)


def _scans(plan: dict[str, Any]) -> Iterator[str]:
    if plan["Node Type"] == "Seq Scan":
        yield f"SCAN {plan['Relation Name']}"
    for part in plan.get("Plans", ()):
        yield from _scans(part)


QUESTIONS: dict[str, Callable[[Connection, Books], object]] = {
    "newest": lambda c, b: page(c, RequestFilter(b.account.id)),
    "failed": lambda c, b: page(c, RequestFilter(b.account.id, status="failed")),
    "succeeded": lambda c, b: page(c, RequestFilter(b.account.id, status="succeeded")),
    "model": lambda c, b: page(c, RequestFilter(b.account.id, model="m7")),
    "model of all": lambda c, b: page(c, RequestFilter(None, model="m7")),
    "failed of all": lambda c, b: page(c, RequestFilter(None, status="failed")),
    "model and failed of all": lambda c, b: page(
        c, RequestFilter(None, model="m7", status="failed")
    ),
    "tag": lambda c, b: page(c, RequestFilter(b.account.id, tags={"project": "x"})),
    "key": lambda c, b: page(c, RequestFilter(b.account.id, key_id=b.key.id)),
    "outcome": lambda c, b: page(c, RequestFilter(b.account.id, outcome="released")),
    "tasks": lambda c, b: page(c, RequestFilter(b.account.id, tasks=("text-to-image",))),
    "summary": lambda c, b: lookup.summarize(c, RequestFilter(b.account.id), None),
    "summary of a tag": lambda c, b: lookup.summarize(
        c, RequestFilter(b.account.id, tags={"project": "x"}), None
    ),
    "one": lambda c, b: lookup._find(c, b.account.id, first_request_id(NOW)),
    "ledger": lambda c, b: entries(c, b.account.id, limit=20),
    "ledger, rare kind": lambda c, b: entries(c, b.account.id, limit=20, kind="expiry"),
    "entry": lambda c, b: find_entry(c, b.account.id, 1001),
    "statistics": lambda c, b: read_samples(c, "m7", NOW - timedelta(hours=1)),
    "lines": lambda c, b: placed_requests(c, b.account.id, prefix_of("b3")),
    "usage": lambda c, b: usage(c, SPAN, ("model",), Filters((b.account.id,))),
    "usage by minute": lambda c, b: usage(
        c, Span(NOW - timedelta(minutes=5), NOW, ZoneInfo("UTC")), ("minute",),
        Filters((b.account.id,)),
    ),
    "export": lambda c, b: list(
        export(
            connection_reader(c), SPAN, Filters((b.account.id,)), format="csv", profile="native",
            footer=Footer(),
        )
    ),
}  # fmt: skip


def page(connection: Connection, choice: RequestFilter) -> object:
    return lookup.read_page(connection, choice, limit=20, cursor=None, oldest_first=False)


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_list_or_report_reads_a_whole_table(
    question: str, books: Books, plans: list[str]
) -> None:
    with books.database.snapshot() as connection:
        QUESTIONS[question](connection, books)

    whole_tables = [
        plan
        for plan in plans
        for table in LARGE
        if plan.startswith((f"SCAN {table} <-", f"SCAN {table} USING COVERING INDEX"))
    ]
    assert whole_tables == []


MONTH = month_of(NOW)

MONTHLY: dict[str, Callable[[Connection, Books], object]] = {
    "seal": lambda c, b: seal_of_month(c, MONTH),
    "accounts": lambda c, b: _moved_in(c, MONTH),
    "archived receipts": lambda c, b: read_rows(c, MONTH, "receipts", ("req_0",), 100),
    "archived steps": lambda c, b: read_rows(c, MONTH, "receipt_steps", ("req_0", 1), 100),
    "archived transfers": lambda c, b: read_rows(c, MONTH, "transfers", (5,), 100),
    "charges to remove": lambda c, b: c.execute(
        _charges(c, archive_of(MONTH), Place(b.account.id), 100)
    ).all(),
    "receipts to remove": lambda c, b: c.execute(
        _uncharged(c, archive_of(MONTH), Place(b.account.id), 100)
    ).all(),
}


def archive_of(month: str) -> Archive:
    return Archive(month, "removing", "", "", None, None, None, 0, 0, 0, NOW)


@pytest.mark.parametrize("question", MONTHLY)
def test_closed_month_is_read_in_the_order_of_its_ids(
    question: str, books: Books, plans: list[str]
) -> None:
    learn_bounds(books.database, MONTH)
    plans.clear()
    with books.database.snapshot() as connection:
        MONTHLY[question](connection, books)

    assert not [plan for plan in plans for table in LARGE if plan.startswith(f"SCAN {table} <-")]
    if books.database.engine.dialect.name == "sqlite":
        read = [
            plan for plan in plans if plan.startswith(("SEARCH receipts ", "SEARCH transfers "))
        ]
        unbounded = [
            plan
            for plan in read
            if not re.search(r"(request_id|rowid|id)(>\? AND \1<\?|=\?)|transfer_id=\?", plan)
        ]
        assert unbounded == []
        assert not [plan for plan in plans if plan.startswith("USE TEMP B-TREE FOR ORDER BY")]


def test_failures_are_found_by_the_index_of_what_did_not_succeed(
    books: Books, plans: list[str]
) -> None:
    span = {"starts_at": datetime(2000, 1, 1, tzinfo=UTC), "ends_at": NOW}
    with books.database.snapshot() as connection:
        of_all = count_failures(connection, account_id=None, **span)
        own = count_failures(connection, account_id=books.account.id, **span)

    assert sum(each.requests for each in of_all.groups) == 20
    assert sum(each.requests for each in own.groups) == 20
    if books.database.engine.dialect.name == "sqlite":
        read = [plan for plan in plans if " receipts " in plan.partition("<-")[0]]
        assert read
        assert [plan for plan in read if "not_succeeded" not in plan.partition("<-")[0]] == []


def test_search_stops_after_a_number_of_rows_with_a_cursor(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "LOOKED_AT_MAX", 100)
    choice = RequestFilter(books.account.id, tags={"project": "none"})

    seen: list[str] = []
    cursor: str | None = None
    with books.database.snapshot() as connection:
        while True:
            found, cursor = lookup.read_page(
                connection, choice, limit=20, cursor=cursor, oldest_first=False
            )
            assert found == []
            if cursor is None:
                break
            seen.append(cursor)
        everything, _ = lookup.read_page(
            connection,
            RequestFilter(books.account.id),
            limit=10_000,
            cursor=None,
            oldest_first=False,
        )

    assert seen == sorted(seen, reverse=True)
    assert seen == [each.request_id for each in everything[99::100]]


def test_pages_of_a_search_have_everything_once(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "LOOKED_AT_MAX", 100)
    choice = RequestFilter(books.account.id, outcome="released")

    for oldest_first in (False, True):
        ids: list[str] = []
        cursor: str | None = None
        with books.database.snapshot() as connection:
            while True:
                found, border = lookup.read_page(
                    connection, choice, limit=2, cursor=cursor, oldest_first=oldest_first
                )
                assert all(isinstance(each, ClosedRequest) for each in found)
                ids += [each.request_id for each in found[:1]]
                cursor = found[0].request_id if len(found) > 1 else border
                if cursor is None:
                    break
        assert len(ids) == len(set(ids)) == 20
        assert ids == sorted(ids, reverse=not oldest_first)


def test_summary_stops_after_a_number_of_rows_with_a_cursor(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = RequestFilter(books.account.id)
    with books.database.snapshot() as connection:
        full = lookup.summarize(connection, choice, None)
        monkeypatch.setattr(lookup, "COUNTED_MAX", 400)
        parts = [lookup.summarize(connection, choice, None)]
        while parts[-1].next_cursor is not None:
            parts.append(lookup.summarize(connection, choice, parts[-1].next_cursor))

    assert full.next_cursor is None
    assert len(parts) == 3
    assert sum(part.requests for part in parts) == full.requests
    assert sum(part.cost_nanos for part in parts) == full.cost_nanos

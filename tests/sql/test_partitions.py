"""Monthly partitions on PostgreSQL: created ahead, detached, attached, and no row is lost."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, Engine, Select, event, func, select
from sqlalchemy.exc import DBAPIError, IntegrityError

from gateway import metrics
from gateway.billing.entries import charge_of, entries, find_entry
from gateway.billing.exports.archived import ArchivedReceipts
from gateway.billing.exports.native import CSV_SCHEMA, native_tables
from gateway.billing.exports.pages import connection_reader
from gateway.billing.statements.statement import statement
from gateway.billing.usage.minutes import HOUR, booked_within, floor_hour
from gateway.billing.usage.report import Filters, Span, usage
from gateway.ids import first_request_id, new_request_id
from gateway.ledger.balances import _LOCK
from gateway.ledger.holds import hold
from gateway.ledger.periods import span_of
from gateway.ledger.proof import chain
from gateway.ledger.proof.chain import by_month
from gateway.ledger.reconcile import reconcile
from gateway.ledger.refunds import refund, refunds_of
from gateway.ledger.transfers import add_credit
from gateway.requests.lookup import RequestFilter, read_page
from gateway.scheduled import partition_tasks
from gateway.sql.database import Database
from gateway.sql.lanes import PAGE
from gateway.sql.partitions import (
    PARTITIONED,
    attach_month,
    create_again,
    create_ahead,
    create_month,
    detach_month,
    drop_empty,
    drop_month,
    is_described,
    list_partitions,
    meet_partitions,
    missing_months,
    rows_in_default,
)
from gateway.tables import settlement_time
from gateway.tables.core import metadata, outputs, receipts, transfers
from gateway.tables.settlement_time import settled_within
from tests.databases import Databases
from tests.ledger.books import Books, open_books
from tests.ledger.test_statement_counts import with_output
from workers.contract.jobs import RequestId

CREDIT = 10_000_000
LATER = datetime(2031, 5, 17, tzinfo=UTC)
MONTH = "2031-05"


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Databases:
    return Databases("postgresql", tmp_path_factory.mktemp("databases"), postgres)


@pytest.fixture
def books(database: Database) -> Books:
    return open_books(database, credit=CREDIT)


def charge(books: Books, *, at: datetime | None = None, id: str | None = None) -> RequestId:
    """Settle a request whose id is of a moment, or any."""
    changes = {}
    if at is not None:
        id = first_request_id(at).ljust(36, "0")
    if id is not None:
        changes["request_id"] = RequestId(id)
    order = books.order(**changes)
    with books.database.transaction() as connection:
        hold(connection, [order])
    (closing,) = books.settle(with_output(order))
    assert closing is not None
    return order.request_id


@contextmanager
def sound(database: Database) -> Iterator[Connection]:
    """A transaction at whose end the books agree."""
    with database.transaction() as connection:
        yield connection
        assert reconcile(connection, now=datetime.now(UTC)) == []


def ids(connection: Connection, source: str) -> list[str]:
    return list(connection.exec_driver_sql(f"SELECT request_id FROM {source} ORDER BY 1").scalars())


def test_this_month_and_three_more_have_partitions(database: Database) -> None:
    with database.transaction() as connection:
        now = datetime.now(UTC)
        assert missing_months(connection, now) == []
        assert {each.table for each in list_partitions(connection, f"{now:%Y-%m}")} == {
            *PARTITIONED
        }
        assert len(list_partitions(connection)) == 4 * len(PARTITIONED)

        # Nothing created any for two months.
        made = create_ahead(connection, now + timedelta(days=62))

        assert len(made) == 2 * len(PARTITIONED)


def test_rows_of_a_month_leave_the_default_partition_when_it_is_created(books: Books) -> None:
    late, odd, now = charge(books, at=LATER), charge(books, id="zzz"), charge(books)
    with books.database.transaction() as connection:
        assert rows_in_default(connection)["receipts"] == 2

    with sound(books.database) as connection:
        create_month(connection, MONTH)

        assert ids(connection, "receipts_2031_05") == ids(connection, "outputs_2031_05") == [late]
        assert ids(connection, "receipts_default") == [odd]
        assert ids(connection, "receipts") == sorted([late, odd, now])
    with books.database.transaction() as connection, pytest.raises(DBAPIError, match="append-only"):
        connection.execute(receipts.delete().where(receipts.c.request_id == odd))


def test_empty_partitions_are_dropped_and_created_again(books: Books) -> None:
    late = charge(books, at=LATER)
    with sound(books.database) as connection:
        create_month(connection, MONTH)

        found = list_partitions(connection, MONTH)
        dropped = {each.table for each in found if drop_empty(connection, each)}

        assert dropped == {"receipt_steps", "transfers"}
        assert ids(connection, "receipts_2031_05") == [late]
        assert {each.table for each in create_again(connection, MONTH)} == dropped
        # Rows of before the first partition need none.
        assert create_again(connection, "2020-01") == []


def test_month_is_detached_attached_again_and_dropped(books: Books) -> None:
    late, now = charge(books, at=LATER), charge(books)
    with books.database.transaction() as connection:
        create_month(connection, MONTH)
        detach_month(connection, MONTH)

        assert ids(connection, "receipts") == [now]
        assert {each.attached for each in list_partitions(connection, MONTH)} == {False}
        assert {each.rule for each in reconcile(connection, now=datetime.now(UTC))} == {"R4"}
        with pytest.raises(DBAPIError, match="append-only"), connection.begin_nested():
            connection.exec_driver_sql("DELETE FROM receipts_2031_05")
    with sound(books.database) as connection:
        attach_month(connection, MONTH)

        assert ids(connection, "receipts") == sorted([late, now])
        with pytest.raises(ValueError, match="detach it first"):
            drop_month(connection, MONTH)
    with books.database.transaction() as connection:
        detach_month(connection, MONTH)
        drop_month(connection, MONTH)

        assert list_partitions(connection, MONTH) == []


async def test_scheduled_task_creates_partitions_and_counts_strays(books: Books) -> None:
    charge(books, id="zzz")
    newest = "2026-01"
    with books.database.transaction() as connection:
        newest = list_partitions(connection)[-1].month
        detach_month(connection, newest)
        drop_month(connection, newest)
    (task,) = partition_tasks(books.database)

    await task.run()

    with books.database.transaction() as connection:
        assert len(list_partitions(connection, newest)) == len(PARTITIONED)
    strays = metrics.REGISTRY.get_sample_value(
        "tollgate_default_partition_rows", {"table": "receipts"}
    )
    assert strays == 1


def test_key_of_a_transfer_is_used_once_in_all_months(books: Books) -> None:
    other = open_books(books.database, credit=0)
    with books.database.transaction() as connection:
        create_month(connection, MONTH)
    key = f"topup:{books.account.id}"

    with books.database.transaction() as connection, pytest.raises(IntegrityError, match=key):
        # As if its earlier use were not visible yet.
        connection.execute(
            transfers.insert().values(
                key=key, kind="topup", from_account=1, to_account=other.account.id,
                amount_nanos=1, posted_after=1, account_version=1, actor="x", booked_at=LATER,
            )
        )  # fmt: skip


def test_reference_to_a_missing_receipt_is_found(books: Books) -> None:
    with books.database.transaction() as connection:
        connection.execute(outputs.insert().values(request_id="x", body=b"", expires_at=LATER))

        (finding,) = reconcile(connection, now=datetime.now(UTC))

    assert str(finding) == "R14 outputs x: refers to no row of receipts"


def test_filled_database_is_migrated_down_and_up(books: Books) -> None:
    settled = [charge(books), charge(books, at=LATER), charge(books, id="zzz")]
    whole = select(receipts).order_by(receipts.c.request_id)
    with books.database.transaction() as connection:
        before = connection.execute(whole).all()

    with sound(books.database) as connection:
        _migrate(connection, "downgrade")
    with books.database.transaction() as connection:
        counted = [
            connection.exec_driver_sql(f"SELECT count(*) FROM {which}").scalar_one()
            for which in (
                "pg_inherits JOIN pg_class ON oid = inhparent WHERE relkind = 'p'",
                "pg_constraint WHERE contype = 'f' AND "
                "confrelid IN ('receipts'::regclass, 'transfers'::regclass)",
            )
        ]
        assert counted == [0, 8]
        with pytest.raises(IntegrityError), connection.begin_nested():
            connection.execute(outputs.insert().values(request_id="x", body=b"", expires_at=LATER))
        with pytest.raises(DBAPIError, match="append-only"), connection.begin_nested():
            connection.execute(receipts.delete())
    with sound(books.database) as connection:
        _migrate(connection, "upgrade")
        create_ahead(connection, datetime.now(UTC))

        assert connection.execute(whole).all() == before
        assert len(list_partitions(connection)) == 3 * len(PARTITIONED)
        assert rows_in_default(connection) == {
            "transfers": 0, "receipts": 2, "receipt_steps": 0, "outputs": 2
        }  # fmt: skip
        context = MigrationContext.configure(
            connection, opts={"compare_type": False, "include_object": is_described}
        )
        assert compare_metadata(context, metadata) == []
        with pytest.raises(DBAPIError, match="append-only"), connection.begin_nested():
            connection.execute(receipts.delete())
    again = open_books(books.database, credit=CREDIT)
    charge(again)
    with sound(books.database) as connection:
        newest = select(func.max(transfers.c.id))
        assert connection.execute(newest).scalar_one() > len(settled) + 1


def _migrate(connection: Connection, step: str) -> None:
    """Run one step of the migration alone, because later ones have no way back."""
    migration = importlib.import_module("migrations.versions.0019_partitions")
    with Operations.context(MigrationContext.configure(connection)):
        getattr(migration, step)()


def partitions_read(connection: Connection, query: Select[Any]) -> set[str]:
    """Names of the partitions that a query reads, according to its plan."""
    sql = query.compile(connection, compile_kwargs={"literal_binds": True})
    plan = connection.exec_driver_sql(f"EXPLAIN {sql}".replace("%", "%%")).scalars()
    names = r" on ((?:receipts|outputs|transfers)_\w+)"
    return set(re.findall(names, "\n".join(plan)))


def test_month_reads_two_or_three_partitions_of_many(books: Books) -> None:
    charge(books, at=LATER)
    with books.database.transaction() as connection:
        for month in ("2031-03", "2031-04", MONTH, "2031-06", "2031-07"):
            create_month(connection, month)
        span = span_of(MONTH)
        settled = select(func.sum(receipts.c.charge_nanos)).where(
            *settled_within(connection, *span)
        )
        booked = select(transfers.c.id).where(
            transfers.c.booked_at >= span.starts_at, transfers.c.booked_at < span.ends_at
        )
        lookup = select(receipts, outputs.c.body).outerjoin(
            outputs, outputs.c.request_id == receipts.c.request_id
        )
        id = first_request_id(LATER).ljust(36, "0")

        assert partitions_read(connection, settled) == {
            "receipts_2031_04", "receipts_2031_05", "receipts_2031_06"
        }  # fmt: skip
        assert partitions_read(connection, booked) == {"transfers_2031_05"}
        assert partitions_read(connection, lookup.where(receipts.c.request_id == id)) == {
            "receipts_2031_05", "outputs_2031_05"
        }  # fmt: skip


@contextmanager
def partitions_executed() -> Iterator[set[str]]:
    """Collect the partitions that SELECTs read when they run; others of their plans are skipped."""
    found: set[str] = set()

    def explain(
        connection: Connection, cursor: Any, statement: str, parameters: Any, *_: Any
    ) -> None:
        if not statement.lstrip().startswith("SELECT"):
            return
        with connection.connection.cursor() as asked:
            asked.execute(f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {statement}", parameters)
            lines = [row[0] for row in asked.fetchall() if "never executed" not in row[0]]
        found.update(re.findall(r" on ((?:receipts|transfers)_\w+)", "\n".join(lines)))

    event.listen(Engine, "before_cursor_execute", explain)
    yield found
    event.remove(Engine, "before_cursor_execute", explain)


def test_refunds_and_entries_read_the_receipts_of_their_months(books: Books) -> None:
    request_id = charge(books)
    with books.database.transaction() as connection:
        for month in ("2031-03", "2031-04", MONTH):
            create_month(connection, month)
        made = refund(connection, request_id, key="refund:1", actor="ann", reason="late")
    now = datetime.now(UTC)
    span = Span(now - timedelta(minutes=30), now + timedelta(minutes=30), ZoneInfo("UTC"))
    own = Filters((books.account.id,))
    account, month = books.account.id, now.strftime("%Y-%m")
    questions: dict[str, Callable[[Connection], Any]] = {
        "usage": lambda c: usage(c, span, ("model",), own, rolled=False)[0].refund_nanos,
        "rollup": lambda c: c.execute(booked_within(c, floor_hour(now), now + HOUR)).all(),
        "export": lambda c: list(
            native_tables(
                connection_reader(c), span, own, CSV_SCHEMA,
                ArchivedReceipts(connection_reader(c), None, ()),
            )
        ),
        "statement": lambda c: statement(c, account, month).lines,
        "ledger": lambda c: entries(c, account, limit=10)[1].requests,
        "entry": lambda c: find_entry(c, account, made.id),
        "receipt": lambda c: refunds_of(c, request_id),
    }  # fmt: skip

    for name, ask in questions.items():
        with partitions_executed() as read, books.database.snapshot() as connection:
            assert ask(connection), name
        strays = {each for each in read if "2031" in each}
        # A list looks for the newest transfers also in months that have not begun.
        if name in ("ledger", "entry"):
            strays = {each for each in strays if each.startswith("receipts")}
        assert strays == set(), name


def test_newest_requests_are_searched_in_the_newest_partitions_first(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement_time, "_RECENT", (timedelta(minutes=1), timedelta(days=366)))
    now = datetime.now(UTC)
    old = charge(books, id=first_request_id(now - timedelta(days=500)).ljust(36, "0"))
    new = charge(books)

    def page(choice: RequestFilter, limit: int, cursor: str | None) -> tuple[list[str], set[str]]:
        with partitions_executed() as read, books.database.snapshot() as connection:
            found, _ = read_page(connection, choice, limit=limit, cursor=cursor, oldest_first=False)
        return [each.request_id for each in found], read

    own = RequestFilter(books.account.id)
    found, read = page(own, 1, None)
    assert found == [new]
    assert f"receipts_before_{now:%Y_%m}" not in read
    assert page(own, 2, None)[0] == [new, old]
    assert page(own, 1, new)[0] == [old]
    assert page(own, 1, old)[0] == []
    assert page(own, 1, "req_" + "f" * 32)[0] == [new]
    assert page(RequestFilter(books.account.id, status="succeeded"), 2, None)[0] == [new, old]


def test_newest_entries_are_searched_in_the_newest_partitions_first(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement_time, "_RECENT", (timedelta(hours=2), timedelta(days=366)))
    books, old = open_books(database, credit=0), datetime.now(UTC) - timedelta(days=200)
    account, stray = books.account.id, f"transfers_before_{datetime.now(UTC):%Y_%m}"
    with database.transaction() as connection:
        for number in range(2):
            add_credit(
                connection, account, CREDIT, kind="grant", key=f"old:{number}",
                actor="ann", reason="x", clock=lambda: old,
            )  # fmt: skip
    newer = [charge(books) for _ in range(3)]

    def page(limit: int, below: int | None = None) -> tuple[list[int], bool]:
        with partitions_executed() as read, books.database.snapshot() as connection:
            found = entries(connection, account, limit=limit, below=below)
        return [each.id for each in found], stray in read

    whole, reads_all = page(10)
    assert reads_all
    assert whole == sorted(whole, reverse=True)
    assert len(whole) == 5
    assert page(2) == (whole[:2], False)
    assert page(1, below=whole[0]) == (whole[1:2], False)
    paged: list[int] = []
    while found := page(1, below=paged[-1] if paged else None)[0]:
        paged += found
    assert paged == whole

    for name, ask in {
        "entry": lambda c: find_entry(c, account, whole[0]),
        "charge": lambda c: charge_of(c, account, newer[0]),
        "credit": lambda c: add_credit(
            c, account, 5, kind="grant", key="new", actor="ann", reason="x"
        ),
        "refund": lambda c: refund(c, newer[0], key="refund:new", actor="ann", reason="x"),
    }.items():
        with partitions_executed() as read, books.database.transaction() as connection:
            assert ask(connection), name
        assert stray not in read, name


@pytest.mark.parametrize("count", [0, 3])
def test_statement_of_holds_and_settlements_reads_at_most_one_partition(
    books: Books, count: int
) -> None:
    """The one that locks balances; all others of them insert, or read other tables."""
    new = [new_request_id() for _ in range(count)]
    ends = {"new_first": min(new, default=None), "new_last": max(new, default=None)}
    values = {"new": new, **ends, "keys": [books.key.id], "open": []}
    engine = books.database._lanes["write"].engine
    with engine.begin() as connection:
        compiled, cursor = _LOCK._start(connection)
        sql = compiled.sql
        for number, name in enumerate(values, 1):
            sql = sql.replace(f"%({name})s", f"${number}")
        cursor.execute(f"PREPARE lock (text[], text, text, bigint[], text[]) AS {sql}")
        # As literals, because EXPLAIN takes no parameters.
        literals = ", ".join(psycopg.sql.Literal(value).as_string() for value in values.values())
        cursor.execute(f"EXPLAIN (COSTS OFF) EXECUTE lock ({literals})")
        plan = "\n".join(row[0] for row in cursor)

    assert "Subplans Removed" in plan
    assert set(re.findall(r" on (receipts_\w+)", plan)) == (
        {f"receipts_{datetime.now(UTC):%Y_%m}"} if new else set()
    )


def test_charges_of_many_months_are_proven_month_by_month(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    booked = {1: LATER, 2: now, 3: LATER}

    with books.database.snapshot() as connection:
        assert list(by_month(connection, booked)) == [booked]
        monkeypatch.setattr(chain, "SPLIT_FROM", 3)
        assert list(by_month(connection, booked)) == [{1: LATER, 3: LATER}, {2: now}]
        charge(books)
        monkeypatch.setattr(chain, "SPLIT_FROM", 1)
    with sound(books.database):
        pass


def test_queries_are_not_compiled(books: Books) -> None:
    for lane in books.database._lanes.values():
        with lane.engine.begin() as connection:
            assert connection.exec_driver_sql("SHOW jit").scalar() == "off"


def test_pages_start_no_parallel_workers(books: Books) -> None:
    # The sums of a page's accounts would be planned with two, whose start takes longer.
    with books.database._lanes["page"].engine.begin() as connection:
        setting = connection.exec_driver_sql("SHOW max_parallel_workers_per_gather").scalar()
        assert setting == "0"


def test_reports_find_receipts_of_any_id(books: Books) -> None:
    moments = [None, datetime(2020, 1, 1, tzinfo=UTC), LATER]
    settled = [charge(books, at=moment) for moment in moments]
    settled += [charge(books, id=id) for id in ("zzz", "0", "req_1")]
    now = datetime.now(UTC)
    span = Span(now - timedelta(hours=1), now + timedelta(hours=1), ZoneInfo("UTC"))
    month = now.strftime("%Y-%m")

    with books.database.snapshot() as connection:
        (whole,) = usage(connection, span, (), Filters(), rolled=False)
        billed = statement(connection, books.account.id, month).sum_nanos
        read = connection_reader(connection)
        tables = native_tables(read, span, Filters(), CSV_SCHEMA, ArchivedReceipts(read, None, ()))
        exported = [id for table in tables for id in table["request_id"].to_pylist()]

    assert whole.requests == len(settled)
    assert billed == whole.cost_nanos > 0
    assert sorted(exported) == sorted(settled)


async def test_all_connections_of_pages_know_the_partitions_before_the_first_visit(
    database_url: str,
) -> None:
    database = Database(database_url)
    met: list[int] = []

    def meet(connection: Connection) -> None:
        meet_partitions(connection)
        met.append(id(connection.connection.dbapi_connection))

    try:
        await database.prepare_pages(meet)
    finally:
        await database.close()

    assert len(met) == len(set(met)) == PAGE.threads

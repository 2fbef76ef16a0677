"""What is due to be told: found without the help of requests, and told once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event, func, select, update

from gateway.accounts.budgets import change_budget, create_budget, create_organisation_budget
from gateway.accounts.keys import create_key
from gateway.accounts.organisations import add_account, create_organisation
from gateway.audit_log import Author
from gateway.billing.statements.close import close_month
from gateway.catalog.store import LIST
from gateway.ids import new_request_id
from gateway.ledger.holds import hold
from gateway.ledger.periods import starts_at
from gateway.ledger.prices import cancel_price, put_in_force, set_price
from gateway.ledger.transfers import add_credit
from gateway.notices.due import due_notices
from gateway.notices.kinds import OPERATOR, Notice
from gateway.notices.price_changes import price_notices
from gateway.notices.store import (
    OUTBOX,
    StoredNotice,
    delete_expired,
    deliveries_of,
    list_notices,
    publish,
)
from gateway.notices.subscriptions import subscribe, unsubscribe
from gateway.pricing import Component, Price
from gateway.scheduled import notice_tasks
from gateway.sql.database import Database
from gateway.tables.core import budget_windows, budgets, keys
from gateway.tables.notices import notice_deliveries, notices
from gateway.tables.usage import usage_hourly
from gateway.webhooks.lanes import Lanes
from tests.ledger.books import PEPPER, Books, done, open_books

URL = "https://ops.example.com/hook"
COST = 500
"""Charge of one request of ``books``."""


def subscribed(
    database: Database, *, credit: int = 1_000_000, kinds: Sequence[str] | None = None
) -> Books:
    books = open_books(database, credit=credit)
    with database.transaction() as connection:
        subscribe(connection, books.account.id, URL, kinds)
    return books


def spend(books: Books, requests: int = 1) -> None:
    orders = [books.order() for _ in range(requests)]
    with books.database.transaction() as connection:
        hold(connection, orders)
    books.settle(*(done(one.request_id) for one in orders))


def tell(books: Books, now: datetime | None = None, *, low: int | None = None) -> list[Notice]:
    """Find and write what is due, as the scheduled task does; return what was found."""
    moment = now or datetime.now(UTC)
    with books.database.transaction() as connection:
        found = due_notices(connection, [books.account.id], moment, credit_low_nanos=low)
        publish(connection, found)
    return found


def told(books: Books, account_id: int | None = None) -> list[StoredNotice]:
    owner = books.account.id if account_id is None else account_id
    with books.database.transaction() as connection:
        return list_notices(connection, account_id=owner, kind=None, limit=50, before=None)[::-1]


def test_budget_tells_each_threshold_once_in_each_window(database: Database) -> None:
    books = subscribed(database)
    with database.transaction() as connection:
        budget = create_budget(
            connection, books.account.id, 20 * COST, window="day", name="team", hard=False
        )

    spend(books, 9)
    assert tell(books) == []
    spend(books)
    (half,) = tell(books)
    spend(books, 6)
    (most,) = tell(books)
    assert tell(books) == []

    assert (half.data["percent"], most.data["percent"]) == (50, 80)
    assert half.subject == f"budget {budget.id}"
    assert most.text.startswith(
        f"Budget {budget.id} “team” of account {books.account.name} passed 80 % of its limit: "
        "$0.000008 of $0.00001 were spent in the day from "
    )
    with database.transaction() as connection:
        table = budget_windows
        (row,) = connection.execute(select(table)).all()
        earlier = row.starts_us - 86_400_000_000
        connection.execute(
            table.insert().values({**row._mapping, "starts_us": earlier, "hard": False})
        )
    assert [each.data["percent"] for each in tell(books)] == [50, 80], "of yesterday's window"
    assert len(told(books)) == 4


def test_jumping_over_thresholds_tells_all_of_them(sqlite: Database) -> None:
    books = subscribed(sqlite)
    with sqlite.transaction() as connection:
        create_budget(connection, books.account.id, COST, window="total", hard=False)

    spend(books, 2)

    assert [each.data["percent"] for each in tell(books)] == [50, 80, 100]
    assert {each.data["percent"] for each in told(books)} == {50, 80, 100}


async def test_budget_of_an_organisation_is_told_to_its_accounts_and_the_operator(
    sqlite: Database,
) -> None:
    one, other, stranger = (subscribed(sqlite) for _ in range(3))
    with sqlite.transaction() as connection:
        subscribe(connection, OPERATOR, URL, ["budget.passed"])
        group = create_organisation(connection, "group")
        for books in (one, other):
            add_account(connection, group.id, books.account.id)
        budget = create_organisation_budget(connection, group.id, 2 * COST, window="day")

    spend(one)

    await notice_tasks(sqlite, credit_low_nanos=None)[0].run()
    await notice_tasks(sqlite, credit_low_nanos=None)[0].run()
    for account_id in (one.account.id, other.account.id, OPERATOR):
        (notice,) = told(one, account_id)
        assert (notice.subject, notice.data["organisation"]) == (f"budget {budget.id}", "group")
        assert notice.text.startswith(f"Budget {budget.id} of organisation group passed 50 %")
    assert told(stranger) == []


def test_changed_limit_has_thresholds_of_its_own(sqlite: Database) -> None:
    books = subscribed(sqlite)
    with sqlite.transaction() as connection:
        budget = create_budget(connection, books.account.id, 2 * COST, window="month")
    spend(books)
    assert [each.data["percent"] for each in tell(books)] == [50]

    with sqlite.transaction() as connection:
        change_budget(connection, budget.id, limit_nanos=4 * COST)
    assert tell(books) == []
    spend(books)

    assert [each.data["limit"] for each in tell(books)] == ["0.000002"]


def test_gateways_that_find_the_same_tell_it_once(database: Database) -> None:
    books = subscribed(database)
    with database.transaction() as connection:
        create_budget(connection, books.account.id, COST, window="day", hard=False)
    spend(books)
    now = datetime.now(UTC)
    with database.transaction() as connection:
        found = due_notices(connection, [books.account.id], now, credit_low_nanos=None)

    for _ in range(2):
        with database.transaction() as connection:
            publish(connection, found)

    assert len(found) == 3
    with database.transaction() as connection:
        assert connection.scalar(select(func.count()).select_from(notice_deliveries)) == 3


def test_accounts_without_a_subscription_are_told_nothing_and_cost_nothing(
    sqlite: Database,
) -> None:
    books = open_books(sqlite, credit=1_000_000)
    other = subscribed(sqlite, kinds=["month.closed"])
    for each in (books, other):
        with sqlite.transaction() as connection:
            create_budget(connection, each.account.id, COST, window="day", hard=False)
        spend(each)

    assert tell(books) == []
    assert tell(other) == [], "it asked for another kind"


def test_keys_that_expire_are_announced(sqlite: Database) -> None:
    books = subscribed(sqlite)
    now, day, hour = datetime.now(UTC), timedelta(days=1), timedelta(hours=1)
    for life, left, expected in (
        (30 * day, 8 * day, None),
        (30 * day, 6 * day, "expires within 7 days"),
        (30 * day, 5 * hour, "expires within a day"),
        (30 * day, -hour, "expired"),
        (30 * day, -2 * day, None),
        (3 * day, 2 * day, None),
        (12 * hour, -hour, None),
    ):
        with sqlite.transaction() as connection:
            _, key = create_key(connection, books.account.id, pepper=PEPPER, name="ci")
            connection.execute(
                update(keys)
                .where(keys.c.id == key.id)
                .values(expires_at=now + left, created_at=now + left - life)
            )

        found = tell(books, now)

        name = f"Key {key.id} “ci” of {books.account.name}"
        assert [each.title for each in found] == ([f"{name} {expected}"] if expected else [])
    assert tell(books, now) == []


def test_revoked_keys_are_not_announced_and_a_new_expiry_is(sqlite: Database) -> None:
    books = subscribed(sqlite)
    now = datetime.now(UTC)
    with sqlite.transaction() as connection:
        _, key = create_key(
            connection, books.account.id, pepper=PEPPER, expires_at=now + timedelta(days=30)
        )
    assert len(tell(books, now + timedelta(days=25))) == 1
    change = update(keys).where(keys.c.id == key.id)
    with sqlite.transaction() as connection:
        connection.execute(change.values(expires_at=now + timedelta(days=60)))

    assert tell(books, now + timedelta(days=26)) == []
    assert len(tell(books, now + timedelta(days=55))) == 1
    with sqlite.transaction() as connection:
        connection.execute(change.values(revoked_at=now))
    assert tell(books, now + timedelta(days=59, hours=12)) == []


def test_credit_that_expires_is_announced_with_what_is_left(database: Database) -> None:
    books = subscribed(database, credit=0)
    now = datetime.now(UTC)
    with database.transaction() as connection:
        for number, kind in enumerate(("topup", "grant")):
            add_credit(
                connection,
                books.account.id,
                1000,
                kind=kind,  # type: ignore[arg-type]  # one of its values
                key=f"credit:{books.account.id}:{number}",
                actor="test",
                reason="test",
                expires_at=now + timedelta(days=20),
            )
    spend(books)

    assert tell(books, now + timedelta(days=12)) == []
    (week,) = tell(books, now + timedelta(days=14))
    (day,) = tell(books, now + timedelta(days=19, hours=1))

    assert week.data["amount"] == day.data["amount"] == "0.0000015"
    assert "of the credit of account" in week.text


def test_low_credit_is_told_again_only_after_more_credit(sqlite: Database) -> None:
    books = subscribed(sqlite, credit=1000)

    assert tell(books, low=500) == []
    spend(books)
    assert len(tell(books, low=501)) == 1
    assert tell(books, low=800) == []
    with sqlite.transaction() as connection:
        add_credit(
            connection,
            books.account.id,
            100,
            kind="topup",
            key=new_request_id(),
            actor="t",
            reason="t",
        )

    assert len(tell(books, low=800)) == 1


def test_price_changes_are_announced_to_those_who_used_the_model(database: Database) -> None:
    books, other = subscribed(database), subscribed(database)
    now, later = datetime.now(UTC), datetime.now(UTC) + timedelta(days=3)
    used = {
        "account_id": books.account.id,
        "hour": now.replace(minute=0, second=0, microsecond=0) - timedelta(days=2),
        "key_id": books.key.id,
        "model": "m",
        "task": "text-generation",
        "outcome": "charged",
        **{column.name: 1 for column in usage_hourly.c if not column.primary_key},
    }
    dear = Price((Component("input_token", 30, 1000),), minimum_nanos=7)
    with database.transaction() as connection:
        connection.execute(usage_hourly.insert().values(used))
        set_price(connection, "m", dear, starts_at=later, actor="ann", reason="costs")

    def changes(moment: datetime) -> list[Notice]:
        ids = [books.account.id, other.account.id]
        with database.transaction() as connection:
            found = price_notices(connection, ids, moment, cache={})
            publish(connection, found)
        return found

    (ahead,) = changes(now)
    assert changes(now) == []
    with database.transaction() as connection:
        cancel_price(
            connection, "m", account_id=LIST, starts_at=later, now=now, actor="ann", reason="no"
        )
    (ended,) = changes(now)
    assert changes(now) == []
    with database.transaction() as connection:
        set_price(
            connection,
            "m",
            dear,
            account_id=other.account.id,
            starts_at=now,
            actor="ann",
            reason="contract",
        )
        put_in_force(connection, "new", dear, now)
    (own,) = changes(now + timedelta(minutes=5))

    assert ahead.account_id == ended.account_id == books.account.id
    assert (
        "Until then: $0.00000002 per input token, $0.00000008 per output token. From then on: "
        "$0.00000003 per 1,000 input tokens, at least $0.000000007 for each request. A request"
    ) in ahead.text
    assert ended.data["cancelled"]
    assert own.account_id == other.account.id
    assert " changed at " in own.title


def test_closed_month_is_told_in_the_transaction_that_closes_it(sqlite: Database) -> None:
    books = subscribed(sqlite)
    with sqlite.transaction() as connection:
        subscribe(connection, OPERATOR, "mailto:ops@example.com", None)
    month = f"{datetime.now(UTC):%Y-%m}"
    after = starts_at(month) + timedelta(days=33)
    spend(books)

    for _ in range(2):
        close_month(sqlite, month, author=Author("calendar", "system"), clock=lambda: after)

    (statement,) = told(books)
    (sealed,) = told(books, OPERATOR)
    assert statement.kind == sealed.kind == "month.closed"
    assert "invoice" in statement.text
    assert f"/v1/statements/{month}" in statement.text
    assert sealed.data["receipts"] == 1


def test_removed_subscription_gets_nothing_more(sqlite: Database) -> None:
    books = subscribed(sqlite)
    with sqlite.transaction() as connection:
        create_budget(connection, books.account.id, COST, window="day", hard=False)
        kept = subscribe(connection, books.account.id, "mailto:a@example.com", None)
    spend(books)
    tell(books)

    ids = [each.id for each in told(books)]
    with sqlite.transaction() as connection:
        claimed = OUTBOX.claim(connection, Lanes(), datetime.now(UTC), after=-1)
        unsubscribe(connection, kept.id)
        left = deliveries_of(connection, ids)

    assert {one.url for one in claimed.taken} == {URL, "mailto:a@example.com"}
    assert {one.url for each in left.values() for one in each} == {URL}


def test_retention_keeps_what_could_be_told_again(sqlite: Database) -> None:
    books = subscribed(sqlite)
    with sqlite.transaction() as connection:
        for window in ("total", "day"):
            create_budget(connection, books.account.id, COST, window=window, hard=False)  # type: ignore[arg-type]  # two of its values
    spend(books)
    tell(books)

    with sqlite.transaction() as connection:
        later = datetime.now(UTC) + timedelta(seconds=1)
        counts = [delete_expired(connection, later, limit=2) for _ in range(3)]

    assert counts == [2, 1, 0]
    assert {each.data["window"] for each in told(books)} == {"total"}


async def test_task_tells_every_account_although_one_has_an_unreadable_row(
    sqlite: Database, caplog: pytest.LogCaptureFixture
) -> None:
    broken, fine = subscribed(sqlite), subscribed(sqlite)
    for books in (broken, fine):
        with sqlite.transaction() as connection:
            create_budget(connection, books.account.id, COST, window="day", hard=False)
        spend(books)
    with sqlite.transaction() as connection:
        connection.execute(
            update(budgets).where(budgets.c.account_id == broken.account.id).values(tz="Atlantis")
        )
    task, prices, *_ = notice_tasks(sqlite, credit_low_nanos=None)

    await task.run()
    await task.run()
    await prices.run()

    assert len(told(fine)) == 3
    assert told(broken) == []
    assert f"account {broken.account.id} could not be found" in caplog.text


def test_queries_of_notices_use_indexes(database: Database) -> None:
    books = subscribed(database)
    with database.transaction() as connection:
        create_budget(connection, books.account.id, COST, window="day", hard=False)
    spend(books)
    seen: list[tuple[str, object]] = []

    @event.listens_for(database.engine, "before_cursor_execute")
    def note(connection, cursor, statement, parameters, context, many):  # type: ignore[no-untyped-def]  # an event's
        if statement.startswith(("SELECT", "WITH")):
            seen.append((statement, parameters))

    tell(books, low=1)
    told(books)
    with database.transaction() as connection:
        OUTBOX.claim(connection, Lanes(), datetime.now(UTC), after=-1)
        delete_expired(connection, datetime.now(UTC) - timedelta(days=1), limit=5)
    event.remove(database.engine, "before_cursor_execute", note)

    postgresql = database.engine.dialect.name == "postgresql"
    tables = "notices|notice_|keys|lots|budget|transfers"
    with database.transaction() as connection:
        if postgresql:
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        for statement, parameters in seen:
            explain = "EXPLAIN " if postgresql else "EXPLAIN QUERY PLAN "
            plan = str(connection.exec_driver_sql(explain + statement, parameters).all())
            assert "Seq Scan" not in plan, (statement, plan)
            for table in tables.split("|"):
                scanned = plan.replace("USING INDEX", "").replace("USING COVERING INDEX", "")
                assert f"SCAN {table}" not in scanned or "USING" in plan, (statement, plan)
    assert seen
    assert notices.c.key.unique


def test_number_of_a_removed_subscription_is_not_used_again(database: Database) -> None:
    with database.transaction() as connection:
        first = subscribe(connection, OPERATOR, "mailto:ann@example.com", None)
        unsubscribe(connection, first.id)
        second = subscribe(connection, OPERATOR, "mailto:bob@example.com", None)

    assert second.id > first.id

"""Webhook deliveries in SQL: fair claims, recorded attempts, postponed silent receivers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sqlalchemy import event, func, select, text, update

from gateway.ledger.holds import hold
from gateway.sql.database import Database
from gateway.tables.webhooks import webhook_attempts, webhook_deliveries
from gateway.webhooks.deliveries import (
    OUTBOX,
    delete_ended,
    find_delivery,
    list_deliveries,
    send_again,
)
from gateway.webhooks.lanes import ACCOUNT_MAX, FAILURES_MAX, HOST_MAX, POOL, Lanes
from gateway.webhooks.outbox import ATTEMPTS_MAX, SERIES_MAX, AttemptResult, Claim, Claimed
from tests.ledger.books import Books, done, open_books

SOON = timedelta(seconds=1)


def test_one_account_cannot_fill_the_pool(
    database: Database,
) -> None:
    greedy = deliveries(database, 100)
    modest = [deliveries(database, 1) for _ in range(5)]

    lanes = Lanes()
    taken = claimed(database, lanes).taken

    assert sum(one.account_id == greedy.account.id for one in taken) == ACCOUNT_MAX
    assert {one.account_id for one in taken} == {
        greedy.account.id,
        *(books.account.id for books in modest),
    }


def test_accounts_are_served_in_turn_when_the_pool_is_nearly_full(database: Database) -> None:
    accounts = [deliveries(database, 3) for _ in range(4)]
    lanes, order, after = Lanes(), [], 0
    for number in range(POOL - 1):
        lanes.start(-number, f"busy-{number}")

    for _ in range(8):
        found = claimed(database, lanes.copy(), after=after)
        (one,) = found.taken
        order.append(one.account_id)
        after = found.after

    assert order == [books.account.id for books in accounts] * 2


def test_oldest_delivery_of_an_account_is_sent_first(database: Database) -> None:
    books = deliveries(database, 20)
    with database.transaction() as connection:
        ids = connection.scalars(select(webhook_deliveries.c.request_id)).all()
        for age, request_id in enumerate(ids):
            connection.execute(
                update(webhook_deliveries)
                .where(webhook_deliveries.c.request_id == request_id)
                .values(due_at=datetime.now(UTC) - timedelta(minutes=age))
            )

    taken = claimed(database, Lanes()).taken

    assert [one.id for one in taken] == list(reversed(ids))[:ACCOUNT_MAX]
    assert {one.account_id for one in taken} == {books.account.id}


def test_one_host_fills_a_part_of_the_pool(database: Database) -> None:
    for _ in range(4):
        deliveries(database, ACCOUNT_MAX, url="https://shared.example.com/hook")
    other = deliveries(database, 1, url="https://other.example.com/hook")

    taken = claimed(database, Lanes()).taken

    assert sum(one.host == "shared.example.com" for one in taken) == HOST_MAX
    assert other.account.id in {one.account_id for one in taken}


def test_claimed_delivery_is_left_alone_by_other_gateways_for_a_minute(database: Database) -> None:
    deliveries(database, 1)
    now = datetime.now(UTC) + SOON

    assert len(claimed(database, Lanes(), now=now).taken) == 1
    assert not claimed(database, Lanes(), now=now + timedelta(seconds=59)).taken
    (again,) = claimed(database, Lanes(), now=now + timedelta(seconds=61)).taken
    assert (again.attempts, again.number) == (2, 2)


def test_silent_receiver_is_probed_by_one_delivery_at_a_time(database: Database) -> None:
    books = deliveries(database, 30)
    lanes, now = Lanes(), datetime.now(UTC) + SOON
    for _ in range(FAILURES_MAX):
        lanes.failed(books.account.id, "example.com", now)

    assert not claimed(database, lanes, now=now).taken, "all of them are put off"
    later = now + timedelta(minutes=2)
    assert len(claimed(database, lanes, now=later).taken) == 1
    assert not claimed(database, lanes, now=later + SOON).taken, "while the probe is in flight"
    lanes.end(books.account.id, "example.com")
    lanes.answered(books.account.id, "example.com")
    much_later = later + timedelta(minutes=2)
    assert len(claimed(database, lanes, now=much_later).taken) == ACCOUNT_MAX
    with database.transaction() as connection:
        attempts = connection.scalars(select(webhook_deliveries.c.attempts)).all()
    assert sum(attempts) == 1 + ACCOUNT_MAX, "being put off costs no attempt"


def test_silent_receiver_of_one_account_is_open_for_another_account(database: Database) -> None:
    bad, good = deliveries(database, 1), deliveries(database, 1)
    lanes, now = Lanes(), datetime.now(UTC) + SOON
    for _ in range(FAILURES_MAX):
        lanes.failed(bad.account.id, "example.com", now)

    (one,) = claimed(database, lanes, now=now).taken

    assert one.account_id == good.account.id


def test_delivery_is_given_up_by_its_attempts_or_its_age(database: Database) -> None:
    deliveries(database, 2)
    old, tried = ids_of(database)
    with database.transaction() as connection:
        for request_id, values in (
            (old, {"queued_at": datetime.now(UTC) - SERIES_MAX}),
            (tried, {"attempts": ATTEMPTS_MAX}),
        ):
            connection.execute(
                update(webhook_deliveries)
                .where(webhook_deliveries.c.request_id == request_id)
                .values(**values)
            )

    found = claimed(database, Lanes())

    assert (list(found.taken), len(found.given_up)) == ([], 2)
    with database.transaction() as connection:
        assert {one.status for one in list_deliveries(connection, account_id=None, limit=5)} == {
            "failed"
        }


def test_attempts_are_recorded_and_a_late_result_changes_nothing(database: Database) -> None:
    deliveries(database, 1)
    now = datetime.now(UTC) + SOON
    (first,) = claimed(database, Lanes(), now=now).taken
    (second,) = claimed(database, Lanes(), now=now + timedelta(seconds=61)).taken

    with database.transaction() as connection:
        OUTBOX.record(connection, [result(second, code=204)], now)
        OUTBOX.record(connection, [result(first, error="timeout")], now)
        found = find_delivery(connection, first.id, account_id=None)

    assert found is not None
    assert found.status == "delivered"
    assert [(one.number, one.code, one.error) for one in found.attempts] == [
        (1, None, "timeout"),
        (2, 204, None),
    ]


def test_attempt_that_was_not_made_does_not_count(database: Database) -> None:
    deliveries(database, 1)
    now = datetime.now(UTC) + SOON
    (one,) = claimed(database, Lanes(), now=now).taken

    with database.transaction() as connection:
        OUTBOX.record(connection, [result(one)], now)
    (again,) = claimed(database, Lanes(), now=now + timedelta(seconds=6)).taken

    assert (again.attempts, again.number) == (1, 1)


def test_result_of_a_delivery_that_was_deleted_is_dropped(database: Database) -> None:
    deliveries(database, 2)
    gone, kept = claimed(database, Lanes()).taken
    with database.transaction() as connection:
        connection.execute(
            webhook_deliveries.delete().where(webhook_deliveries.c.request_id == gone.id)
        )
        OUTBOX.record(
            connection, [result(gone, code=200), result(kept, code=200)], datetime.now(UTC)
        )

        assert find_delivery(connection, kept.id, account_id=None).status == "delivered"  # type: ignore[union-attr]  # it is there


def test_delivery_is_sent_again_by_its_own_account_only(database: Database) -> None:
    owner, other = deliveries(database, 1), deliveries(database, 0)
    (one,) = claimed(database, Lanes()).taken
    now = datetime.now(UTC)
    with database.transaction() as connection:
        OUTBOX.record(connection, [result(one, code=410)], now)

    with database.transaction() as connection:
        stolen = send_again(connection, one.id, account_id=other.account.id, now=now)
        mine = send_again(connection, one.id, account_id=owner.account.id, now=now)

    assert stolen is None
    assert mine is not None
    assert mine.status == "pending"
    (again,) = claimed(database, Lanes()).taken
    assert (again.attempts, again.number) == (1, 2)


def test_ended_deliveries_are_deleted_in_bounded_batches(database: Database) -> None:
    deliveries(database, 5)
    taken = claimed(database, Lanes()).taken
    now = datetime.now(UTC)
    with database.transaction() as connection:
        OUTBOX.record(connection, [result(one, code=200) for one in taken[:4]], now)

    with database.transaction() as connection:
        counts = [delete_ended(connection, now + SOON, limit=3) for _ in range(3)]
        left = list_deliveries(connection, account_id=None, limit=10)
        attempts = connection.scalar(select(func.count()).select_from(webhook_attempts))

    assert counts == [3, 1, 0]
    assert [one.status for one in left] == ["pending"]
    assert attempts == 0


def test_lists_page_by_request_and_filter_by_state(database: Database) -> None:
    books = deliveries(database, 4)
    taken = claimed(database, Lanes()).taken
    with database.transaction() as connection:
        OUTBOX.record(connection, [result(taken[0], code=200)], datetime.now(UTC))
        mine = list_deliveries(connection, account_id=books.account.id, limit=3)
        rest = list_deliveries(
            connection, account_id=books.account.id, limit=3, before=mine[-1].request_id
        )
        pending = list_deliveries(connection, account_id=None, limit=9, status="pending")
        delivered = list_deliveries(connection, account_id=None, limit=9, status="delivered")

    ids = [one.request_id for one in (*mine, *rest)]
    assert ids == sorted(ids, reverse=True)
    assert len(ids) == 4
    assert (len(pending), len(delivered)) == (3, 1)


def test_every_query_of_deliveries_uses_an_index(database: Database) -> None:
    deliveries(database, 300)
    seen: list[tuple[str, object]] = []

    @event.listens_for(database.engine, "before_cursor_execute")
    def note(connection, cursor, statement, parameters, context, many):  # type: ignore[no-untyped-def]  # an event's
        if statement.startswith(("SELECT", "WITH")) and "webhook" in statement:
            seen.append((statement, parameters))

    found = claimed(database, Lanes())
    with database.transaction() as connection:
        OUTBOX.record(connection, [result(one, code=200) for one in found.taken], datetime.now(UTC))
        list_deliveries(connection, account_id=4, limit=2)
        list_deliveries(connection, account_id=4, limit=2, status="failed")
        list_deliveries(connection, account_id=None, limit=2, status="failed")
        delete_ended(connection, datetime.now(UTC), limit=2)
    event.remove(database.engine, "before_cursor_execute", note)

    postgresql = database.engine.dialect.name == "postgresql"
    with database.transaction() as connection:
        if postgresql:
            connection.execute(text("ANALYZE webhook_deliveries"))
            connection.execute(text("SET LOCAL enable_seqscan = off"))
        for statement, parameters in seen:
            explain = "EXPLAIN " if postgresql else "EXPLAIN QUERY PLAN "
            plan = str(connection.exec_driver_sql(explain + statement, parameters).all())
            assert "Seq Scan" not in plan, (statement, plan)
            scans = plan.replace("SCAN walk", "").replace("SCAN webhook_deliveries USING", "")
            assert "SCAN webhook" not in scans, (statement, plan)


def deliveries(database: Database, number: int, *, url: str = "https://example.com/hook") -> Books:
    """An account with a number of ended requests that have a webhook."""
    books = open_books(database, credit=10_000_000)
    orders = [books.order(webhook=url) for _ in range(number)]
    if orders:
        with database.transaction() as connection:
            hold(connection, orders)
        books.settle(*(done(one.request_id) for one in orders))
    return books


def claimed(
    database: Database, lanes: Lanes, *, now: datetime | None = None, after: int = 0
) -> Claim:
    """Claim as the loop does; claimed deliveries are in flight afterwards."""
    with database.transaction() as connection:
        return OUTBOX.claim(connection, lanes, now or datetime.now(UTC) + SOON, after=after)


def ids_of(database: Database) -> list[str]:
    with database.transaction() as connection:
        return list(connection.scalars(select(webhook_deliveries.c.request_id)))


def result(of: Claimed, *, code: int | None = None, error: str | None = None) -> AttemptResult:
    return replace(AttemptResult(of, datetime.now(UTC), 12), code=code, error=error)

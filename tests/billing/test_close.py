"""Closing months: sealed, invoiced and rebated once, despite crashes; statements add up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import DBAPIError

from gateway.audit_log import Author
from gateway.billing.reconciliation import check_books
from gateway.billing.statements.close import (
    CannotClose,
    changed_since_close,
    close_month,
    credit_note,
    find_period,
    rebate_due,
    set_rebates,
)
from gateway.billing.statements.pages import Issuer, html, lay_out, pdf
from gateway.billing.statements.statement import NANOS_PER_CENT, invoices_of, statement
from gateway.ledger.holds import hold
from gateway.ledger.periods import booking_time
from gateway.ledger.refunds import refund
from gateway.ledger.settle import settle
from gateway.ledger.transfers import add_credit
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from gateway.tables.core import periods, receipts
from gateway.tables.invoices import invoices
from tests.ledger.books import Books, done, open_books

MARCH = datetime(2026, 3, 10, tzinfo=UTC)
AFTER = datetime(2026, 4, 1, 0, 10, tzinfo=UTC)


def at(moment: datetime) -> Callable[[], datetime]:
    return lambda: moment


def spend(books: Books, moment: datetime, **usage: int) -> str:
    order = books.order(accepted_at=moment, deadline_at=moment + timedelta(minutes=1))
    with books.database.transaction() as connection:
        hold(connection, [order])
        settle(
            connection,
            [done(order.request_id, **usage)],
            now=booking_time(connection, at(moment)),
            prices=books.prices,
            retention=timedelta(hours=1),
        )
    return order.request_id


@pytest.fixture
def books(database: Database) -> Books:
    made = open_books(database, credit=0)
    with database.transaction() as connection:
        add_credit(
            connection, made.account.id, 10**9,
            kind="topup", key="t", actor="test", reason="paid", clock=at(MARCH),
        )  # fmt: skip
    return made


def closed(books: Books, month: str = "2026-03", now: datetime = AFTER) -> None:
    close_month(books.database, month, author=Author("test", "system"), clock=at(now))


def test_closed_month_is_sealed_and_invoiced_and_accepts_no_bookings(books: Books) -> None:
    first = spend(books, MARCH)
    spend(books, MARCH + timedelta(days=1), input_tokens=10, output_tokens=10)
    with books.database.transaction() as connection:
        refund(connection, first, 100, key="r", actor="test", reason="late", clock=at(MARCH))
    closed(books)
    late = spend(books, MARCH + timedelta(days=20))

    with books.database.transaction() as connection:
        period = find_period(connection, "2026-03")
        made = statement(connection, books.account.id, "2026-03")
        moment = connection.execute(
            select(receipts.c.settled_at).where(receipts.c.request_id == late)
        ).scalar()
    assert (period.state, period.receipts, period.charge_nanos) == ("closed", 2, 1500)
    assert moment == datetime(2026, 4, 1, tzinfo=UTC)
    assert [(line.kind, line.unit, line.quantity, line.amount_nanos) for line in made.lines] == [
        ("usage", "input_token", "15", 300),
        ("usage", "output_token", "15", 1200),
        ("refund", None, None, -100),
    ]
    assert (made.opening_nanos, made.closing_nanos) == (0, 10**9 - 1400)
    assert (made.total_cents, made.carried_out_nanos) == (0, 1400)
    assert made.invoice is not None
    assert made.invoice.number == "2026-000001"
    assert [each.kind for each in made.movements] == ["topup"]


def test_closing_again_changes_nothing(books: Books) -> None:
    spend(books, MARCH)
    with books.database.transaction() as connection:
        set_rebates(connection, 0, {0: 1000})
    for _ in range(3):
        closed(books)

    with books.database.transaction() as connection:
        assert len(invoices_of(connection, books.account.id)) == 1
    assert books.balance().posted_nanos == 10**9 - 500 + 50


def test_a_month_is_not_closed_before_its_end_nor_before_the_one_before(books: Books) -> None:
    with pytest.raises(CannotClose, match="five minutes later"):
        closed(books, now=datetime(2026, 4, 1, 0, 4, tzinfo=UTC))
    spend(books, AFTER + timedelta(days=3))
    with pytest.raises(CannotClose, match="2026-03 is still open"):
        closed(books, "2026-04", now=AFTER + timedelta(days=60))


def test_any_sequence_of_months_adds_up_to_the_ledger(books: Books) -> None:
    r = random.Random(7)
    spent = 0
    price = Price((Component("request", 3_333_333),))
    months = ["2026-03", "2026-04", "2026-05", "2026-06", "2026-07"]
    with books.database.transaction() as connection:
        from gateway.ledger.prices import put_in_force

        price_id = put_in_force(connection, "dear", price, MARCH)
    for month in months:
        for _ in range(r.randrange(7)):
            moment = datetime.fromisoformat(f"{month}-15T00:00:00+00:00")
            order = books.order(
                accepted_at=moment, model="dear", price_id=price_id, hold_nanos=3_333_333
            )
            with books.database.transaction() as connection:
                hold(connection, [order])
                settle(
                    connection,
                    [done(order.request_id)],
                    now=booking_time(connection, at(moment)),
                    prices=books.prices,
                    retention=timedelta(hours=1),
                )
            spent += 3_333_333
    for month in months:
        with books.database.transaction() as connection:
            known = connection.execute(select(periods.c.month)).scalars().all()
        if month in known:
            closed(books, month, now=datetime(2026, 9, 1, tzinfo=UTC))

    with books.database.transaction() as connection:
        issued = invoices_of(connection, books.account.id)
    total = sum(each.total_cents for each in issued) * NANOS_PER_CENT
    assert total + issued[-1].carried_out_nanos == spent == 10**9 - books.balance().posted_nanos
    assert all(0 <= each.carried_out_nanos < NANOS_PER_CENT for each in issued)
    assert [each.number for each in issued] == [
        f"2026-{number:06d}" for number in range(1, len(issued) + 1)
    ]


def test_rebates_apply_to_the_spending_within_each_tier(books: Books) -> None:
    for _ in range(4):
        spend(books, MARCH)
    with books.database.transaction() as connection:
        set_rebates(connection, 0, {0: 5000})
        assert rebate_due(connection, books.account.id, "2026-03") == 1000
        set_rebates(connection, books.account.id, {500: 1000, 1500: 2000})
        assert rebate_due(connection, books.account.id, "2026-03") == 100 + 100
        assert rebate_due(connection, books.account.id, "2026-02") == 0


def test_invoice_is_final_and_corrected_by_a_credit_note(books: Books) -> None:
    for _ in range(30):
        spend(books, MARCH, input_tokens=10, output_tokens=10)
    with books.database.transaction() as connection:
        connection.execute(update(periods).values(state="open"))
    books.prices.clear()
    closed(books)
    with books.database.transaction() as connection:
        (made,) = invoices_of(connection, books.account.id)
        assert made.total_cents == 0
        with pytest.raises(ValueError, match="whole cents"):
            credit_note(connection, made.number, 10**7, actor="test", reason="x")
        with pytest.raises(LookupError):
            credit_note(connection, "2026-000099", 10**7, actor="test", reason="x")
    for statement_ in (update(invoices).values(total_cents=7), invoices.delete()):
        with pytest.raises(DBAPIError, match="append-only"), books.database.transaction() as c:
            c.execute(statement_)


def test_credit_notes_do_not_exceed_the_invoice(books: Books) -> None:
    with books.database.transaction() as connection:
        from gateway.ledger.prices import put_in_force

        price_id = put_in_force(
            connection, "dear", Price((Component("request", 25_000_000),)), MARCH
        )
    order = books.order(accepted_at=MARCH, model="dear", price_id=price_id, hold_nanos=25_000_000)
    with books.database.transaction() as connection:
        hold(connection, [order])
        settle(
            connection,
            [done(order.request_id)],
            now=booking_time(connection, at(MARCH)),
            prices=books.prices,
            retention=timedelta(hours=1),
        )
    closed(books)
    with books.database.transaction() as connection:
        (made,) = invoices_of(connection, books.account.id)
        note = credit_note(connection, made.number, 10**7, actor="test", reason="kindness")
        assert (note.kind, note.total_cents, note.corrects) == ("credit_note", -1, made.number)
        with pytest.raises(ValueError, match=r"up to \$0\.01"):
            credit_note(connection, made.number, 2 * 10**7, actor="test", reason="more")
        assert check_books(connection, now=datetime.now(UTC)) == []
    assert books.balance().posted_nanos == 10**9 - 15_000_000


def test_changes_in_a_closed_month_are_found(books: Books) -> None:
    spend(books, MARCH)
    closed(books)
    with books.database.transaction() as connection:
        assert not changed_since_close(connection, "2026-03")
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL session_replication_role = replica"))
        else:
            connection.execute(text("DROP TRIGGER receipts_no_update"))
        connection.execute(text("UPDATE receipts SET reason = 'other'"))

        assert changed_since_close(connection, "2026-03")
        assert "R13" in {found.rule for found in check_books(connection, now=datetime.now(UTC))}


def test_nothing_is_booked_into_a_month_while_it_is_closed(books: Books) -> None:
    """Settling races closing: what is booked into March is sealed, the rest is in April."""
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def settle_some() -> None:
        barrier.wait()
        try:
            for _ in range(15):
                spend(books, MARCH + timedelta(days=2))
        except BaseException as error:
            failures.append(error)

    def close() -> None:
        barrier.wait()
        try:
            closed(books)
        except BaseException as error:
            failures.append(error)

    spend(books, MARCH)
    threads = [threading.Thread(target=settle_some) for _ in range(3)]
    threads.append(threading.Thread(target=close))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    with books.database.transaction() as connection:
        sealed = find_period(connection, "2026-03")
        in_march = connection.execute(
            select(receipts.c.request_id).where(
                receipts.c.settled_at < datetime(2026, 4, 1, tzinfo=UTC)
            )
        ).all()
        assert len(in_march) == sealed.receipts
        assert not changed_since_close(connection, "2026-03")


@pytest.mark.parametrize("point", ["close_begun", "close_sealed", "close_rebated", "close_issued"])
def test_killed_close_is_completed_by_the_next(point: str, books: Books, database_url: str) -> None:
    spend(books, MARCH)
    with books.database.transaction() as connection:
        set_rebates(connection, 0, {0: 1000})
    command = [sys.executable, "-m", "gateway", "period", "close", "2026-03"]
    environment = {**os.environ, "DATABASE_URL": database_url, "TOLLGATE_FAILPOINT": point}

    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    del environment["TOLLGATE_FAILPOINT"]
    done_ = subprocess.run(command, env=environment, capture_output=True, check=False)

    assert killed.returncode == -signal.SIGKILL
    assert done_.returncode == 0, done_.stderr
    with books.database.transaction() as connection:
        assert len(invoices_of(connection)) == 1
        assert check_books(connection, now=datetime.now(UTC)) == []
    assert books.balance().posted_nanos == 10**9 - 500 + 50


def test_pages_have_the_content_of_the_statement_and_no_scripts(
    books: Books, tmp_path: Path
) -> None:
    spend(books, MARCH)
    with books.database.transaction() as connection:
        connection.execute(
            text("UPDATE accounts SET name = '<script>Жанна & Ωmega</script>' WHERE id = :id"),
            {"id": books.account.id},
        )
        draft = statement(connection, books.account.id, "2026-03")
    page = lay_out(draft, Issuer("Żółw Ltd", "1 Main St; Łódź", "VAT 17"))

    shown = html(page)
    printed = pdf(page, at=MARCH)

    assert "<script>" not in shown
    assert "&lt;script&gt;Жанна &amp; Ωmega" in shown
    assert "draft" in shown
    assert "$0.0000005" in shown
    assert "Łódź" in shown
    assert printed.startswith(b"%PDF-1.")
    assert printed == pdf(page, at=MARCH)

"""Typing errors of operators are refused or can be undone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, text
from sqlalchemy.exc import DBAPIError

from gateway.__main__ import main
from gateway.accounts.accounts import (
    AmbiguousAccount,
    change_account,
    create_account,
    find_account,
)
from gateway.accounts.budgets import create_budget, find_budget
from gateway.accounts.keys import create_key, find_key
from gateway.audit_log import Author
from gateway.billing.reconciliation import check_books
from gateway.billing.statements.close import close_month, list_periods, rehearse_close, set_rebates
from gateway.billing.statements.statement import invoices_of
from gateway.catalog.store import LiveCatalog
from gateway.errors import InvalidRequest, Unavailable
from gateway.ledger.holds import hold
from gateway.ledger.prices import LIST, set_price
from gateway.ledger.reconcile import reconcile
from gateway.ledger.settle import settle
from gateway.ledger.transfers import owed
from gateway.operations import credit
from gateway.operations.credit import ChargebackBody, CreditBody
from gateway.pricing import NANOS_PER_USD, Component, Price, format_usd
from gateway.scheduled import close_tasks
from gateway.sql.database import Database, migrate, open_engine
from gateway.tables.core import accounts, periods, price_periods, prices, transfers
from tests.databases import file_of_version, migrated_file
from tests.ledger.books import PEPPER, Books, done, open_books

TESTER = Author("test", "system")
MARCH = datetime(2026, 3, 10, tzinfo=UTC)
AFTER = datetime(2026, 4, 1, 0, 10, tzinfo=UTC)
NOT_MONTHS = (
    "2026-00",
    "2026-13",
    "2026-99",
    "2026-1",
    "2026-003",
    "foo",
    "",
    "\uff12026-03",
    "1999-12",
)
NOT_NAMES = ("30", "٣٠", "½", "", " ", " acme", "acme ", "a/b", "a\0b", "a\nb", "a\u202eb",
             "a\u200bb", "..", "all", "id:3", "system:cash", "receivable:4", "x" * 201)  # fmt: skip
CATALOG = """\
models:
  - name: m
    task: text-to-image
    engine: echo
    price: [{unit: image, amount: "0.01"}]
  - name: other
    task: text-to-image
    engine: echo
    price: [{unit: image, amount: "0.02"}]
"""


def at(moment: datetime) -> Callable[[], datetime]:
    return lambda: moment


@pytest.fixture
def books(database: Database) -> Books:
    return open_books(database, credit=10**9)


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    path = tmp_path / "catalog.yaml"
    path.write_text(CATALOG)
    return path


# --- Months ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("month", NOT_MONTHS)
def test_month_that_does_not_exist_is_refused_before_anything_is_written(
    month: str, database: Database
) -> None:
    with database.snapshot() as connection:
        before = list_periods(connection)

    with pytest.raises(ValueError, match="is not a month; use YYYY-MM"):
        close_month(database, month, author=TESTER, clock=at(AFTER))

    with database.snapshot() as connection:
        assert list_periods(connection) == before
        with pytest.raises(ValueError, match="is not a month"):
            rehearse_close(connection, month, now=AFTER)
    assert close_month(database, "2026-03", author=TESTER, clock=at(AFTER)).state == "closed"


def test_sql_refuses_a_period_that_is_not_a_month(database: Database) -> None:
    for month in ("2026-00", "2026-13", "foo", "2026-1"):
        with pytest.raises(DBAPIError), database.transaction() as connection:
            connection.execute(insert(periods).values(month=month))


def test_migration_deletes_periods_that_are_not_months(tmp_path: Path) -> None:
    url = file_of_version(tmp_path / "old.db", "0006")
    engine = open_engine(url)
    with engine.begin() as connection:
        for month, state in (("2026-00", "closing"), ("2026-1", "closed"), ("2026-02", "closed")):
            connection.execute(
                text("INSERT INTO periods (month, state) VALUES (:month, :state)"),
                {"month": month, "state": state},
            )
    engine.dispose()

    migrate(url)

    database = Database(url)
    with database.snapshot() as connection:
        assert [(each.month, each.state) for each in list_periods(connection)] == [
            ("2026-02", "closed")
        ]
    assert close_month(database, "2026-03", author=TESTER, clock=at(AFTER)).state == "closed"
    database.engine.dispose()


async def test_period_that_is_not_a_month_is_reported_and_stops_no_close(tmp_path: Path) -> None:
    url = migrated_file(tmp_path / "tollgate.db")
    database = Database(url)
    with database.transaction() as connection:
        connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        connection.execute(insert(periods).values(month="2026-00", state="closing"))
        connection.execute(insert(periods).values(month="2026-01", state="open"))
        connection.exec_driver_sql("PRAGMA ignore_check_constraints = OFF")

    [task] = close_tasks(database)
    await task.run()

    with database.snapshot() as connection:
        states = {each.month: each.state for each in list_periods(connection)}
        found = [str(each) for each in check_books(connection, now=datetime.now(UTC))]
    assert states["2026-01"] == "closed"
    assert found == ["R13 month '2026-00': is not a month; delete its row"]
    await database.close()


def test_rehearsed_close_predicts_the_invoices_and_writes_nothing(books: Books) -> None:
    order = books.order(accepted_at=MARCH, deadline_at=MARCH + timedelta(minutes=1))
    with books.database.transaction() as connection:
        hold(connection, [order])
        settle(
            connection, [done(order.request_id)],
            now=MARCH, prices=books.prices, retention=timedelta(hours=1),
        )  # fmt: skip
        set_rebates(connection, 0, {0: 1000})

    with books.database.snapshot() as connection:
        expected = rehearse_close(connection, "2026-03", now=AFTER)
        early = rehearse_close(connection, "2026-03", now=MARCH)
        untouched = [each for each in list_periods(connection) if each.month == "2026-03"]
    sealed = close_month(books.database, "2026-03", author=TESTER, clock=at(AFTER))

    assert untouched == []
    assert expected.obstacle is None
    assert early.obstacle is not None
    assert (expected.period.receipts, expected.period.charge_nanos) == (1, sealed.charge_nanos)
    [invoice] = expected.invoices
    assert invoice.rebate_nanos == 50
    with books.database.snapshot() as connection:
        [issued] = invoices_of(connection, books.account.id, "2026-03")
    assert invoice.total_cents == issued.total_cents


# --- Prices ---------------------------------------------------------------------------------------


def test_price_of_an_unknown_model_is_neither_set_nor_ended(books: Books) -> None:
    price = Price((Component("request", 1),))
    for model, made in (("typo", None), ("typo", price), ("", None), ("m", None)):
        with (
            books.database.transaction() as connection,
            pytest.raises(LookupError, match=r"has never been on sale|no price override"),
        ):
            set_price(
                connection, model, made,
                account_id=books.account.id, starts_at=datetime.now(UTC), actor="x", reason="x",
            )  # fmt: skip


async def test_stored_period_of_a_model_without_discounts_stops_no_gateway(
    catalog: Path, database: Database
) -> None:
    with database.transaction() as connection:
        account = create_account(connection, "acme")
        connection.execute(
            insert(price_periods).values(
                model="typo", account_id=account.id, effective_from=MARCH, price_id=None
            )
        )

    live = await LiveCatalog.open(catalog, database)
    await live.refresh()

    assert live.priced("m", datetime.now(UTC), account.id)
    await database.close()


async def test_unreadable_price_takes_its_model_off_sale_until_another_one_is_set(
    catalog: Path, database: Database
) -> None:
    live = await LiveCatalog.open(catalog, database)
    now = datetime.now(UTC)
    with database.transaction() as connection:
        bad = connection.execute(
            insert(prices)
            .values(model="m", components=[{"unit": "soul", "amount_nanos": "x"}],
                    minimum_nanos=0, content_sha256="bad")
            .returning(prices.c.id)
        ).scalar_one()  # fmt: skip
        connection.execute(
            insert(price_periods).values(
                model="m", account_id=LIST, effective_from=now, price_id=bad, source="operator"
            )
        )

    for _ in range(2):
        await live.refresh()
    with pytest.raises(Unavailable, match="not for sale"):
        live.priced("m", datetime.now(UTC))
    assert live.priced("other", datetime.now(UTC))
    assert [entry.name for entry in live.entries()] == ["m", "other"]

    reopened = await LiveCatalog.open(catalog, database)
    with database.transaction() as connection:
        set_price(
            connection, "m", Price((Component("image", 7),)),
            starts_at=datetime.now(UTC), actor="x", reason="the right one",
        )  # fmt: skip
    await reopened.refresh()

    assert reopened.priced("m", datetime.now(UTC))[1].components[0].amount_nanos == 7
    await database.close()


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOT_NAMES)
def test_name_that_is_a_number_or_cannot_be_seen_is_refused(name: str, books: Books) -> None:
    with books.database.transaction() as connection, pytest.raises(ValueError, match="name"):
        create_account(connection, name)
    with books.database.transaction() as connection, pytest.raises(ValueError, match="name"):
        change_account(connection, books.account.id, name=name)


def test_name_that_is_another_accounts_number_is_ambiguous_until_renamed(
    database: Database,
) -> None:
    with database.transaction() as connection:
        first = create_account(connection, "first")
        second = create_account(connection, "second")
        # Each is named as the other is numbered, which was accepted once.
        for account, name in ((first, str(second.id)), (second, str(first.id))):
            connection.execute(
                accounts.update().where(accounts.c.id == account.id).values(name=name)
            )

        with pytest.raises(AmbiguousAccount) as caught:
            find_account(connection, str(first.id))

        assert caught.value.http_status == 409
        assert {each["id"] for each in caught.value.details["accounts"]} == {first.id, second.id}
        for account in (first, second):
            found = find_account(connection, f"id:{account.id}")
            assert found.id == account.id
            change_account(connection, found.id, name=f"customer {account.id}")
        assert find_account(connection, str(first.id)).id == first.id
        assert find_account(connection, f"customer {second.id}").id == second.id


def test_numbers_beyond_64_bits_are_not_found(books: Books) -> None:
    huge = "9" * 25
    with books.database.transaction() as connection:
        for find in (
            lambda: find_account(connection, huge),
            lambda: find_account(connection, int(huge)),
            lambda: find_account(connection, "9" * 5000),
            lambda: find_account(connection, f"id:{huge}"),
            lambda: find_key(connection, huge),
            lambda: find_budget(connection, int(huge)),
            lambda: create_budget(connection, books.account.id, 1, window="day", key_id=int(huge)),
        ):
            with pytest.raises(LookupError):
                find()


def test_key_has_a_scope_and_nothing_that_cannot_be_stored(books: Books) -> None:
    edge = datetime(9999, 12, 31, 23, 59, tzinfo=UTC)
    for wrong in (
        {"scopes": ()},
        {"name": "a\0b"},
        {"name": "x" * 201},
        {"expires_at": edge},
        {"requests_per_minute": 10**30},
        {"tokens_per_minute": 2**63},
        {"spend_limit_nanos": -1},
    ):
        with books.database.transaction() as connection, pytest.raises(ValueError):
            create_key(connection, books.account.id, pepper=PEPPER, **wrong)  # type: ignore[arg-type]  # wrong on purpose


# --- Amounts --------------------------------------------------------------------------------------


def add_credit(
    connection: Connection, account_id: int, nanos: int, *, reference: str, kind: str = "topup"
) -> None:
    body = {"kind": kind, "amount": format_usd(nanos), "reference": reference, "reason": "x"}
    credit.add(connection, TESTER, f"id:{account_id}", CreditBody.model_validate(body))


def charge_back(connection: Connection, account_id: int, nanos: int, *, reference: str) -> None:
    body = {"amount": format_usd(nanos), "reference": reference, "reason": "x"}
    credit.charge_back(connection, TESTER, f"id:{account_id}", ChargebackBody.model_validate(body))


def test_credit_and_chargeback_are_bounded(books: Books) -> None:
    huge = 9_200_000_000 * NANOS_PER_USD
    for amount in (huge, 10_000_001 * NANOS_PER_USD, 0, -1):
        for enter in (add_credit, charge_back):
            with (
                books.database.transaction() as connection,
                pytest.raises((InvalidRequest, ValueError), match=r"The amount|cannot be negative"),
            ):
                enter(connection, books.account.id, amount, reference="r")


def test_balance_and_debt_are_bounded_whatever_the_number_of_credits(books: Books) -> None:
    most = 10_000_000 * NANOS_PER_USD
    with books.database.transaction() as connection:
        for number in range(99):
            add_credit(connection, books.account.id, most, reference=f"r{number}")
    with books.database.transaction() as connection, pytest.raises(InvalidRequest, match="balance"):
        add_credit(connection, books.account.id, most, kind="grant", reference="one")
    with books.database.transaction() as connection:
        other = create_account(connection, "other")
        for number in range(100):
            charge_back(connection, other.id, most, reference=f"c{number}")
        with pytest.raises(InvalidRequest, match="The debt"):
            charge_back(connection, other.id, 1, reference="one")
        connection.rollback()


def test_sums_beyond_64_bits_are_read_and_reconciled(database: Database) -> None:
    huge = 2**63 - 1
    with database.transaction() as connection:
        made = [create_account(connection, f"rich {number}") for number in range(3)]
        for account in made:
            connection.execute(
                insert(transfers).values(
                    key=f"old:{account.id}", kind="topup", from_account=1, to_account=account.id,
                    amount_nanos=huge, posted_after=huge, account_version=1, actor="x",
                    booked_at=MARCH,
                )
            )  # fmt: skip
            connection.execute(
                accounts.update().where(accounts.c.id == account.id)
                .values(posted_nanos=huge, version=1)
            )  # fmt: skip
    with database.transaction() as connection:
        receivable = connection.execute(
            insert(accounts)
            .values(name=f"receivable:{made[0].id}", kind="system", created_at=MARCH)
            .returning(accounts.c.id)
        ).scalar_one()
        for number in range(2):
            connection.execute(
                insert(transfers).values(
                    key=f"debt:{number}", kind="chargeback", from_account=receivable,
                    to_account=1, amount_nanos=huge, posted_after=0, account_version=1,
                    actor="x", booked_at=MARCH,
                )
            )  # fmt: skip

    with database.snapshot() as connection:
        assert owed(connection, made[0].id) == 2 * huge
        rules = {each.rule for each in reconcile(connection, now=AFTER)}
    assert not rules & {"R1", "R2"}


# --- Commands -------------------------------------------------------------------------------------

TYPOS = (
    *(("account", "create", name) for name in NOT_NAMES if "\0" not in name),
    ("account", "create", "rich", "--credit-limit", "9000000000"),
    ("account", "create", "poor", "--credit-limit=-5"),
    ("account", "show", "9" * 25),
    ("account", "set", "acme", "--credit-limit=-1"),
    ("account", "set", "acme", "--allowance=-1"),
    ("account", "set", "acme", "--allowance", "99999999999"),
    ("account", "set", "acme", "--tz", "Mars/Base"),
    ("account", "set", "acme", "--tz", "../etc/passwd"),
    ("account", "set", "acme", "--name", "17"),
    ("account", "set", "acme", "--status", "gone"),
    ("key", "create", "acme", "--name", "a\nb"),
    ("key", "create", "acme", "--scope", "root"),
    ("key", "create", "acme", "--expires", "9999-12-31"),
    ("key", "create", "acme", "--expires", "0001-01-01"),
    ("key", "create", "acme", "--requests-per-minute", "0"),
    ("key", "create", "acme", "--tokens-per-minute", "99999999999999999999999"),
    ("key", "create", "acme", "--spend-limit=-1"),
    ("key", "revoke", "9" * 30),
    ("key", "revoke", ""),
    ("credit", "add", "acme", "9000000000", "--reason", "x"),
    ("credit", "add", "acme", "10000000.01", "--reason", "x"),
    ("credit", "add", "acme", "0", "--reason", "x"),
    ("credit", "add", "acme", "1e400", "--reason", "x"),
    ("credit", "add", "acme", "1", "--reason", ""),
    ("credit", "add", "acme", "1", "--reason", "x" * 501),
    ("credit", "add", "acme", "1", "--reason", "x", "--reference", "y" * 400),
    ("credit", "add", "acme", "1", "--reason", "x", "--expires", "0001-01-01"),
    ("credit", "add", "acme", "1", "--reason", "x", "--expires", "9999-12-31T23:59:59"),
    ("credit", "add", "acme", "1", "--reason", "x", "--actor", "z" * 300),
    ("credit", "chargeback", "acme", "9000000000", "--reference", "r", "--reason", "x"),
    ("credit", "chargeback", "acme", "0", "--reference", "r", "--reason", "x"),
    ("credit", "chargeback", "acme", "1", "--reference", "", "--reason", ""),
    ("credit", "refund", "req_unknown", "--reason", "x"),
    ("credit", "correct", "m", "--from", "0001-01-01", "--to", "9999-12-31", "--prices",
     "CATALOG", "--reference", "c", "--reason", "x"),
    ("credit", "correct", "typo", "--from", "2026-01-01", "--to", "2026-01-02", "--prices",
     "CATALOG", "--reference", "c", "--reason", "x"),
    ("budget", "create", "acme", "5", "--window", "week"),
    ("budget", "create", "acme", "99999999999", "--window", "day"),
    ("budget", "create", "acme", "5", "--window", "day", "--tz", "Mars"),
    ("budget", "create", "acme", "5", "--window", "day", "--model", "typo"),
    ("budget", "create", "acme", "5", "--window", "day", "--key", "9" * 30),
    ("budget", "create", "acme", "5", "--window", "day", "--name", "a\u202eb"),
    ("budget", "set", "9" * 30, "--limit", "5"),
    ("budget", "end", "9" * 30),
    ("limit", "set", "acme", "--concurrent", "0"),
    ("limit", "set", "acme", "--concurrent", "9999999999"),
    ("limit", "set", "acme", "--model", "typo", "--concurrent", "1"),
    ("limit", "set", "acme"),
    ("limit", "remove", "acme", "--model", "typo"),
    ("catalog", "price", "end", "typo", "--account", "acme", "--reason", "x"),
    ("catalog", "price", "end", "m", "--account", "acme", "--reason", "x"),
    ("catalog", "price", "end", "m", "--account", "typo", "--reason", "x"),
    ("catalog", "price", "set", "typo", "--component", "image 1", "--reason", "x"),
    ("catalog", "price", "set", "m", "--component", "", "--reason", "x"),
    ("catalog", "price", "set", "m", "--component", "image", "--reason", "x"),
    ("catalog", "price", "set", "m", "--component", "image 1 0", "--reason", "x"),
    ("catalog", "price", "set", "m", "--component", "image -1", "--reason", "x"),
    ("catalog", "price", "set", "m", "--component", "image 1 99999999999999", "--reason", "x"),
    ("catalog", "price", "set", "m", "--component", "token 1", "--reason", "x"),
    ("catalog", "price", "set", "m", "--component", "image 1", "--minimum=-1", "--reason", "x"),
    ("catalog", "price", "set", "m", "--component", "image 1", "--reason", ""),
    ("catalog", "price", "set", "m", "--component", "image 1", "--reason", "x", "--from", "soon"),
    ("catalog", "price", "set", "m", "--component", "image 1", "--reason", "x", "--from",
     "9999-12-31T23:59:59-14:00"),
    ("catalog", "price", "set", "m", "--component", "image 1", "--reason", "x", "--from",
     "0001-01-01T00:00:00+14:00"),
    ("catalog", "price", "set", "m", "--file", "BROKEN", "--reason", "x"),
    ("catalog", "whatif", "--from", "9999-12-31", "--to", "9999-12-31", "--prices", "CATALOG"),
    *(("period", "close", month) for month in NOT_MONTHS),
    *(("period", "close", month, "--dry-run") for month in NOT_MONTHS),
    ("period", "close", "2099-12"),
    ("period", "verify", "2026-00"),
    ("invoice", "print", "acme", "2026-13", "-o", "x.html"),
    ("invoice", "credit", "2026-000001", "1", "--reason", "x"),
    ("rebate", "set", "acme", "1000"),
    ("rebate", "set", "acme", "=5"),
    ("rebate", "set", "acme", "x=y"),
    ("rebate", "set", "acme", "--", "-5=5"),
    ("rebate", "set", "acme", "1000=101"),
    ("rebate", "set", "acme", "1000=5", "1000=6"),
    ("usage", "acme", "--from", "9999-12-31T23:59:59-14:00"),
    ("usage", "acme", "--from", "0001-01-01"),
    ("ledger", "9" * 25),
)  # fmt: skip


async def test_mistyped_commands_change_nothing_and_report_an_error(
    tmp_path: Path,
    catalog: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("DATABASE_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOLLGATE_HOME", str(home))
    monkeypatch.setenv("TOLLGATE_CATALOG", str(catalog))
    database = Database(migrated_file(home / "tollgate.db"))
    with database.transaction() as connection:
        create_account(connection, "acme")
    await LiveCatalog.open(catalog, database)
    broken = tmp_path / "broken.yaml"
    broken.write_text("price: [}")
    dump = _rows(database)

    said = {}
    for typed in TYPOS:
        files = {"CATALOG": str(catalog), "BROKEN": str(broken)}
        arguments = [files.get(word, word) for word in typed]
        monkeypatch.setattr(sys, "argv", ["tollgate", *arguments])
        with pytest.raises(SystemExit) as end:
            await asyncio.to_thread(main)
        printed = capsys.readouterr()
        if end.value.code not in (1, 2) or "Traceback" in printed.err or not printed.err.strip():
            said[typed] = (end.value.code, printed)

    assert said == {}
    assert _rows(database) == dump
    reopened = await LiveCatalog.open(catalog, database)
    assert reopened.priced("m", datetime.now(UTC))
    with database.snapshot() as connection:
        assert check_books(connection, now=datetime.now(UTC)) == []
    await database.close()


def _rows(database: Database) -> dict[str, list[object]]:
    with database.snapshot() as connection:
        names = connection.exec_driver_sql(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        ).scalars()
        return {
            name: [tuple(row) for row in connection.exec_driver_sql(f'SELECT * FROM "{name}"')]
            for name in names
        }

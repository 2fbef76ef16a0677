"""Keys: models, changes, rotation, last use, lists in pages."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, select

from gateway.accounts.accounts import create_account
from gateway.accounts.budgets import create_budget, list_budgets
from gateway.accounts.key_uses import INTERVAL_S, KeyUses, last_uses, store_uses
from gateway.accounts.keys import KeyInfo, authenticate, create_key, revoke_key
from gateway.accounts.limits import Limit, list_limits, set_limit
from gateway.audit_log import Author
from gateway.errors import Forbidden, InvalidRequest, NotFound, Unauthorized
from gateway.ledger.concurrency import TooManyConcurrent
from gateway.ledger.holds import hold
from gateway.operations import accounts, budgets, keys
from gateway.operations.keys import KeyBody, KeyChange, RotationBody
from gateway.sql.database import Database
from gateway.tables.usage import key_uses
from tests.ledger.books import PEPPER, Books, open_books

OPERATOR = Author("ann", "cli")


@pytest.fixture
def books(database: Database) -> Books:
    return open_books(database, credit=10**9)


def change(books: Books, **values: Any) -> keys.KeyView:
    with books.database.transaction() as connection:
        body = KeyChange.model_validate(values)
        return keys.change(connection, OPERATOR, str(books.key.id), body)


def rotate(books: Books, overlap_s: int = 3600) -> keys.NewKeyView:
    with books.database.transaction() as connection:
        body = RotationBody(overlap_s=overlap_s)
        return keys.rotate(connection, OPERATOR, str(books.key.id), body, pepper=PEPPER)


def test_key_may_use_only_the_models_that_it_names(books: Books) -> None:
    assert change(books, models=["m"])["models"] == ["m"]

    with books.database.snapshot() as connection:
        key = authenticate(connection, books.secret, PEPPER)
    key.check_model("m")
    assert (key.allows("m"), key.allows("n")) == (True, False)
    with pytest.raises(Forbidden, match=r"may not use the model 'n', only m\."):
        key.check_model("n")
    assert change(books, models=None)["models"] is None


def test_models_that_were_never_on_sale_are_refused(books: Books) -> None:
    with pytest.raises(NotFound, match="The model 'x' does not exist"):
        change(books, models=["m", "x"])
    with pytest.raises(ValueError, match="models"):
        KeyChange.model_validate({"models": []})


def test_change_keeps_what_is_omitted_and_null_removes(books: Books) -> None:
    change(books, name="ci", requests_per_minute=5, concurrent=3, spend_limit="1")
    changed = change(books, tokens_per_minute=7, concurrent=4)

    assert changed["name"] == "ci"
    assert changed["limits"] == {
        "requests_per_minute": 5,
        "tokens_per_minute": 7,
        "concurrent": 4,
        "spend": "1",
    }
    cleared = change(books, requests_per_minute=None, concurrent=None, spend_limit=None)
    assert cleared["limits"] == {
        "requests_per_minute": None,
        "tokens_per_minute": 7,
        "concurrent": None,
        "spend": None,
    }


def test_spend_limit_cannot_be_less_than_what_the_key_has_used(books: Books) -> None:
    with books.database.transaction() as connection:
        hold(connection, [books.order()])

    with pytest.raises(InvalidRequest, match=r"has already used \$0.000001"):
        change(books, spend_limit="0.000000999")

    assert change(books, spend_limit="0.000001")["limits"]["spend"] == "0.000001"


def test_concurrency_of_a_key_is_enforced_by_the_hold(books: Books) -> None:
    change(books, concurrent=1)

    with books.database.transaction() as connection:
        _, refused = hold(connection, [books.order(), books.order()])

    assert refused == TooManyConcurrent("key", 1)


def test_expiry_takes_effect(books: Books) -> None:
    change(books, expires_at=(datetime.now(UTC) - timedelta(seconds=1)).isoformat())

    with (
        pytest.raises(Unauthorized, match="has expired"),
        books.database.snapshot() as connection,
    ):
        authenticate(connection, books.secret, PEPPER)


def test_revoked_key_is_neither_changed_nor_rotated(books: Books) -> None:
    with books.database.transaction() as connection:
        revoke_key(connection, str(books.key.id))

    with pytest.raises(InvalidRequest, match="has been revoked"):
        change(books, name="x")
    with pytest.raises(InvalidRequest, match="has been revoked"):
        rotate(books)


def test_both_keys_are_valid_during_the_overlap(books: Books) -> None:
    change(books, models=["m"], name="ci", requests_per_minute=5)
    made = rotate(books)

    with books.database.snapshot() as connection:
        old = authenticate(connection, books.secret, PEPPER)
        new = authenticate(connection, made["secret"], PEPPER)
        shown = keys.show(connection, old.id)
    assert old.expires_at is not None
    assert timedelta(minutes=59) < old.expires_at - datetime.now(UTC) <= timedelta(hours=1)
    assert (new.name, new.models, new.scopes, new.requests_per_minute, new.expires_at) == (
        "ci",
        frozenset(["m"]),
        old.scopes,
        5,
        None,
    )
    assert (new.replaces, shown["replaced_by"]) == (old.id, new.id)


def test_old_key_ends_with_the_overlap(books: Books) -> None:
    made = rotate(books, overlap_s=0)

    with books.database.snapshot() as connection:
        authenticate(connection, made["secret"], PEPPER)
        with pytest.raises(Unauthorized, match="has expired"):
            authenticate(connection, books.secret, PEPPER)
    with pytest.raises(InvalidRequest, match="has expired; create another"):
        rotate(books)


def test_rotation_never_extends_the_old_key_and_keeps_the_lifetime(books: Books) -> None:
    soon = datetime.now(UTC) + timedelta(minutes=5)
    change(books, expires_at=soon.isoformat())

    made = rotate(books)

    with books.database.snapshot() as connection:
        old = authenticate(connection, books.secret, PEPPER)
        new = authenticate(connection, made["secret"], PEPPER)
    assert old.expires_at == soon
    assert new.expires_at is not None
    lifetime = old.expires_at - old.created_at
    assert abs(new.expires_at - new.created_at - lifetime) < timedelta(seconds=5)


def test_key_is_rotated_again_only_after_its_successor_was_revoked(books: Books) -> None:
    lost = rotate(books)
    with pytest.raises(InvalidRequest, match="has been replaced by"):
        rotate(books)

    with books.database.transaction() as connection:
        keys.revoke(connection, OPERATOR, str(lost["id"]))
    made = rotate(books)

    with books.database.snapshot() as connection:
        new = authenticate(connection, made["secret"], PEPPER)
    assert new.expires_at is None, "the end of an overlap is not inherited"


def test_rotation_copies_limits_and_budgets_and_the_rest_of_the_spend_limit(books: Books) -> None:
    change(books, spend_limit="1", concurrent=3)
    with books.database.transaction() as connection:
        limit = Limit(books.account.id, books.key.id, "m", requests_per_minute=9)
        set_limit(connection, limit)
        create_budget(
            connection, books.account.id, 5000, window="day", key_id=books.key.id, name="b"
        )
        hold(connection, [books.order()])

    made = rotate(books)

    with books.database.snapshot() as connection:
        limits = {
            (one.model, one.requests_per_minute, one.concurrent_max)
            for one in list_limits(connection, books.account.id)
            if one.key_id == made["id"]
        }
        copied = [one for one in list_budgets(connection) if one.key_id == made["id"]]
    assert limits == {(None, None, 3), ("m", 9, None)}
    assert [(one.name, one.limit_nanos, one.window) for one in copied] == [("b", 5000, "day")]
    assert made["limits"]["spend"] == "0.999999"


def test_pages_of_keys_are_complete_and_filtered(database: Database, books: Books) -> None:
    with database.transaction() as connection:
        other = create_account(connection, "other")
        for number in range(5):
            create_key(connection, other.id, pepper=PEPPER, name=f"ci%{number}")
        past = datetime.now(UTC) - timedelta(days=1)
        create_key(connection, other.id, pepper=PEPPER, name="old", expires_at=past)
        _, gone = create_key(connection, other.id, pepper=PEPPER, name="cix", expires_at=past)
        revoke_key(connection, str(gone.id))

    def names(**wanted: Any) -> list[str]:
        found: list[str] = []
        cursor: str | None = None
        given: dict[str, Any] = {"account": "other", "status": None, "name": None, **wanted}
        with database.snapshot() as connection:
            while True:
                page, cursor = keys.list_page(connection, limit=2, cursor=cursor, **given)
                found += [view["name"] for view in page]
                if cursor is None:
                    return found

    first = [f"ci%{number}" for number in range(5)]
    assert names() == [*first, "old", "cix"]
    assert len(names(account=None)) == 8
    assert names(status="active") == first
    assert names(status="expired") == ["old"]
    assert names(status="revoked") == ["cix"]
    assert names(name="ci%") == first
    with pytest.raises(InvalidRequest, match="'x' is not the number of a key"):
        keys.list_page(
            None,  # type: ignore[arg-type]  # not read
            account=None,
            status=None,
            name=None,
            limit=1,
            cursor="x",
        )


def test_pages_of_accounts_are_complete_and_filtered(database: Database) -> None:
    with database.transaction() as connection:
        for name in ("ann", "anton", "bob"):
            create_account(connection, name)

    with database.snapshot() as connection:
        page, cursor = accounts.list_page(connection, status=None, name="an", limit=1, cursor=None)
        rest, end = accounts.list_page(connection, status=None, name="an", limit=1, cursor=cursor)
        closed, _ = accounts.list_page(connection, status="closed", name=None, limit=9, cursor=None)
    assert [view["name"] for view in page + rest] == ["ann", "anton"]
    assert (end, closed) == (None, [])


async def test_last_use_is_written_at_most_once_a_minute(database: Database, books: Books) -> None:
    uses = KeyUses(database)
    written: list[str] = []
    event.listen(
        database._lanes["slow"].engine,
        "before_cursor_execute",
        lambda *a: written.append(a[2]) if "key_uses" in a[2] else None,
    )
    if database.engine.dialect.name == "sqlite":
        event.listen(
            database._lanes["write"].engine,
            "before_cursor_execute",
            lambda *a: written.append(a[2]) if "key_uses" in a[2] else None,
        )
    start = time.monotonic()

    for second in range(59):
        uses.note(books.key.id, start + second)
        await uses.flush()
    once = len(written)
    uses.note(books.key.id, start + INTERVAL_S)
    await uses.flush()

    assert (once, len(written)) == (1, 2)
    with database.snapshot() as connection:
        view = keys.show(connection, books.key.id)
    assert view["last_used_at"] is not None
    await database.close()


async def test_many_keys_are_written_in_short_transactions(database: Database) -> None:
    with database.transaction() as connection:
        account = create_account(connection, "many")
        ids = [create_key(connection, account.id, pepper=PEPPER)[1].id for _ in range(1200)]
    uses = KeyUses(database)
    transactions = 0
    slow_write = database.slow_write

    async def counted(function: Any) -> Any:
        nonlocal transactions
        transactions += 1
        return await slow_write(function)

    database.slow_write = counted  # type: ignore[method-assign]  # counts, otherwise the same

    for key_id in ids:
        uses.note(key_id, 1.0)
    await uses.flush()
    for key_id in ids:
        uses.note(key_id, 2.0)
    await uses.flush()

    assert transactions == 3
    with database.snapshot() as connection:
        assert len(last_uses(connection, ids)) == 1200
    await database.close()


def test_use_that_another_gateway_has_just_stored_is_not_written_again(
    database: Database, books: Books
) -> None:
    now = datetime.now(UTC)
    stored = []
    for seconds in (0, -90, 5, 49, 60):
        with database.transaction() as connection:
            store_uses(connection, {books.key.id: now + timedelta(seconds=seconds)})
        with database.snapshot() as connection:
            stored.append(connection.execute(select(key_uses.c.used_at)).scalar())

    assert stored == [now, now, now, now, now + timedelta(seconds=60)]


def test_key_with_everything_is_created_at_once(database: Database, books: Books) -> None:
    body = KeyBody(name="ci", models=("m",), concurrent=2)

    with database.transaction() as connection:
        made = keys.create(connection, OPERATOR, str(books.account.id), body, pepper=PEPPER)

    assert (made["models"], made["limits"]["concurrent"], made["status"]) == (["m"], 2, "active")
    assert made["last_used_at"] is None


def test_pages_of_budgets_are_complete_and_filtered(database: Database, books: Books) -> None:
    with database.transaction() as connection:
        other = create_account(connection, "other")
        for number in range(3):
            create_budget(connection, other.id, 100, window="day", name=f"b{number}", model="m")
        create_budget(connection, books.account.id, 100, window="day", key_id=books.key.id)

    def page(cursor: str | None = None, **wanted: Any) -> tuple[list[str], str | None]:
        given: dict[str, Any] = {"account": None, "organisation": None, "key": None, "model": None}
        with database.snapshot() as connection:
            found, more = budgets.list_page(connection, limit=2, cursor=cursor, **given | wanted)
        return [f"{view['account'][:5]} {view['name']}" for view in found], more

    first, cursor = page(account="other")
    rest, end = page(cursor, account="other")
    assert first + rest == ["other b0", "other b1", "other b2"]
    assert end is None
    assert page(key=books.key.id) == (["accou "], None)
    assert page(model="m")[0] == first
    with pytest.raises(InvalidRequest, match="is not the number of a budget"):
        page("x")


def test_key_of_the_console_is_made_once_and_has_no_secret(books: Books) -> None:
    def find() -> KeyInfo:
        with books.database.transaction() as connection:
            return keys.console_key(
                connection, OPERATOR, books.account.id, spend_limit_nanos=5, pepper=PEPPER
            )

    made, again = find(), find()

    assert (made.id, made.name, made.spend_limit_nanos) == (again.id, "console", 5)
    assert made.scopes == {"inference", "read"}
    with books.database.transaction() as connection:
        for guess in (f"console {books.account.id}", "console", ""):
            with pytest.raises(Unauthorized, match="Unknown"):
                authenticate(connection, guess, PEPPER)
        revoke_key(connection, str(made.id))
    with pytest.raises(Forbidden, match="has been revoked"):
        find()

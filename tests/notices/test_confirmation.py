"""Accounts subscribe themselves; mail goes to nobody who has not agreed."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from gateway.audit_log import Author
from gateway.errors import InvalidRequest, NotFound, TooManyRequests
from gateway.notices.confirmation import MAILS_MAX
from gateway.notices.store import publish
from gateway.operations import notices
from gateway.operations.notices import ConfirmationBody, OwnSubscriptionBody, SubscriptionView
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.tables.notices import notices as notices_table
from tests.ledger.books import PEPPER, Books, open_books
from tests.notices.test_mail import Inbox, mail_server
from tests.notices.test_sender import TOLD, sending, sent, until

OWNER = Author("tg_owner", "http")
SETTINGS = Settings(smtp_host="127.0.0.1", mail_from="tollgate@example.com")


def add(books: Books, **body: Any) -> SubscriptionView:
    with books.database.transaction() as connection:
        wanted = OwnSubscriptionBody(**body)
        return notices.add_own(connection, OWNER, books.account.id, wanted, settings=SETTINGS)


def confirm(books: Books, subscription_id: int, token: str) -> SubscriptionView:
    with books.database.transaction() as connection:
        return notices.confirm_own(
            connection,
            OWNER,
            books.account.id,
            subscription_id,
            ConfirmationBody(token=token),
            pepper=PEPPER,
        )


async def test_address_gets_a_token_and_nothing_else_until_the_token_comes_back(
    sqlite: Database,
) -> None:
    books, other = open_books(sqlite, credit=0), open_books(sqlite, credit=0)
    inbox = Inbox()
    made = add(books, email="ann@example.com")
    assert not made["confirmed"]

    def tell() -> int:
        with sqlite.transaction() as connection:
            told = replace(TOLD, account_id=books.account.id, key=f"k{len(inbox.mails)}")
            return publish(connection, [told])

    assert tell() == 0, "nobody wants it yet"
    async with mail_server(inbox) as mailer:
        async with sending(sqlite, mailer=mailer):
            await until(lambda: len(inbox.mails) == 1)
        token = inbox.mails[0].get_content().splitlines()[2]
        for wrong in (token[:-1], ""):
            with pytest.raises(InvalidRequest, match="not the token"):
                confirm(books, made["id"], wrong)
        with pytest.raises(NotFound):
            confirm(other, made["id"], token)
        assert confirm(books, made["id"], token)["confirmed"]
        assert tell() == 1
        async with sending(sqlite, mailer=mailer):
            await until(lambda: len(inbox.mails) == 2)

    assert books.account.name in inbox.mails[0]["Subject"]
    assert inbox.recipients == ["ann@example.com"] * 2
    with sqlite.transaction() as connection:
        listed, _ = notices.sent(connection, books.account.id, kind=None, limit=9, cursor=None)
    assert token not in str(listed), "who reads the list has not got the mail"


def test_account_asks_each_address_once_a_day_and_few_of_them(sqlite: Database) -> None:
    books = open_books(sqlite, credit=0)

    def asked(address: str) -> None:
        made = add(books, email=address)
        with sqlite.transaction() as connection:
            notices.remove_own(connection, OWNER, books.account.id, made["id"])

    asked("ann@example.com")
    with pytest.raises(TooManyRequests, match="was asked today"):
        asked("ann@example.com")
    for number in range(MAILS_MAX - 1):
        asked(f"ann{number}@example.com")
    with pytest.raises(TooManyRequests, match="addresses were asked"):
        asked("bob@example.com")
    assert sent(sqlite, books.account.id) == [], "what is removed is not sent"
    with sqlite.transaction() as connection:
        for row in connection.execute(notices_table.select()).all():
            connection.execute(
                update(notices_table)
                .where(notices_table.c.id == row.id)
                .values(created_at=row.created_at - timedelta(days=1), key=f"{row.key}-1")
            )
    asked("bob@example.com")


def test_url_of_an_account_needs_no_agreement_and_is_checked_as_webhooks_are(
    sqlite: Database,
) -> None:
    books, other = open_books(sqlite, credit=0), open_books(sqlite, credit=0)

    made = add(books, url="https://ops.example.com/hook", kinds=["budget.passed"])

    assert (made["confirmed"], made["account_id"]) == (True, books.account.id)
    with pytest.raises(InvalidRequest):
        add(books, url="http://169.254.169.254/latest")
    with pytest.raises(InvalidRequest, match="either url or email"):
        add(books)
    with sqlite.transaction() as connection:
        with pytest.raises(NotFound):
            notices.remove_own(connection, OWNER, other.account.id, made["id"])
        notices.remove_own(connection, OWNER, books.account.id, made["id"])

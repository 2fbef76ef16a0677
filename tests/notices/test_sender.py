"""Notices on their way: signed webhooks and mail, with a record of every attempt."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update
from standardwebhooks import Webhook

from gateway import metrics
from gateway.notices.failing import tell_of_failures
from gateway.notices.kinds import OPERATOR, Notice
from gateway.notices.mail import Mailer
from gateway.notices.sender import NoticeSender
from gateway.notices.store import OUTBOX, NoticeDelivery, deliveries_of, list_notices, publish
from gateway.notices.subscriptions import subscribe
from gateway.sql.database import Database
from gateway.tables.notices import notice_deliveries
from gateway.webhooks.lanes import Lanes
from gateway.webhooks.outbox import ATTEMPTS_MAX, CLAIM, GivenUp
from gateway.webhooks.sender import Poster, signing_secret
from tests.ledger.books import PEPPER, open_books
from tests.notices.test_mail import Inbox, mail_server

Received = list[tuple[dict[str, str], bytes]]
TOLD = Notice("month:0:2026-11", OPERATOR, "month.closed", "month 2026-11", "closed", "Closed.", {})


@pytest.fixture
def receiver() -> Iterator[tuple[str, Received]]:
    received: Received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((dict(self.headers.items()), body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", received
    server.shutdown()
    thread.join()
    server.server_close()


@contextlib.asynccontextmanager
async def sending(
    database: Database, *, mailer: Mailer | None = None, private_allowed: bool = True
) -> AsyncIterator[None]:
    poster = Poster(pepper=PEPPER, private_allowed=private_allowed)
    sender = NoticeSender(database, poster=poster, mailer=mailer, pepper=PEPPER)
    task = asyncio.create_task(sender.run())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def sent(database: Database, account_id: int = OPERATOR) -> list[NoticeDelivery]:
    with database.snapshot() as connection:
        found = list_notices(connection, account_id=account_id, kind=None, limit=9, before=None)
        by_notice = deliveries_of(connection, [each.id for each in found])
    return [one for each in found for one in by_notice[each.id]]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # another thread's or process's work
            await asyncio.sleep(0.02)


def counted(kind: str, outcome: str) -> float:
    return metrics.NOTICES.labels(kind, outcome)._value.get()  # type: ignore[no-any-return]  # it is one


async def test_notice_goes_to_webhooks_and_mail_once(
    sqlite: Database, receiver: tuple[str, Received]
) -> None:
    url, received = receiver
    inbox, before = Inbox(), counted("month.closed", "sent")
    with sqlite.transaction() as connection:
        for to in (url, "mailto:ann@example.com"):
            subscribe(connection, OPERATOR, to, None)
        for _ in range(2):
            publish(connection, [TOLD])

    async with mail_server(inbox) as mailer, sending(sqlite, mailer=mailer):
        await until(lambda: {one.status for one in sent(sqlite)} == {"delivered"})

    ((headers, body),) = received
    event = Webhook(signing_secret(PEPPER, OPERATOR)).verify(body, headers)
    assert (event["type"], event["data"]["text"]) == ("month.closed", "Closed.")
    assert event["data"]["account_id"] is None
    assert headers["webhook-id"] == event["data"]["id"]
    assert len(inbox.mails) == 1
    assert sorted(one.attempts[0].code or 0 for one in sent(sqlite)) == [204, 250]
    assert counted("month.closed", "sent") == before + 2


async def test_failed_attempts_are_recorded_and_tried_again(
    sqlite: Database, receiver: tuple[str, Received]
) -> None:
    url, received = receiver
    with sqlite.transaction() as connection:
        for to in (url, "mailto:nobody@example.com", "mailto:full@example.com"):
            subscribe(connection, OPERATOR, to, None)
        publish(connection, [TOLD])

    async with (
        mail_server(Inbox()) as mailer,
        sending(sqlite, mailer=mailer, private_allowed=False),
    ):
        await until(lambda: all(one.attempts for one in sent(sqlite)))

    found = {
        one.url: (one.status, one.attempts[0].code, one.attempts[0].error) for one in sent(sqlite)
    }
    assert found == {
        url: ("pending", None, "private_address"),
        "mailto:nobody@example.com": ("failed", 550, "status"),
        "mailto:full@example.com": ("pending", 452, "status"),
    }
    assert received == []


async def test_mail_without_a_server_waits_for_one(sqlite: Database) -> None:
    with sqlite.transaction() as connection:
        subscribe(connection, OPERATOR, "mailto:ann@example.com", None)
        publish(connection, [TOLD])

    async with sending(sqlite):
        await until(lambda: all(one.attempts for one in sent(sqlite)))

    (one,) = sent(sqlite)
    assert (one.status, one.attempts[0].error) == ("pending", "no_mail_server")


async def test_notice_of_a_gateway_that_was_killed_is_sent_by_another(
    sqlite: Database, receiver: tuple[str, Received]
) -> None:
    url, received = receiver
    with sqlite.transaction() as connection:
        subscribe(connection, OPERATOR, url, None)
        publish(connection, [TOLD])
        # The gateway that claims it is killed before it sends.
        long_ago = datetime.now(UTC) - CLAIM
        connection.execute(update(notice_deliveries).values(due_at=long_ago))
        assert len(OUTBOX.claim(connection, Lanes(), long_ago, after=-1).taken) == 1

    async with sending(sqlite):
        await until(lambda: {one.status for one in sent(sqlite)} == {"delivered"})

    assert len(received) == 1
    (one,) = sent(sqlite)
    assert [attempt.number for attempt in one.attempts] == [2]


async def test_account_is_told_once_a_day_of_a_receiver_that_was_given_up(
    sqlite: Database,
) -> None:
    books = open_books(sqlite, credit=0)
    account_id = books.account.id
    told = replace(TOLD, key="k", account_id=account_id)
    with sqlite.transaction() as connection:
        subscribe(connection, account_id, "mailto:ann@example.com", ["webhook.failing"])
        subscribe(connection, account_id, "https://dead.example.com/hook?token=x", ["month.closed"])
        publish(connection, [told, replace(told, key="l")])
        connection.execute(update(notice_deliveries).values(attempts=ATTEMPTS_MAX))

    async with sending(sqlite):
        await until(lambda: "webhook.failing" in kinds(sqlite, account_id))

    with sqlite.transaction() as connection:
        # A lost notice of this kind does not lead to another one.
        lost = GivenUp(account_id, "https://dead2.example.com", "webhook.failing")
        tell_of_failures(connection, [lost])
        (found,) = list_notices(
            connection, account_id=account_id, kind="webhook.failing", limit=9, before=None
        )
    assert found.title == "Webhooks to dead.example.com could not be delivered"
    assert "token" not in found.text
    assert found.created_at > datetime.now(UTC) - timedelta(minutes=1)


def kinds(database: Database, account_id: int) -> set[str]:
    with database.snapshot() as connection:
        return {
            each.kind
            for each in list_notices(
                connection, account_id=account_id, kind=None, limit=9, before=None
            )
        }

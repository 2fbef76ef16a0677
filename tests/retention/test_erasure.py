"""Erasure: what is personal goes everywhere, money and seals stay, and a run can be repeated."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import insert, select, update
from sqlalchemy.exc import DBAPIError

from gateway.accounts.accounts import create_account
from gateway.accounts.budgets import create_budget
from gateway.audit_log import Author
from gateway.billing.statements.close import rehearse_close
from gateway.errors import Conflict, NotFound, Unavailable
from gateway.feedback.store import RatedRequest, put
from gateway.files.retention import MediaStore
from gateway.files.store import Files
from gateway.ledger.closed import Output, RequestError
from gateway.ledger.holds import hold
from gateway.ledger.periods import month_of
from gateway.ledger.reconcile import reconcile
from gateway.ledger.settle import Settlement
from gateway.notices.kinds import Notice
from gateway.notices.store import publish_to
from gateway.notices.subscriptions import subscribe
from gateway.operations import users as user_operations
from gateway.operations.retention import ErasureBody, erase
from gateway.operations.users import MemberBody, UserBody
from gateway.retention import erasure
from gateway.retention.erasure import Eraser
from gateway.sql.database import Database
from gateway.tables.audit import audit_events
from gateway.tables.batches import batches
from gateway.tables.core import accounts, idempotency, keys, metadata, receipts, transfers
from gateway.tables.users import console_jobs
from gateway.tables.voices import voice_recordings
from tests.ledger.books import done, open_books
from workers.contract.blobs import Blobs, blob_key
from workers.contract.jobs import RequestId

ANN = "ann-7f3a"
"""Occurs in everything that is personal."""
OPERATOR = Author("operator", "cli")


class Person:
    """An account with something personal of every kind."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.folder = database, folder
        self.blobs = Blobs(folder.as_uri())
        self.books = open_books(database, credit=10_000_000)
        self.id = self.books.account.id

    async def make(self) -> None:
        ids = [self.request(), self.request(failed=True), self.request(tag="other")]
        store = MediaStore(self.database, self.blobs, retention=timedelta(hours=1))
        await store.register(self.id, ids[0], "text-to-image", None)
        await self.blobs.put(blob_key(str(self.id), ids[0], "n", 0), ANN.encode())
        await Files(self.database, self.blobs).create(
            self.id, purpose="user_data", filename=ANN, chunks=_chunks(), kept_for=None
        )
        now = datetime.now(UTC)
        recording = {"account_id": self.id, "name": ANN, "created_at": now, "clear_at": now}
        with self.database.transaction() as connection:
            connection.execute(update(accounts).where(accounts.c.id == self.id).values(name=ANN))
            connection.execute(update(keys).values(name=ANN))
            create_budget(connection, self.id, window="day", limit_nanos=10**12, name=ANN)
            for id, kind in (("cons_1", {"language": "en"}), ("voice_1", {"consent_id": "cons_1"})):
                connection.execute(insert(voice_recordings).values(**recording, **kind, id=id))
            connection.execute(
                insert(batches).values(
                    id="batch_1", account_id=self.id, key_id=self.books.key.id, endpoint="/",
                    input_file_id="f", completion_window="24h", metadata={"name": ANN},
                    status="completed", created_at=now, expires_at=now, ended_at=now,
                )
            )  # fmt: skip
            subscription = subscribe(connection, self.id, f"mailto:{ANN}@example.com", None)
            told = Notice("key", self.id, "budget.passed", "budget 1", f"{ANN}'s budget", ANN, {})
            publish_to(connection, subscription, told)
            email = f"{ANN}@example.com"
            user_operations.create(connection, OPERATOR, UserBody(name=ANN, email=email))
            connection.execute(
                insert(console_jobs).values(
                    id="j", kind="export", digest="", starter="x", act="own.read",
                    back=f"/console/requests?tag={ANN}", result={"tag": ANN}, state="done",
                    can_cancel=True, started_at=now, seen_at=now,
                )
            )  # fmt: skip
            body = MemberBody(role="owner")
            user_operations.put_member(connection, OPERATOR, str(self.id), email, body)

    def request(self, *, tag: str = ANN, failed: bool = False) -> RequestId:
        order = self.books.order(
            metadata={"customer": tag},
            webhook=f"https://{ANN}.example.com/hook",
            idempotency_key=f"{ANN} {tag} {failed}",
            body_sha256=b"x" * 32,
        )
        with self.database.transaction() as connection:
            hold(connection, [order])
        end = done(order.request_id)
        if failed:
            problem = RequestError("invalid_input", f"{ANN} is not a prompt")
            end = Settlement(order.request_id, "failed", "input", billable=False, error=problem)
        else:
            end = Settlement(
                order.request_id, "succeeded", "completed", billable=True, usage=end.usage,
                output=Output({"text": ANN}),
            )  # fmt: skip
        self.books.settle(end)
        now = datetime.now(UTC)
        rated = RatedRequest(order.request_id, self.id, "m", "text-generation", "m", now)
        with self.database.transaction() as connection:
            put(connection, rated, rating=1, labels=[ANN], comment=f"{ANN} is sad", now=now)
        return order.request_id

    def close(self) -> None:
        with self.database.transaction() as connection:
            connection.execute(
                update(accounts).where(accounts.c.id == self.id).values(status="closed")
            )

    async def erase(self, **target: object) -> Counter[str]:
        body = ErasureBody.model_validate(target)
        eraser, counts = Eraser(self.database, self.blobs, None), Counter[str]()
        while True:
            step = await erase(self.database, eraser, OPERATOR, body)
            counts.update(step["erased"])
            if step["cursor"] is None:
                return counts
            body = body.model_copy(update={"cursor": step["cursor"]})

    def where_named(self) -> set[str]:
        """Return the tables, and the blobs, in which the person occurs."""
        with self.database.transaction() as connection:
            found = {
                table.name
                for table in metadata.tables.values()
                if any(ANN in str(tuple(row)) for row in connection.execute(select(table)))
            }
        blobs = [path for path in self.folder.rglob("*") if path.is_file()]
        return found | {"blobs"} if blobs else found

    def seal(self) -> tuple[object, object]:
        now = datetime.now(UTC)
        with self.database.transaction() as connection:
            sealed = rehearse_close(connection, month_of(now), now=now).period
            return (sealed.sha256, sealed.charge_nanos), connection.execute(
                select(transfers).order_by(transfers.c.id)
            ).all()


async def _chunks():  # type: ignore[no-untyped-def]  # of one chunk
    yield ANN.encode()


@pytest.fixture
async def person(database: Database, tmp_path: Path) -> Person:
    made = Person(database, tmp_path / "blobs")
    await made.make()
    return made


async def test_everything_personal_of_an_account_goes_and_its_money_stays(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "ROWS_MAX", 2)
    named = person.where_named()
    assert named >= {
        "accounts", "audit_events", "batches", "blobs", "budgets", "console_jobs", "feedback",
        "files", "idempotency", "keys", "notice_deliveries", "notice_subscriptions", "notices",
        "outputs", "receipts", "users", "voice_recordings", "webhook_deliveries",
    }  # fmt: skip
    with pytest.raises(Conflict, match="close it first"):
        await person.erase(account=ANN)
    person.close()
    money = person.seal()

    planned = await person.erase(account=ANN, dry_run=True)
    assert person.where_named() == named
    erased = await person.erase(account=ANN)

    assert person.where_named() == set()
    # Some rows are found in two ways; they are erased once.
    assert set(planned) - {"members"} == set(erased)
    assert all(erased[kind] <= planned[kind] for kind in set(erased) - {"audit_events"})
    assert (erased["receipts"], erased["outputs"], erased["webhooks"]) == (3, 2, 3)
    assert person.seal() == money
    with person.database.transaction() as connection:
        assert reconcile(connection, now=datetime.now(UTC)) == []
        acts = connection.execute(select(audit_events).order_by(audit_events.c.id)).all()
    assert [(one.act, one.subject) for one in acts if one.act == "erasure.run"] == [
        ("erasure.run", f"account {person.id}")
    ]
    assert await person.erase(account=person.id) == {}


async def test_an_erasure_that_was_interrupted_is_completed_by_the_next(person: Person) -> None:
    person.close()
    away = person.folder.with_name("away")
    person.folder.rename(away)
    person.folder.write_bytes(b"in the way")
    with pytest.raises(Unavailable):
        await person.erase(tag=f"customer={ANN}")
    person.folder.unlink()
    away.rename(person.folder)

    erased = await person.erase(tag=f"customer={ANN}")

    assert erased["receipts"] == 2
    assert erased["media"] == 1
    with person.database.transaction() as connection:
        left = connection.execute(select(receipts.c["metadata"])).scalars().all()
        assert len(connection.execute(select(idempotency)).all()) == 1
    assert sorted(str(each) for each in left) == ["None", "None", "{'customer': 'other'}"]
    assert await person.erase(tag=f"customer={ANN}") == {}


async def test_open_requests_with_a_tag_are_searched_once(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "SCANNED_MAX", 1)
    target = erasure.Target(tag=("customer", ANN))
    eraser = Eraser(person.database, person.blobs, None)
    first = await eraser.step(target)
    order = person.books.order(metadata={"customer": ANN})
    with person.database.transaction() as connection:
        hold(connection, [order])

    second = await eraser.step(target, first.cursor)

    assert (first.counts["receipts"], second.counts["receipts"]) == (1, 1)
    with pytest.raises(Conflict, match="still open"):
        await eraser.step(target)


async def test_one_request_is_erased_and_others_stay(person: Person) -> None:
    other = open_books(person.database, credit=1_000_000)
    order = person.books.order(metadata={"customer": ANN})
    with person.database.transaction() as connection:
        (id, *_) = connection.execute(select(receipts.c.request_id)).scalars().all()
        hold(connection, [order])

    for request_id, error in ((order.request_id, Conflict), ("req_none", NotFound)):
        with pytest.raises(error):
            await person.erase(request=request_id)
    with pytest.raises(Conflict, match="1 requests"):
        await person.erase(tag=f"customer={ANN}")
    # Only results of the console's jobs, which can be of any account.
    erased = await person.erase(tag=f"customer={ANN}", account=other.account.id)
    assert erased == {"console_jobs": 1}
    assert (await person.erase(request=id))["receipts"] == 1

    with person.database.transaction() as connection:
        left = connection.execute(
            select(receipts.c.request_id).where(receipts.c["metadata"].is_not(None))
        )
        assert id not in set(left.scalars())


def test_events_lose_their_details_only_with_an_erasure(person: Person) -> None:
    with person.database.transaction() as connection:
        create_account(connection, "another")
    blank = {"before": None, "after": None, "reason": ""}
    for values in (blank, blank | {"actor": "x"}):
        with pytest.raises(DBAPIError, match="append-only"), person.database.transaction() as c:
            c.execute(update(audit_events).values(values))

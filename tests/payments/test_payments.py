"""Payments: events are booked once, in any order and however often they are delivered."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.accounts.accounts import Account, create_account, find_account
from gateway.billing.reconciliation import check_books
from gateway.ledger.transfers import owed
from gateway.payments.payments import (
    Applied,
    apply,
    compare_payments,
    list_payments,
    new_payment_id,
    record_payment,
    set_reference,
)
from gateway.payments.provider import InvalidEvent, PaidEvent
from gateway.payments.stripe import StripeProvider
from gateway.settings import Settings
from gateway.sql.database import Database

PAYLOADS = Path(__file__).parent / "payloads"
SECRET = "whsec_a_secret_for_tests"
AMOUNT = 25 * 10**9
PROVIDER = StripeProvider("sk_test_nobody", SECRET)


def signed(body: bytes, *, secret: str = SECRET, at: int | None = None) -> str:
    """Sign as Stripe does: HMAC-SHA-256 over the time and the body."""
    moment = int(time.time()) if at is None else at
    digest = hmac.new(secret.encode(), b"%d." % moment + body, hashlib.sha256).hexdigest()
    return f"t={moment},v1={digest}"


@dataclass
class Desk:
    """An account with an open payment of $25."""

    database: Database
    account: Account
    payment_id: str

    def payload(self, name: str, **changes: object) -> bytes:
        text = (PAYLOADS / f"{name}.json").read_text()
        short = self.payment_id.removeprefix("pay_")[:20]
        text = text.replace("{payment_id}", self.payment_id).replace("{payment}", short)
        event = json.loads(text.replace("{event}", f"{name}{short}"))
        event["data"]["object"].update(changes)
        return json.dumps(event).encode()

    def deliver(self, name: str, **changes: object) -> Applied:
        body = self.payload(name, **changes)
        event = PROVIDER.read_event(body, signed(body))
        with self.database.transaction() as connection:
            return apply(connection, event, provider="stripe")

    @property
    def balance(self) -> int:
        with self.database.transaction() as connection:
            return find_account(connection, self.account.id).posted_nanos

    @property
    def owed(self) -> int:
        with self.database.transaction() as connection:
            return owed(connection, self.account.id)

    @property
    def status(self) -> str:
        with self.database.transaction() as connection:
            return list_payments(connection, self.account.id)[0].status

    def agrees(self) -> bool:
        with self.database.transaction() as connection:
            return check_books(connection, now=datetime.now(UTC)) == []


def open_desk(database: Database) -> Desk:
    payment_id = new_payment_id()
    with database.transaction() as connection:
        account = create_account(connection, f"account {payment_id}")
        record_payment(connection, payment_id, account.id, AMOUNT, provider="stripe")
        set_reference(connection, payment_id, f"cs_test_{payment_id.removeprefix('pay_')[:20]}")
    return Desk(database, account, payment_id)


@pytest.fixture
def desk(database: Database) -> Desk:
    return open_desk(database)


def test_repeated_payment_event_is_booked_once(desk: Desk) -> None:
    told = [desk.deliver("completed") for _ in range(5)]

    assert told == ["booked", *["repeated"] * 4]
    assert (desk.balance, desk.status) == (AMOUNT, "paid")
    assert desk.deliver("async_succeeded") == "booked"
    assert desk.balance == AMOUNT
    assert desk.agrees()


def test_pending_payment_is_booked_when_it_is_paid(desk: Desk) -> None:
    assert desk.deliver("completed_unpaid") == "noted"
    assert (desk.balance, desk.status) == (0, "open")
    desk.deliver("async_succeeded")
    assert (desk.balance, desk.status) == (AMOUNT, "paid")


@pytest.mark.parametrize(("name", "status"), [("async_failed", "failed"), ("expired", "expired")])
def test_failed_payment_is_not_booked(name: str, status: str, desk: Desk) -> None:
    desk.deliver(name)
    assert (desk.balance, desk.status) == (0, status)


ORDERS: Sequence[tuple[tuple[str, ...], int]] = (
    (("completed", "refunded_part", "refunded_whole"), 0),
    (("completed", "refunded_part"), 15 * 10**9),
    (("completed", "dispute_created", "dispute_won"), AMOUNT),
    (("completed", "dispute_created", "dispute_lost"), 0),
    (("completed", "async_succeeded", "expired"), AMOUNT),
)


@pytest.mark.parametrize(("names", "left"), ORDERS)
def test_any_order_and_repetition_of_events_gives_the_same_books(
    names: tuple[str, ...], left: int, database: Database
) -> None:
    r = random.Random(5)
    for order in itertools.permutations(names):
        desk = open_desk(database)
        if "dispute_created" in names and order[0] != "completed":
            # Only disputes do not carry our id: they cannot arrive before their payment is known.
            continue
        for name in (*order, *r.choices(names, k=4)):
            desk.deliver(name)

        assert (desk.balance, desk.owed) == (left, 0), order
        assert desk.agrees()


def test_refund_of_spent_money_becomes_debt(desk: Desk) -> None:
    desk.deliver("completed")
    with desk.database.transaction() as connection:
        # Another payment's dispute has already taken it.
        apply(
            connection,
            PROVIDER.read_event(body := desk.payload("dispute_created"), signed(body)),
            provider="stripe",
        )
    desk.deliver("refunded_whole")

    assert (desk.balance, desk.owed) == (0, AMOUNT)
    with desk.database.transaction() as connection:
        assert find_account(connection, desk.account.id).status == "suspended"
    assert desk.agrees()


@pytest.mark.parametrize(
    "changes", [{"amount_total": 2499}, {"amount_total": 250000}, {"currency": "jpy"}]
)
def test_another_amount_or_currency_is_not_booked(changes: dict[str, object], desk: Desk) -> None:
    assert desk.deliver("completed", **changes) == "refused"
    assert desk.balance == 0


def test_event_of_an_unknown_payment_is_ignored(desk: Desk) -> None:
    strange = {"metadata": {}, "client_reference_id": "x", "id": "cs_x", "payment_intent": "pi_x"}
    assert desk.deliver("completed", **strange) == "unknown"
    assert desk.balance == 0


def test_only_signed_events_are_read(desk: Desk) -> None:
    body = desk.payload("completed")
    for signature in (
        "",
        "t=1,v1=00",
        signed(body, secret=""),
        signed(body, secret="whsec_another"),
        signed(body, at=int(time.time()) - 3600),
        signed(body + b" "),
    ):
        with pytest.raises(InvalidEvent):
            PROVIDER.read_event(body, signature)
    for nonsense in (b"", b"[]", b"{}", b'{"type": "charge.refunded", "data": {"object": {}}}'):
        with pytest.raises(InvalidEvent):
            PROVIDER.read_event(nonsense, signed(nonsense))


def test_missing_webhook_secret_prevents_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRIPE_API_KEY", "sk_test_nobody")
    for secret in (None, ""):
        if secret is not None:
            monkeypatch.setenv("STRIPE_WEBHOOK_SECRET", secret)
        with pytest.raises(ValidationError, match="STRIPE_WEBHOOK_SECRET is empty"):
            Settings()
    with pytest.raises(ValueError, match="webhook secret is empty"):
        StripeProvider("sk_test_nobody", "")


def test_the_providers_list_is_compared_with_the_books(desk: Desk) -> None:
    desk.deliver("completed")
    reference = f"cs_test_{desk.payment_id.removeprefix('pay_')[:20]}"
    with desk.database.transaction() as connection:
        assert compare_payments(connection, [PaidEvent(reference, 2500)], provider="stripe") == []
        found = compare_payments(
            connection, [PaidEvent(reference, 2400), PaidEvent("cs_lost", 500)], provider="stripe"
        )

    assert [(each.rule, each.subject) for each in found] == [("R12", reference), ("R12", "cs_lost")]

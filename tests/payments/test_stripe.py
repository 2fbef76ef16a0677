"""A payment from end to end over real HTTP to a fake of Stripe: page, event, credit."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.payments.provider import PaidEvent, ProviderFailed
from gateway.payments.stripe import StripeProvider
from tests.databases import Databases
from tests.payments.fake_stripe import FakeStripe, fake_stripe
from tests.payments.test_payments import PAYLOADS, SECRET, signed
from tests.stack import Stack, running


@pytest.fixture
def stripe() -> Iterator[FakeStripe]:
    with fake_stripe() as fake:
        yield fake


@pytest.fixture
def stack(
    tmp_path: Path,
    postgres: str,
    valkey: str,
    stripe: FakeStripe,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Stack]:
    monkeypatch.setenv("STRIPE_API_KEY", "sk_test_a_key_for_tests")
    monkeypatch.setenv("STRIPE_WEBHOOK_SECRET", SECRET)
    monkeypatch.setenv("TOLLGATE_STRIPE_API_BASE", stripe.url)
    url = Databases("sqlite", tmp_path, postgres).make()
    with running(tmp_path / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}") as made:
        yield made


PAGES = {"success_url": "https://example.com/thanks", "cancel_url": "https://example.com/"}


def test_a_customer_pays_and_has_credit(stack: Stack, stripe: FakeStripe) -> None:
    caller = stack.caller(credit="0")

    made = caller.http.post("/v1/payments", json={"amount": "25", **PAGES}).json()

    assert made["url"] == "https://checkout.stripe.com/c/pay/cs_test_1"
    (asked,) = stripe.asked
    assert asked["Idempotency-Key"] == asked["client_reference_id"] == made["id"]
    assert asked["payment_intent_data[metadata][payment_id]"] == made["id"]
    assert asked["line_items[0][price_data][unit_amount]"] == "2500"
    text = (PAYLOADS / "completed.json").read_text().replace("{payment_id}", made["id"])
    body = text.replace("cs_test_{payment}", "cs_test_1").encode()
    headers = {"Stripe-Signature": signed(body)}
    for _ in range(2):
        told = caller.http.post("/webhooks/stripe", content=body, headers=headers)
        assert told.is_success
    assert caller.http.get("/v1/balance").json()["posted"] == "25"
    assert caller.http.get(f"/v1/payments/{made['id']}").json()["status"] == "paid"
    assert caller.http.get("/v1/ledger").json()["data"][0]["actor"] == "stripe"
    assert stack.findings() == []

    # The fake lists this payment as paid, so the books agree with it as well.
    boss = stack.caller(credit="0", scopes=("read", "admin"))
    assert boss.http.post("/v1/admin/reconcile").json()["findings"] == []

    forged = caller.http.post("/webhooks/stripe", content=body)
    assert (forged.status_code, forged.json()["error"]["code"]) == (400, "bad_signature")
    huge = caller.http.post("/webhooks/stripe", content=b"x" * 300_000, headers=headers)
    assert huge.status_code == 413
    for amount in ("4.99", "10000.01", "5.001", "-5", "x", "1e9"):
        refused = caller.http.post("/v1/payments", json={"amount": amount, **PAGES})
        assert refused.status_code == 400, amount
    assert caller.http.get("/v1/payments/pay_nobody").status_code == 404
    stripe.broken = True
    failed = caller.http.post("/v1/payments", json={"amount": "25", **PAGES})
    assert failed.json()["error"]["code"] == "payment_provider_failed"
    assert "a_key_for_tests" not in (stack.directory / "gateway.log").read_text()


async def test_the_list_of_payments_is_read(stripe: FakeStripe) -> None:
    provider = StripeProvider("sk_test_nobody", SECRET, base=stripe.url)

    assert list(await provider.paid_since(datetime(2026, 1, 1, tzinfo=UTC))) == [
        PaidEvent("cs_test_1", 2500)
    ]


async def test_provider_error_does_not_reveal_the_key(stripe: FakeStripe) -> None:
    stripe.broken = True
    provider = StripeProvider("sk_test_nobody", SECRET, base=stripe.url)

    with pytest.raises(ProviderFailed) as caught:
        await provider.checkout(
            "pay_1", 500, account="a", success_url="https://a", cancel_url="https://b"
        )
    assert "sk_test" not in str(caught.value)

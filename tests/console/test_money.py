"""Usage, payments, months, credit notes, chargebacks and the proof, as their pages do them."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import select, update

from gateway.accounts.accounts import find_account
from gateway.accounts.keys import create_key
from gateway.billing.proof import check_books
from gateway.billing.statements.statement import invoices_of
from gateway.billing.usage.report import Filters, Group, read_span, total, usage
from gateway.billing.usage.rollups import HOURS_MAX, build_due, build_due_days
from gateway.console.views.usage import usage_table
from gateway.ledger.prices import set_price
from gateway.ledger.transfers import owed
from gateway.pricing import Component, Price, format_usd
from gateway.sql.database import Database
from gateway.tables.core import accounts
from gateway.tables.payments import payments
from tests.console.seeding import PEPPER, Seeded, Seeder, seed
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.payments.fake_stripe import FakeStripe, fake_stripe
from tests.payments.test_payments import PAYLOADS, SECRET, signed
from tests.stack import CATALOG


@pytest.fixture(scope="module")
def stripe() -> Iterator[FakeStripe]:
    with fake_stripe() as fake:
        yield fake


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory,
    postgres: str,
    valkey: str,
    mid_month: None,
    stripe: FakeStripe,
) -> Iterator[tuple[Installation, Seeded]]:
    """An installation with a week of traffic, a provider of payments, and a month that ended."""
    directory = tmp_path_factory.mktemp("money")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    spend_last_month(database, catalog)
    seeded = seed(database, catalog)
    seal_hours(database)
    database.dispose()
    paying = {
        "stripe_api_key": "sk_test_a_key_for_tests",
        "stripe_webhook_secret": SECRET,
        "stripe_api_base": stripe.url,
        "close_months": False,
    }
    with installed(directory / "home", url, valkey, **paying) as made:
        yield made, seeded


def last_month() -> str:
    return (datetime.now(UTC).replace(day=1) - timedelta(days=1)).strftime("%Y-%m")


def spend_last_month(database: Database, catalog: Path) -> None:
    """Let an account spend some dollars in the month before this one."""
    end = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    with database.transaction() as connection:
        seeder = Seeder(connection, catalog, since=end - timedelta(days=20))
        vega, key = seeder.account("vega", "9")
        video = seeder.entry("text-to-video")
        for hours in range(6):
            seeder.request(vega, key, end - timedelta(days=3, hours=hours), entry=video)


def seal_hours(database: Database) -> None:
    """Build the hours before the gateway starts, which would hold the only writer for seconds."""
    built = HOURS_MAX
    while built == HOURS_MAX:
        with database.transaction() as connection:
            built = build_due(connection, datetime.now(UTC))
    with database.transaction() as connection:
        while build_due_days(connection):
            pass


@pytest.fixture(scope="module")
def finance(filled: tuple[Installation, Seeded]) -> Browser:
    return filled[0].visitor("finance")


@pytest.fixture(scope="module")
def owner(filled: tuple[Installation, Seeded]) -> Browser:
    return filled[0].visitor("owner", account="atlas")


def text_of(html: str) -> str:
    """Return the text of a page, with amounts in one piece."""
    joined = re.sub(r"</?(b|span)\b[^>]*>", "", html)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", joined)))


def test_usage_page_has_the_figures_of_the_report(
    filled: tuple[Installation, Seeded], owner: Browser
) -> None:
    installation, seeded = filled
    own = Filters((seeded.accounts["atlas"].id,))
    with installation.database.transaction() as connection:
        span = read_span(None, None, "UTC", now=datetime.now(UTC))
        groups = usage(connection, span, ["model", "day"], own)
        table = usage_table(groups, [], by=("model", "day"), metric="net")
    path = "/console/usage?by=model&by2=day&vs=before"

    page = owner.get(path).text
    rows = list(csv.DictReader(io.StringIO(owner.get(f"{path}&format=csv").text)))

    assert [(row["model"], row["day"]) for row in rows] == [
        tuple(row.labels.values()) for row in table.rows
    ]
    for row, shown in zip(rows, re.findall(r'<tr data-value="([^"]+)"', page), strict=True):
        assert row["net_cost"] == shown == row["net_cost_difference"]
    whole = total(groups)
    assert format_usd(whole.cost_nanos - whole.refund_nanos) in text_of(page)
    assert "= sum, exact" in text_of(page)
    assert f"Usage of atlas: ${format_usd(whole.cost_nanos - whole.refund_nanos)}" in text_of(page)


@pytest.mark.parametrize("by", ["tag:project", "key", "task", "hour", "month"])
def test_groups_of_each_dimension_sum_to_the_same(owner: Browser, by: str) -> None:
    def sums(by: str) -> tuple[str, ...]:
        found = csv.DictReader(io.StringIO(owner.get(f"/console/usage?by={by}&format=csv").text))
        nanos = [round(float(row["net_cost"]) * 1e9) for row in found]
        return (format_usd(sum(nanos)),)

    assert sums(by) == sums("model")


def test_largest_are_rows_and_the_others_are_one() -> None:
    groups = [Group({"model": f"m{n:02d}"}, requests=1, cost_nanos=n) for n in range(1, 21)]

    table = usage_table(groups, None, by=("model",), metric="cost")
    everything = usage_table(groups, None, by=("model",), metric="cost", top=None)

    assert [row.value for row in table.rows] == [*range(20, 10, -1), sum(range(1, 11))]
    assert table.rows[-1].labels == {"model": "other (10)"}
    assert table.total.value == everything.total.value == sum(row.value for row in table.rows)
    assert len(everything.rows) == 20


def test_labels_look_closer_and_tags_filter(owner: Browser, finance: Browser) -> None:
    page = owner.get("/console/usage?by=day").text
    day = re.search(r'href="(/console/usage\?[^"]*by=hour[^"]*)"', page)
    assert day is not None
    closer = owner.get(unescape(day[1]))
    assert closer.status_code == 200
    assert "T" in text_of(closer.text).partition("Share")[2][:40]

    tagged = owner.get("/console/usage?by=model&tag=project%3Datlas&format=csv").text
    assert 0 < tagged.count("\n") < owner.get("/console/usage?by=day").text.count("<tr")
    assert owner.get("/console/usage?tag=atlas").status_code == 400
    assert finance.get("/console/usage?key=tg_x").status_code == 400
    assert owner.get("/console/usage?by=account").status_code == 400
    empty = owner.get("/console/usage?from=2020-01-01&to=2020-01-02").text
    assert "The newest booking is of" in text_of(empty)


def test_span_in_which_nothing_is_booked_for_certain_has_no_file(owner: Browser) -> None:
    second = quote((datetime.now(UTC) - timedelta(seconds=1)).isoformat())
    for path in ("/console/usage", "/console/usage/bookings"):
        shown = owner.get(f"{path}?from={second}")
        assert shown.status_code == 200
        assert "/console/usage/charges" not in shown.text
        assert "/console/usage/charges" in owner.get(path).text


def test_every_charge_is_a_file_with_the_digest_that_the_page_has(owner: Browser) -> None:
    link = re.search(r'href="(/console/usage/charges[^"]+)"', owner.get("/console/usage").text)
    assert link is not None
    path = unescape(link[1])

    started = owner.post(path, {"profile": "native", "format": "csv"})
    page = owner.finished(started.headers["location"])

    download = re.search(r'href="(/console/usage/file[^"]*format=csv[^"]*)"', page)
    assert download is not None
    file = owner.get(unescape(download[1]))
    assert file.headers["content-type"].startswith("text/csv")
    assert hashlib.sha256(file.content).hexdigest() in page
    rows = list(csv.DictReader(io.StringIO(file.text)))
    amount = format_usd(sum(int(row["amount_nanos"]) for row in rows))
    assert f"{amount}" in text_of(page)
    assert f"Parquet {len(rows)}" not in text_of(page)
    focus = unescape(download[1]).replace("profile=native", "profile=focus")
    assert "BilledCost" in owner.get(focus).text.partition("\n")[0]


# Stripe's library calls httpx in an old way; elsewhere the gateway is another process.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_payment_is_shown_as_booked_only_once_it_is(
    filled: tuple[Installation, Seeded], owner: Browser, stripe: FakeStripe
) -> None:
    installation, _ = filled
    policy = owner.get("/console/payments").headers["content-security-policy"]
    assert "form-action 'self' https://checkout.stripe.com;" in policy

    begun = owner.post("/console/payments", {"amount": "$25"})

    assert begun.headers["location"] == "https://checkout.stripe.com/c/pay/cs_test_1"
    id = installation.execute(select(payments.c.id)).scalar_one()
    assert stripe.asked[-1]["success_url"] == f"http://127.0.0.1:8000/console/payments/{id}"
    waiting = owner.get(f"/console/payments/{id}").text
    assert "$25 has not come yet" in waiting
    assert 'hx-trigger="every 2s' in waiting

    text = (PAYLOADS / "completed.json").read_text().replace("{payment_id}", id)
    body = text.replace("cs_test_{payment}", "cs_test_1").encode()
    told = installation.client.post(
        "/webhooks/stripe", content=body, headers={"Stripe-Signature": signed(body)}
    )
    assert told.is_success
    page = owner.get(f"/console/payments/{id}").text
    assert "$25 booked" in page
    assert "every 2s" not in page
    assert id in owner.get("/console/payments").text
    (event,) = installation.events(act="payment.create")
    assert event.subject == f"payment {id}"

    assert (
        installation.visitor("viewer", account="atlas").get("/console/payments").status_code == 404
    )
    other = installation.visitor("owner", account="zenith")
    assert other.get(f"/console/payments/{id}").status_code == 404
    assert installation.visitor("auditor").get(f"/console/payments/{id}").status_code == 200
    stripe.broken = True
    failed = owner.post("/console/payments", {"amount": "25"})
    stripe.broken = False
    assert failed.status_code == 503
    assert "nothing was charged" in failed.text
    assert 'id="problem-amount"' in owner.post("/console/payments", {"amount": "0.001"}).text


def test_month_is_rehearsed_closed_verified_and_credited(
    filled: tuple[Installation, Seeded], finance: Browser
) -> None:
    installation, _ = filled
    month = last_month()
    path = f"/console/periods/{month}"
    rebates = {"account": "vega", "from0": "1", "percent0": "7.5"}
    assert finance.post("/console/periods/rebates", rebates).status_code == 303
    assert "7.5 % beyond $1" in text_of(finance.get("/console/periods").text)
    wrong = {**rebates, "percent0": "many"}
    assert "is not a percentage" in finance.post("/console/periods/rebates", wrong).text

    finance.post(path, {"do": "rehearse"})
    rehearsed = text_of(finance.finished(path))
    assert "Nothing is written yet" in rehearsed
    assert f"Close {month}, and issue 1 invoice" in rehearsed
    finance.post(path, {"do": "close"})
    assert f"{month} is closed" in finance.finished(path)
    finance.post(path, {"do": "verify"})
    assert "The seal holds" in finance.finished(path)

    with installation.database.transaction() as connection:
        (invoice,) = invoices_of(connection, None, month)
        vega = find_account(connection, "vega")
    note = f"/console/statements/{month}/credit-note"
    assert note in finance.get(f"/console/statements/{month}?account=vega").text
    review = finance.get(f"{note}?account=vega&amount=0.5&reason=late&do=review").text
    assert "Nothing is booked yet" in review
    assert f"${format_usd(vega.posted_nanos + 500_000_000)}" in text_of(review)
    too_much = finance.get(f"{note}?account=vega&amount=99&reason=late&do=review")
    assert 'id="problem-amount"' in too_much.text
    booked = finance.post(f"{note}?account=vega", {"amount": "0.5", "reason": "late"})
    assert booked.status_code == 303
    with installation.database.transaction() as connection:
        found = invoices_of(connection, vega.id)
    assert [(each.kind, each.corrects) for each in found][-1] == ("credit_note", invoice.number)
    acts = {event.act for event in installation.events()}
    assert {"period.close", "invoice.credit", "rebate.set"} <= acts


def test_closing_asks_for_a_proof_and_auditors_only_read(
    filled: tuple[Installation, Seeded],
) -> None:
    installation, _ = filled
    path = f"/console/periods/{last_month()}"
    auditor = installation.visitor("auditor")
    assert auditor.get(path).status_code == 200
    assert auditor.post(path, {"do": "verify"}).status_code == 404
    assert installation.visitor("owner", account="atlas").get(path).status_code == 404

    late = installation.visitor("finance")
    installation.forget_last_proof()
    for where, form in (
        (path, {"do": "close"}),
        ("/console/periods/rebates", {"from0": "1", "percent0": "5"}),
        (
            "/console/credit/chargeback?account=atlas",
            {"amount": "1", "reason": "x", "reference": "y"},
        ),
    ):
        answer = late.post(where, form)
        assert answer.headers.get("location", "").startswith("/console/prove"), where


def test_chargeback_shows_what_it_does_before(
    filled: tuple[Installation, Seeded], finance: Browser
) -> None:
    installation, _ = filled
    path = "/console/credit/chargeback?account=zenith"
    sent = {"amount": "1000", "reason": "disputed", "reference": "d-1"}

    review = text_of(
        finance.get(f"{path}&amount=1000&reason=disputed&reference=d-1&do=review").text
    )
    assert "the account is suspended" in review
    for _ in range(2):
        assert finance.post(path, sent).status_code == 303

    with installation.database.transaction() as connection:
        debt = owed(connection, find_account(connection, "zenith").id)
        assert check_books(connection, now=datetime.now(UTC)) == []
    assert f"Debt $0, then ${format_usd(debt)}" in review
    assert len(installation.events(act="credit.charge_back")) == 1


def test_home_says_what_changes_and_ends_soon(
    filled: tuple[Installation, Seeded], owner: Browser
) -> None:
    installation, seeded = filled
    soon = datetime.now(UTC) + timedelta(days=2)
    atlas = seeded.accounts["atlas"].id
    with installation.database.transaction() as connection:
        create_key(connection, atlas, pepper=PEPPER, name="short", expires_at=soon)
        dear = Price((Component("request", 900_000_000),))
        set_price(connection, "Veo3", dear, starts_at=soon, actor="test", reason="test")

    page = text_of(owner.get("/console/home").text)

    assert "The key short expires" in page
    assert "The price of Veo3 changes" in page
    assert "$0.9 / request" in page


def test_damaged_books_show_the_finding_first(
    filled: tuple[Installation, Seeded], finance: Browser, owner: Browser
) -> None:
    installation, seeded = filled
    damaged = accounts.c.id == seeded.accounts["atlas"].id
    more = update(accounts).where(damaged)
    installation.execute(more.values(posted_nanos=accounts.c.posted_nanos + 1))

    finance.post("/console/ledger/prove")
    page = finance.finished("/console/ledger")
    installation.execute(more.values(posted_nanos=accounts.c.posted_nanos - 1))

    assert "The books do not agree" in page
    assert re.search(r'class="band bad">.*<b>R2</b>', page, re.S)
    assert "<details" not in page[page.index('class="band bad"') : page.index("<b>R2</b>")]
    assert "R2</b>" not in owner.get("/console/ledger").text.partition("<details")[0]
